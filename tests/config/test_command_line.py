# SPDX-License-Identifier: Apache-2.0
"""`--config` and `--config.FIELD=VALUE` mean the same in every command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax.commands import evaluate, export, sweep
from tba_jax.commands.entry_point import run_command
from tba_jax.config.command_line import override
from tba_jax.config.schema import Config, ConfigError, difference, flatten

ROOT = Path(__file__).parents[2]
# ml_collections loads config files through a deprecated function of importlib.

MATH = f"--config={ROOT / 'configs' / 'math.py'}"


def changed(config):
    """Fields that are not at their default."""
    return difference(flatten(Config()), flatten(config))


def test_a_file_a_preset_and_fields_that_override_it():
    config = override(
        None, [MATH + ":gsm8k", "--config.objective.beta=0.02", "--config.task.chat=True"]
    )
    assert (config.name, config.num_steps) == ("math/gsm8k", 700)
    assert (config.objective.beta.plain, config.task.chat) == (0.02, True)


def test_fields_override_a_config_that_is_given():
    config = override(Config(), ["--config.num_steps=7"])
    assert changed(config) == ["num_steps: 100 -> 7"]
    assert changed(override(Config(), [])) == []


@pytest.mark.parametrize("given", [None, Config()], ids=["file", "config"])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.task.max_tokens=3", "no field 'task.max_tokens'; did you mean "),
        ("--config.num_steps=many", "flag --config.num_steps=many: invalid literal"),
        ("--modle=x", "Unknown command line flag 'modle'"),
        ("x", "unexpected argument 'x'"),
    ],
)
def test_a_mistake_is_one_line(given, argument, message):
    file = [] if given else [MATH]
    with pytest.raises(ConfigError, match=message) as info:
        override(given, [*file, argument])
    assert "\n" not in str(info.value)


def test_evaluate_takes_overrides(capsys):
    assert evaluate.main([MATH, "--config.task.num_eval_prompts=8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["n"], result["num_skipped"], result["num_failed"]) == (8, 0, 0)
    assert 0 < result["response_length_mean"] <= 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([MATH, "--config.steps=1"], "config has no field 'steps'; did you mean num_steps"),
        ([MATH, "--workdir=here"], "Leave out --config and --model, or --workdir"),
        (["--config.num_steps=1"], "Add --workdir=DIR, or --config"),
    ],
)
def test_evaluate_refuses_in_one_line(arguments, message, capsys):
    assert run_command(lambda: evaluate.main(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err
    assert len(err.splitlines()) == 1


ADDRESS = "gs://bucket/run"
MOUNT = "is an address; wanted a folder. Mount the bucket (gcsfuse) or a share"


NO_STORE = "ftp://host/run"
WANT = "is not an address of a work directory. Give gs://BUCKET/FOLDER, or a"


def test_main_refuses_the_address_of_what_is_no_object_store(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tba_jax.main", MATH, f"--workdir={NO_STORE}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {NO_STORE!r} {WANT}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # no folder `ftp:`


@pytest.mark.parametrize(
    ("command", "arguments", "name"),
    [
        (export, ["--workdir=run", f"--out={ADDRESS}"], "--out"),
        (sweep, ["--config=math", f"--out={ADDRESS}"], "--out"),
    ],
)
def test_commands_refuse_an_address_of_what_they_write(
    command, arguments, name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run_command(lambda: command.main(arguments)) == 2
    assert f": {name}={ADDRESS} {MOUNT}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
