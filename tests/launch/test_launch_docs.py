# SPDX-License-Identifier: Apache-2.0
"""The jobs that docs/launch and launch/ show are ones that this package accepts there."""

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tba_jax.config.command_line import override
from tba_jax.config.resolved import asked
from tba_jax.config.rules import validate
from tba_jax.devices.config import parse_resources
from tba_jax.devices.placement import divide

ROOT = Path(__file__).parents[2]
HOSTS = 4


def config_of(text, preset="math"):
    """The validated config of the `--config.FIELD=VALUE` arguments in a text."""
    arguments = re.findall(r"--config\.[\w.]+=[^\s\\]+", text)
    config = override(None, [f"--config={preset}", *arguments])
    validate(config)
    return config


@pytest.mark.parametrize(
    ("page", "number", "kind", "chips", "layout"),
    [
        ("tpu_pod.md", 0, "TPU v5 lite", 4, "shared"),
        ("clusters.md", 0, "TPU v5 lite", 4, "shared"),  # xpk
        ("clusters.md", 1, "TPU v5 lite", 4, "shared"),  # JobSet
        ("clusters.md", 2, "gpu", 8, "split"),  # Slurm
    ],
)
def test_a_documented_pod_job_has_a_trainer_and_searchers_on_every_host(
    page, number, kind, chips, layout
):
    text = (ROOT / "docs" / "launch" / page).read_text()
    jobs = [re.split(r"\n\n|```|resources:", rest)[0] for rest in text.split("tba_jax.main")[1:]]
    jobs = [x for x in jobs if "num_searchers" in x and "placement=hosts" not in x]
    config = config_of(re.sub(r"[\"'\]]", " ", jobs[number]), "math:gsm8k")
    devices = [
        SimpleNamespace(platform=kind[:3].lower(), device_kind=kind, process_index=i // chips, id=i)
        for i in range(HOSTS * chips)
    ]
    arrangement = divide(config.placement, devices, asked(config), process_index=HOSTS - 1)
    assert arrangement.placement == layout
    assert {d.process_index for d in arrangement.trainer} == set(range(HOSTS))
    assert len(arrangement.groups) == config.num_searchers // HOSTS > 0


def test_the_jobs_of_fleets_ask_for_what_their_groups_have():
    text = (ROOT / "docs/launch/fleet.md").read_text()
    first = text.split("tba_jax.main --config=math", 1)[1].split("\n\n")[0]
    assert config_of(first).placement == "fleet"
    [job] = yaml.safe_load_all((ROOT / "launch/gke.yaml").read_text())
    config = config_of(" ".join(shlex.split(job["spec"]["entrypoint"])), "math:gsm8k")
    assert config.placement == "fleet" and config.fleet.address == "auto"
    groups = {x["groupName"]: x for x in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    for name, group, asked_for in (
        ("trainer", groups["trainer"], config.fleet.trainer),
        ("searcher", groups["searchers"], config.fleet.searcher),
    ):
        wanted = parse_resources(asked_for)
        [container] = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["google.com/tpu"] == f"{wanted['TPU']:.0f}"
        assert f'"{name}": 1' in group["rayStartParams"]["resources"] and wanted[name] == 1
    most = groups["searchers"]["maxReplicas"]
    assert config.fleet.max_searchers == most * config.num_searchers


def test_the_slurm_script_starts_the_processes_of_a_job(tmp_path):
    """With a fake srun that runs the tasks of two nodes one after the other."""
    fakes = {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; '
        'for i in 0 1; do SLURM_PROCID=$i "$@"; done',
        "python": 'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS: $*"',
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)}
    env |= {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NTASKS": "2"}
    command = [ROOT / "launch/slurm.sh", "tba_jax.main", "--config=math", "--workdir=a b"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        f"{i} of 2 at node7:12345: -m tba_jax.main --config=math --workdir=a b" for i in (0, 1)
    ], done.stderr
