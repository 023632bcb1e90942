# SPDX-License-Identifier: Apache-2.0
"""What launches a fleet says commands that this package accepts."""

import re
import shlex

import yaml
from launch_cloud import ROOT

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.devices.config import parse_resources


def fleet_config(words):
    """The validated config of a command line."""
    options = [word for word in words if word.startswith("--config.")]
    config = override(None, [f"--config={ROOT / 'configs/math.py'}:gsm8k", *options])
    validate(config)
    assert config.placement == "fleet" and config.fleet.address == "auto"
    return config


def test_the_kuberay_job_asks_for_what_its_groups_have():
    [job] = yaml.safe_load_all((ROOT / "launch/gke.yaml").read_text())
    config = fleet_config(shlex.split(job["spec"]["entrypoint"]))
    groups = {
        group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    }
    for name, text in (("trainer", config.fleet.trainer), ("searcher", config.fleet.searcher)):
        wanted = parse_resources(text)
        group = groups[{"trainer": "trainer", "searcher": "searchers"}[name]]
        [container] = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["google.com/tpu"] == f"{wanted['TPU']:.0f}"
        assert f'"{name}": 1' in group["rayStartParams"]["resources"] and wanted[name] == 1
    most = groups["searchers"]["maxReplicas"]
    assert config.fleet.max_searchers == most * config.num_searchers
    assert config.mesh.data * config.mesh.fsdp * config.mesh.model == 4


def test_the_page_shows_a_command_that_is_accepted():
    text = (ROOT / "docs/launch/fleet.md").read_text()
    first = text.split("tba_jax.main --config=math", 1)[1].split("\n\n")[0]
    options = re.findall(r"--config\.[\w.]+=\w+", first)
    config = override(None, [f"--config={ROOT / 'configs/math.py'}", *options])
    validate(config)
    assert config.placement == "fleet" and config.fleet.address == "local"
