# SPDX-License-Identifier: Apache-2.0
"""Reward functions in every form that TRL takes, called directly and through the pool."""

import asyncio
import contextlib
import math
import os
import textwrap
import types

import pytest

from tba_jax.config.schema import make_config
from tba_jax.rewards import functions
from tba_jax.rewards.functions import RewardPool, make_handler, make_rewards
from tba_jax.rewards.scores import Completion, Score

FUNCTIONS = """
import asyncio
import dataclasses
from fractions import Fraction

import numpy as np

import neighbour  # beside this file, wherever that is


@dataclasses.dataclass
class Bonus:  # dataclasses look their module up by name
    value: float = 0.5


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]

def only_ids(completion_ids):
    return [float(sum(ids)) if type(ids) is list else "not a list" for ids in completion_ids]

def no_prompts(completions, target):
    return [float(c == t) for c, t in zip(completions, target)]

def needs_state(completions, trainer_state): ...

def logs(completions, log_metric):
    log_metric("words", sum(len(c.split()) for c in completions))
    return [1.0] * len(completions)

async def hangs(completions):
    await asyncio.sleep(1000)

def never(completions, **kwargs):
    return [None] * len(completions)

def fractions(completions, **kwargs):
    return [Fraction(1, 2), np.float16(0.5), True, 10**400][: len(completions)]

async def coroutine(completions, **kwargs):
    await asyncio.sleep(0)
    return [2.0] * len(completions)

def begun(prompts, completions, **kwargs):
    return [float(c[0]["content"] == "yes, it is" and len(p) == 1)
            for p, c in zip(prompts, completions)]

def first(completions, **kwargs):
    return [ord(x[0]) for x in completions]

class Reward:
    __name__ = "reward_of_a_class"

    def __call__(self, completions, **kwargs):
        return [neighbour.BONUS + Bonus().value for _ in completions]
"""


@pytest.fixture(scope="module", autouse=True)
def path(tmp_path_factory):
    """A file of reward functions that is neither in the working directory nor importable."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "neighbour.py").write_text("BONUS = 1.0\n")
    (folder / "broken.py").write_text("import no_such_package\n\ndef f(completions): ...\n")
    # A file of this name must not hide the standard library's module.
    (folder / "math.py").write_text("def f(completions, **kwargs):\n    return [7.0]\n")
    file = folder / "rewards.py"
    file.write_text(textwrap.dedent(FUNCTIONS))
    return str(file)


def called(path, name, completions, prompts=None, **keywords):
    prompts = prompts or [""] * len(completions)
    columns = {"prompts": prompts, "completions": completions, **keywords}
    return asyncio.run(make_handler(f"{path}:{name}")(columns))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", [1.0, 2.0, 3.0]),
        ("only_ids", [1.0, 2.0, 3.0]),
        ("no_prompts", [1.0, 0.0, 0.0]),
        ("fractions", [0.5, 0.5, 1.0, None]),
        ("coroutine", [2.0, 2.0, 2.0]),
        ("Reward", [1.5, 1.5, 1.5]),
        ("never", [None, None, None]),
    ],
)
def test_a_function_gets_the_keywords_it_takes(path, name, expected):
    columns = {"target": ["a"] * 4, "level": [1, 2, 3, 4], "completion_ids": [[1], [2], [3], [4]]}
    texts, n = ["a", "bb", "ccc", "dddd"], len(expected)
    found = called(path, name, texts[:n], **{k: column[:n] for k, column in columns.items()})
    assert [score.reward for score in found] == expected


def test_a_file_hides_no_module_of_that_name(path):
    assert called(os.path.join(os.path.dirname(path), "math.py"), "f", ["a"]) == [Score(7.0)]
    assert math.sqrt(4) == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("{folder}/none.py:f", r"cannot be loaded: FileNotFoundError: no file .*/none\.py"),
        ("{folder}/broken.py:f", "loaded: ModuleNotFoundError: No module named 'no_such_package'"),
        ("no_such.module:f", "No module named 'no_such'. Want package.module:function"),
        ("no_colon", "Empty module name. Want package.module:function"),
        ("{path}:np", "is a module, not a function"),
        (
            "{path}:needs_state",
            r"missing .* 'trainer_state'. It may take only prompts, completions,",
        ),
    ],
)
def test_what_cannot_be_used_is_said_at_the_start(path, function, message):
    name = function.format(path=path, folder=os.path.dirname(path))
    with here(name, row=("", {"answer": ""})) as pool, pytest.raises(ValueError, match=message):
        pool.check()


def test_a_function_that_never_returns_is_named_at_the_start(path, monkeypatch):
    monkeypatch.setattr(functions, "most_wait_s", lambda timeout_s: 0.5)
    name = f"{path}:hangs"
    with here(name, row=("", {})) as pool, pytest.raises(ValueError, match="not returned for 0.5"):
        pool.check()


def here(function, **options):
    """A pool without processes: the function runs in a thread."""
    return contextlib.closing(RewardPool(function, timeout_s=5.0, num_workers=0, **options))


def scored(path, name, *arguments):
    with here(f"{path}:{name}") as pool:
        return asyncio.run(pool.score([Completion(*each) for each in arguments]))


def test_values_of_log_metric_are_parts_of_the_reward(path):
    rows = ("p", "a"), ("p", "a b"), ("q", "a"), ("q", "a")
    found = scored(path, "logs", *rows)
    assert found == [Score(1.0, parts={"words": x}) for x in (3.0, 3.0, 2.0, 2.0)]


def test_a_config_names_functions_and_their_weights(path):
    names, weights = ("length", "never", "only_ids"), (1.0, 10.0, 0.5)
    changes = {"task.reward": ",".join(f"{path}:{name}" for name in names)}
    settings = make_config({**changes, "task.reward_weights": weights, "reward.num_workers": 1})
    task = types.SimpleNamespace(reward="", metric="", first_row=lambda: ("", {}))
    with contextlib.closing(make_rewards(settings, task, None, None)[0]) as source:
        assert (tuple(source.sources), source.weights) == (names, weights)


def test_a_last_message_of_the_assistant_is_the_beginning_of_the_completion(path):
    messages = [{"role": "user", "content": "is it?"}, {"role": "assistant", "content": "yes, "}]
    assert scored(path, "begun", ("...", "it is", {"prompt": messages})) == [Score(1.0)]


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_function_of_texts_is_told_that_completions_of_chats_are_messages(path, is_chat):
    chat = {"answer": "a", "prompt": [{"role": "user", "content": "a"}]}
    columns = chat if is_chat else {"answer": ""}
    name, failure = f"{path}:first", "fails on the first row"
    with here(name, row=("a", columns)) as pool, pytest.raises(ValueError, match=failure) as error:
        pool.check()
    assert ("its text is completion[0]['content']" in str(error.value)) == is_chat
