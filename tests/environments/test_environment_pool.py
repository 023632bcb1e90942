# SPDX-License-Identifier: Apache-2.0
"""Environments in processes: what they say, and every way in which they fail."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tba_jax.decoding.requests import Response
from tba_jax.environments.pool import Ended, EnvironmentPool
from tba_jax.flow.trajectory import Prompt
from tba_jax.serving.protocol import Served

FILE = Path(__file__).with_name("environments_for_tests.py")


class Letters:
    """A tokenizer of characters."""

    def encode(self, text, add_bos=False):
        return np.array([ord(c) for c in text], np.int32)

    def decode(self, ids, skip_special=True):
        return "".join(map(chr, ids))


class Chat:
    """A chat is the text of its messages; a turn with calls is their JSON."""

    drops = "nothing"

    def prompt(self, messages, tools):
        return Letters().encode("".join(m["content"].replace(self.drops, "") for m in messages))

    def bridge(self, prompt, completion, messages, tools):
        before, whole = np.concatenate([prompt, completion]), self.prompt(messages, tools)
        return whole if np.array_equal(whole[: len(before)], before) else None

    def message(self, tokens, text, prompt, tools):
        return {"role": "assistant", "content": text}

    def calls(self, tokens, prompt, tools):
        return json.loads(Letters().decode(tokens))


def pool_of(name, timeout_s=5.0, **options):
    served = Served("policy", Letters(), Chat(), (), 99)
    pool = EnvironmentPool(name, served, max_turns=9, timeout_s=timeout_s, **options)
    pool.check()
    return pool


def begun(pool, **columns):
    environment = pool.open(Prompt(0, "p", Letters().encode("p"), columns))
    environment.begin()
    return environment


def send(environment, turn):
    tokens = Letters().encode(turn if isinstance(turn, str) else json.dumps(turn))
    environment.turn(Response(0, 0, tokens, np.zeros(len(tokens), np.float32), True, 0, 0))


def answer(environment, limit_s=60.0):
    """The text of the next prompt, or the end."""
    end = time.monotonic() + limit_s
    while (found := environment.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    return found if isinstance(found, Ended) else Letters().decode(found.prompt)


def said(environment, turn):
    send(environment, turn)
    return answer(environment)


def called(environment, *calls):
    """The results of the calls of a turn, or the end."""
    before = Letters().decode(environment._prompt)
    calls = [{"id": str(i), **call} for i, call in enumerate(calls)]
    found = said(environment, calls)
    return found if isinstance(found, Ended) else found.removeprefix(before + json.dumps(calls))


@pytest.fixture(scope="module")
def games():
    pool = pool_of(f"{FILE}:Game", 2.0)
    yield pool
    pool.close()


def test_an_environment_with_step_is_asked_turn_by_turn_and_its_rewards_are_added(games):
    environment = begun(games)
    assert answer(environment) == "p"
    assert said(environment, "a") == "pap:a"
    assert said(environment, "b") == "pap:abp:b"
    assert said(environment, "end") == Ended("done", 3.0)


def test_a_chat_whose_template_drops_a_turn_begins_another_path(games):
    environment = begun(games, prompt=[{"role": "user", "content": "p"}])
    answer(environment)
    wanted = "pa[{'role': 'user', 'content': 'p'}]:a"
    assert said(environment, "a") == wanted
    games.served.chat.drops = "b"
    send(environment, "b")
    while (found := environment.poll()) is None:
        time.sleep(0.005)
    del games.served.chat.drops
    # The dropped letter is in the prompt of no turn, and what was sampled before is given text.
    assert found.path == 1
    assert Letters().decode(found.prompt) == wanted + "[{'role': 'user', 'content': 'p'}]:"


def test_processes_draw_different_numbers():
    pool = pool_of(f"{FILE}:Dice")
    environments = [begun(pool) for _ in range(3)]
    for environment in environments:
        answer(environment)
        send(environment, "")
    drawn = [answer(environment).split() for environment in environments]
    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [3, 3]
    pool.close()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hang", "environment_timeout"),
        ("die", "environment_crash"),
        ("raise", "environment_error"),
        ("type", "environment_type"),
        ("nan", "environment_nan"),
    ],
)
def test_a_failure_has_a_name_a_line_and_costs_no_other_episode(games, text, name, capsys):
    other, bad = begun(games), begun(games)
    assert answer(other) == answer(bad) == "p"
    assert said(bad, text) == Ended(failure=name)
    (line,) = capsys.readouterr().err.splitlines()
    assert str(FILE) in line and name in line
    assert said(other, "a") == "pap:a"
    other.release()


def test_a_class_written_for_trl_has_tools_and_a_reward_that_may_be_awaited():
    pool = pool_of(f"{FILE}:Counter")
    try:
        assert pool.has_tools and pool.has_reward
        pool.schemas = [{}]
        messages = [{"role": "user", "content": "Count "}]
        environment = begun(pool, prompt=messages, start=3, more=1)
        assert answer(environment) == "Count from 3"
        assert called(environment, {"name": "add", "arguments": {"n": 4}}) == "7"
        for call, result in (
            ({"name": "add", "arguments": {"m": 4}}, "error: TypeError"),
            ({"name": "add", "error": "no JSON"}, "error: no JSON"),
            ({"name": "reset"}, "error: no tool 'reset'; there are add"),
        ):
            assert called(environment, call).startswith(result)
        assert environment.num_failed_calls == 3
        assert called(environment) == Ended("eos", 7.0)
    finally:
        pool.close()


def test_typed_functions_are_tools_without_a_state_or_a_reward():
    pool = pool_of(f"tba_jax.environments.tools:calculator, {FILE}:lookup")
    try:
        assert pool.has_tools and not pool.has_reward
        pool.schemas = [{}]
        environment = begun(pool, prompt=[{"role": "user", "content": "p"}])
        assert answer(environment) == "p"
        calls = [
            {"name": "lookup", "arguments": {"key": "a"}},
            {"name": "calculator", "arguments": {"expression": "3*4"}},
        ]
        assert called(environment, *calls) == "112"
        assert called(environment) == Ended("eos", None)
    finally:
        pool.close()


def test_many_episodes_share_few_processes_and_coroutines_run_concurrently():
    pool = pool_of(f"{FILE}:Concurrent", 20.0)
    pool.schemas = [{}]
    try:
        messages = [{"role": "user", "content": ""}]
        episodes = [begun(pool, prompt=messages, start=i % 5) for i in range(64)]
        assert {answer(each) for each in episodes} == {f"from {i}" for i in range(5)}
        start_s, call = time.monotonic(), [{"id": "0", "name": "wait"}]
        for environment in episodes:
            send(environment, call)
        pids = {answer(each).partition("]")[2] for each in episodes}
        assert time.monotonic() - start_s < 64 / 4 * 0.3
        assert pids == {str(each.process.pid) for each in pool.workers.workers}
        assert len(pids) == 4
        found = [called(each) for each in episodes]
        # Booleans, None and numpy's scalars count as in reward functions.
        assert [x.reward for x in found[:4]] == [1.0, None, 0.5, 1.0]
        assert {x.failure for x in found[4::5]} == {"environment_type"}
        assert {x.failure for i, x in enumerate(found) if i % 5 < 4} == {""}
    finally:
        pool.close()


def test_a_call_that_hangs_costs_the_episodes_of_its_worker_and_no_other(capsys):
    pool = pool_of(f"{FILE}:Game", 1.0, num_workers=2)
    lost, hung = Ended(failure="environment_lost"), Ended(failure="environment_timeout")
    try:
        episodes = [begun(pool) for _ in range(4)]
        assert {answer(each) for each in episodes} == {"p"}
        for environment, text in zip(episodes, ("hang", "a", "b", "a"), strict=True):
            send(environment, text)
        assert [answer(each) for each in episodes] == [hung, "pap:a", lost, "pap:a"]
        again = begun(pool)
        assert answer(again) == "p" and said(again, "a") == "pap:a"
        # Episodes that waited for the policy are lost, too.
        assert said(episodes[1], "die") == Ended(failure="environment_crash")
        assert said(episodes[3], "a") == lost
    finally:
        pool.close()
    assert "a turn took longer than 1 s (reward.timeout_s)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lookup,lookup", "two of the tools lookup, lookup have one name"),
        ("Untyped", "tool undescribed needs a docstring"),
        ("Slow", "OSError: no such server"),
        ("Absent", "has no attribute 'Absent'"),
        ("os", "neither reset"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(name, reason):
    with pytest.raises(ValueError, match=reason) as error:
        pool_of(",".join(f"{FILE}:{each}" for each in name.split(",")))
    assert "\n" not in str(error.value)
