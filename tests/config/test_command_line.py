# SPDX-License-Identifier: Apache-2.0
"""`--config` and `--config.FIELD=VALUE` mean the same in every command."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax.commands import evaluate
from tba_jax.config.command_line import override
from tba_jax.config.schema import Config, ConfigError, difference, flatten

ROOT = Path(__file__).parents[2]
MATH = f"--config={ROOT / 'configs' / 'math.py'}"


def test_a_file_a_preset_and_fields_that_override_it():
    config = override(None, [MATH + ":gsm8k", "--config.objective.beta=0.02"])
    assert (config.name, config.num_steps) == ("math/gsm8k", 700)
    assert config.objective.beta.plain == 0.02
    config = override(Config(), ["--config.num_steps=7"])
    assert difference(flatten(Config()), flatten(config)) == ["num_steps: 100 -> 7"]
    # A taskset is its own data, unless other data is named.
    task = override(None, [MATH, "--config.task.environment=verifiers:sums"]).task
    assert (task.name, task.data_path) == ("custom", "verifiers:sums")
    assert dataclasses.replace(task, data_path="a").replaced({"name": "math"}).data_path == "a"
    assert task.replaced({"environment": "verifiers:b"}).data_path == "verifiers:b"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("search.stop_ids=5", (5,)),
        ("task.reward_weights=1,0.5", (1.0, 0.5)),
        ("lora.modules=q,v", ("q", "v")),
        ("task.chat=True", True),
        ("task.chat=thinks=False", "thinks=False"),
        ("replay.priority_temperature=inf", float("inf")),
    ],
)
def test_a_text_becomes_a_value_of_the_fields_type(text, value):
    name = text.partition("=")[0]
    config = override(None, ["--config=math", f"--config.{text}"])
    section, _, field = name.partition(".")
    found = getattr(getattr(config, section), field)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.task.max_tokens=3", "no field 'task.max_tokens'; did you mean "),
        ("--config.lr=3", "no field 'lr'; did you mean optimizer.learning_rate"),
        ("--config.search.stop_ids=a,b", "config.search.stop_ids = 'a,b': must be a list"),
        ("--modle=x", "unexpected argument '--modle=x'"),
    ],
)
def test_a_mistake_is_one_line(argument, message):
    with pytest.raises(ConfigError, match=message) as info:
        override(None, [MATH, argument])
    assert "\n" not in str(info.value)


@pytest.mark.slow
def test_evaluate_takes_overrides(capsys, tmp_path):
    assert evaluate.main([MATH, "--config.task.num_eval_prompts=8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["n"], result["num_skipped"], result["num_failed"]) == (8, 0, 0)
    assert 0 < result["response_length_mean"] <= 16
    body = "[None if int(a) % 2 else 1.0 for a in answer]"
    (tmp_path / "some.py").write_text(f"def some(completions, answer):\n    return {body}\n")
    reward = f"--config.task.reward={tmp_path / 'some.py'}:some"
    assert evaluate.main([MATH, "--config.task.num_eval_prompts=8", reward]) == 0
    text = r"on 8 held-out prompts \([1-7] responses have no reward, counted as 0\)"
    assert re.search(text, capsys.readouterr().out)


def test_main_refuses_in_one_line_and_writes_nothing(tmp_path):
    done = run_main(tmp_path, "--workdir=run[1]")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "run[1] contains one of" in done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_dry_run_prints_the_resolved_config_from_another_directory(tmp_path):
    done = run_main(tmp_path, "--config.objective.beta=0.02", "--dry_run")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["objective.beta"] == 0.02
    assert list(tmp_path.iterdir()) == []


def run_main(folder, *arguments):
    command = [sys.executable, "-m", "tba_jax.main", MATH, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
