# SPDX-License-Identifier: Apache-2.0
"""A config, data, model or reward that cannot be used is refused before weights are read."""

import json
import shutil

import pytest

from tba_jax.commands.train import preflight
from tba_jax.config.command_line import override
from tba_jax.run.model_parts import START_MODEL

REWARDS = """
def score(completions, answer, **kwargs):
    return [float(a in c) for a, c in zip(answer, completions)]

def noted(completions, answer, **kwargs):
    open(__file__ + ".noted", "a").write(f"{completions[0]} for {answer[0]};")
    return score(completions, answer)

def wants_target(completions, target):
    return [0.0 for _ in completions]

def too_short(completions, **kwargs):
    return []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("custom")
    rows = [{"question": f"{a} + 1 =", "answer": str(a + 1)} for a in range(40)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "rewards.py").write_text(REWARDS)
    shutil.copytree(START_MODEL, folder / "pickled")
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")
    return folder


def command(folder, **fields):
    """A custom command on the start model, with some settings changed or left out (None)."""
    settings = {
        "task.data_path": f"{folder}/train.jsonl",
        "task.columns": "prompt=question",
        "task.reward": f"{folder}/rewards.py:score",
        "task.max_prompt_tokens": 16,
        "task.num_eval_prompts": 8,
    }
    settings |= {name.replace("__", "."): value for name, value in fields.items()}
    given = (f"--config.{n}={v}" for n, v in settings.items() if v is not None)
    return ["--config=custom", *(text.replace("{}", str(folder)) for text in given)]


BROKEN = [
    (
        {"search__engine": "http://127.0.0.1:9/v1", "lora__rank": 4},
        "127.0.0.1:9/v1': not reachable",
    ),
    ({"task__reward": "{}/rewards.py:scroe"}, "/rewards.py has no attribute 'scroe'"),
    ({"task__reward": "{}/rewards.py:wants_target"}, "missing 1 required .* argument: 'target'"),
    ({"task__reward": "{}/rewards.py:too_short"}, "returned 0 rewards for 1"),
    ({"task__environment": "{}/rewards.py:Env"}, "/rewards.py has no attribute 'Env'"),
    ({"task__columns": "prompt=query"}, "no column 'query'"),
    ({"task__max_prompt_tokens": 5000}, "was made for"),  # above the context
    ({"model__path": "{}/model"}, "/model' is not a folder"),
    ({"model__path": "{}/pickled"}, "no model.safetensors there. Download"),
    ({"batch__num_prompts": 0}, "num_prompts = 0: must be at least 1"),
    ({"placement": "split", "mesh__data": 64}, "do not fit placement=split on 1 host"),
]


@pytest.mark.parametrize(("fields", "expected"), BROKEN)
def test_what_cannot_be_used_is_refused(folder, fields, expected):
    with pytest.raises((ValueError, RuntimeError), match=expected):
        preflight(override(None, command(folder, **fields)))


def test_a_sound_command_has_no_problems_and_its_reward_was_tried_on_one_row(folder):
    preflight(override(None, command(folder, task__reward="{}/rewards.py:noted")))
    completion, _, answer = (folder / "rewards.py.noted").read_text().partition(" for ")
    assert f"{completion};" == answer and completion.isdigit()
