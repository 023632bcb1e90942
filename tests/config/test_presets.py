# SPDX-License-Identifier: Apache-2.0
"""Presets have one meaning, by name or file, and objective.preset is the settings it stands for."""

from pathlib import Path

import jax
import pytest

import tba_jax
from tba_jax.config.advice import notes
from tba_jax.config.command_line import override
from tba_jax.config.methods import METHODS
from tba_jax.config.presets import load, names, path_of
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, ConfigError, make_config
from tba_jax.devices.site import reading_mesh
from tba_jax.planning.programs import Ids
from tba_jax.run.model_parts import make_layout
from tba_jax.train.objectives import make_objective


@pytest.mark.parametrize("name", METHODS)
def test_every_preset_is_valid_on_the_main_job_and_is_no_setting(name):
    config = override(None, ["--config=math", f"--config.objective.preset={name}"])
    validate(config)
    assert not hasattr(config.objective, "preset")
    made = config.objective.built
    is_exact = made == make_objective("tb", {"importance": "none"})
    assert is_exact == (name in ("tba", "gflownet_sync"))
    layout = make_layout(config, Ids(), reading_mesh(1, jax.devices()))
    assert layout.has_advantages == (name == "vineppo")


def test_what_is_given_beside_a_preset_wins_and_what_was_there_before_does_not():
    given = ["--config.objective.kl_clamp=0", "--config.objective.preset=tba_prime"]
    config = override(make_config({"objective.log_z": "learned"}), given)
    o = config.objective.built
    found = [o.value(name) for name in ("kl_clamp", "kl_center", "log_z")]
    assert found == [0.0, "behavior", "vargrad"]
    config = tba_jax.load_config("math", objective={"preset": "dapo"})
    assert config.objective.name == "dapo" and config.objective.own == ()


def test_a_name_drops_what_only_other_objectives_have():
    built = override(None, ["--config=math"]).objective.built
    assert built.value("importance") == "token_clip"
    assert override(None, ["--config=math", "--config.objective.name=rloo"]).objective.own == ()
    given = ["--config=math:gsm8k", "--config.objective.name=tb"]
    assert override(None, given).objective.own == (("importance", "none"), ("scale", "paper"))


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="has no 'dap'; there are tba, .*; did you mean dapo?"):
        override(Config(), ["--config.objective.preset=dap"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0: objective.name=tb divides by beta"),
        ({"name": "rloo", "log_z": "learned"}, "log_z = 'learned': objective.name=rloo has no"),
        ({"kl_center": "behavior", "log_z": "learned"}, "kl_center = .*: a learned log Z has no"),
        ({"epochs": 2}, "epochs = 2: objective.name=tb has no such setting; it has scale"),
    ],
)
def test_switches_that_mean_nothing_together_are_refused(fields, message):
    config = make_config({f"objective.{name}": value for name, value in fields.items()})
    with pytest.raises(ConfigError, match=f"config.objective.{message}"):
        validate(config)


def test_values_of_states_are_drawn_for_who_reads_them_and_by_the_trainers_own_process():
    fields = {"objective.name": "vineppo", "objective.vine_tokens": 4}
    validate(make_config(fields))
    for changed, message in (
        ({"objective.vine_tokens": 0}, "vine_tokens = 0: must be at least 1"),
        ({"search.stop_strings": ("\n",)}, "stop_strings = .*a text that began before"),
        ({"placement": "hosts"}, "placement = 'hosts': state values"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(make_config(fields | changed))


ROOT = Path(__file__).parents[2]
OWN = """
from tba_jax.config import presets
def get_config(preset='gsm8k'):
    config = presets.get_config('math', preset)
    config.num_steps = 3
    return config
"""


def test_the_names_are_those_of_the_files():
    files = {"agent", "custom", "math", "tldr", "redteam"}
    assert {name.split(":")[0] for name in names()} == files
    assert {p.stem for p in (ROOT / "configs").glob("*.py")} == files
    assert "math:gsm8k" in names() and "tldr:pythia2.8b" in names() and len(names()) == 24


@pytest.mark.parametrize("name", sorted({*names()} - {"custom:default"}))  # it needs data
def test_a_name_and_the_file_of_the_repository_are_the_same_valid_config(
    name, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    file, preset = name.split(":")
    config = load(name)
    validate(config)
    assert config.name == f"{file}/{preset}"
    assert load(f"{ROOT / 'configs' / file}.py:{preset}") == config
    # It also runs in one thread by that flag alone, and says what has no effect then.
    config = override(None, [f"--config={name}", "--config.driver=sync"])
    validate(config)
    said = [note.split(" ")[0] for note in notes(config) if "driver=sync" in note]
    assert said == ["replay.pace=trainer"] * (config.replay.pace == "trainer")


def test_a_file_of_ones_own_may_change_a_preset(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    config = override(None, [f"--config={path}", "--config.seed=2"])
    assert (config.name, config.num_steps, config.seed) == ("math/gsm8k", 3, 2)
    assert config.task.name == "gsm8k" and load("math:gsm8k").num_steps == 700


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero. Correct the file"),
        ("NAMES = {}", r"has no get_config\(PRESET\) that returns a ConfigDict"),
        (OWN.replace("num_steps = 3", "task.nam = 'x'"), "Error: .*nam.*Correct the file"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as info:
        load(str(path))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(("name", "near"), [("configs/math.py", "math"), ("redtaem", "redteam")])
def test_an_unknown_name_lists_the_presets_and_the_nearest(name, near, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = rf"there are agent:toy, agent:qwen3_1_7b, .*mean {near}\?$"
    with pytest.raises(ConfigError, match=listed) as info:
        path_of(name)
    assert "\n" not in str(info.value)
