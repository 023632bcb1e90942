# SPDX-License-Identifier: Apache-2.0
"""Presets have one meaning: by name, by the repository's file, and from a file of one's own."""

from pathlib import Path

import pytest

from tba_jax.config.advice import notes
from tba_jax.config.command_line import override
from tba_jax.config.presets import FOLDER, load, names, path_of
from tba_jax.config.rules import validate
from tba_jax.config.schema import ConfigError

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


def test_a_name_is_a_preset_whatever_lies_in_the_folder_and_a_path_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math").write_text("raise AssertionError\n")
    assert path_of("math:gsm8k") == (FOLDER / "math.py", "gsm8k")
    assert path_of("./math") == (Path("./math"), "")


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
