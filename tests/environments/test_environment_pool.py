# SPDX-License-Identifier: Apache-2.0
"""Environments in processes: what they say, and every way in which they fail."""

import time
from pathlib import Path

import pytest

from tba_jax.environments.pool import EnvironmentPool

FILE = Path(__file__).with_name("environments_for_tests.py")


def answer(environment, limit_s=60.0):
    end = time.monotonic() + limit_s
    while (found := environment.poll()) is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


@pytest.fixture(scope="module")
def games():
    pool = EnvironmentPool(f"{FILE}:Game", timeout_s=2.0)
    pool.check()
    yield pool
    pool.close()


def begun(pool):
    environment = pool.open()
    environment.begin({"prompt": "p"})
    assert answer(environment).failure == ""
    return environment


def test_an_environment_with_step_is_asked_turn_by_turn_and_its_rewards_are_added(games):
    environment = begun(games)
    for text, observation in (("a", "p:a"), ("b", "p:b")):
        environment.turn(text)
        found = answer(environment)
        assert (found.observation, found.finish, found.reward) == (observation, "", None)
    environment.turn("end")
    assert answer(environment)[1:4] == ("done", 3.0, "")
    environment.release()


def test_processes_draw_different_numbers():
    pool = EnvironmentPool(f"{FILE}:Dice", timeout_s=2.0)
    environments = [begun(pool) for _ in range(3)]
    for environment in environments:
        environment.turn("")
    drawn = [answer(environment).observation.split() for environment in environments]
    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [3, 3]
    pool.close()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hang", "environment_timeout"),
        ("die", "environment_crash"),
        ("raise", "environment_error"),
        ("type", "environment_type"),
        ("flood", "environment_flood"),
        ("nan", "environment_nan"),
    ],
)
def test_a_failure_has_a_name_a_line_and_costs_no_other_episode(games, text, name, capsys):
    other, bad = begun(games), begun(games)
    bad.turn(text)
    assert answer(bad).failure == name
    (line,) = capsys.readouterr().err.splitlines()
    assert str(FILE) in line and name in line
    other.turn("a")
    assert answer(other).observation == "p:a"
    other.release()


def test_a_class_written_for_trl_has_tools_and_a_reward_that_may_be_awaited(capsys):
    pool = EnvironmentPool(f"{FILE}:Counter", timeout_s=5.0)
    try:
        pool.check()
        assert pool.has_tools and pool.has_reward
        environment = pool.open()
        environment.begin({"prompt": "p", "start": 3, "more": 1})
        assert answer(environment).observation == "from 3"
        for call, said in (
            ({"name": "add", "arguments": {"n": 4}}, "7"),
            ({"name": "add", "arguments": {"m": 4}}, "error: TypeError"),
            ({"name": "add", "error": "no JSON"}, "error: no JSON"),
            ({"name": "reset"}, "error: no tool 'reset'; there are add"),
        ):
            environment.call([call])
            found = answer(environment)
            assert found.results[0].startswith(said)
            assert list(found.failed_calls) == [x for x in found.results if x != "7"]
        environment.call([])
        assert answer(environment)[1:4] == ("eos", 7.0, "")
    finally:
        pool.close()


def test_typed_functions_are_tools_without_a_state_or_a_reward():
    pool = EnvironmentPool(f"tba_jax.environments.tools:calculator, {FILE}:lookup", timeout_s=5.0)
    try:
        pool.check()
        assert pool.has_tools and not pool.has_reward
        environment = pool.open()
        environment.begin({"prompt": "p"})
        assert answer(environment).observation is None
        calls = [
            {"name": "lookup", "arguments": {"key": "a"}},
            {"name": "calculator", "arguments": {"expression": "3*4"}},
        ]
        environment.call(calls)
        assert answer(environment).results == ["1", "12"]
        environment.call([])
        assert answer(environment)[:3] == (None, "eos", None)
    finally:
        pool.close()


def test_many_episodes_share_few_processes_and_coroutines_run_concurrently():
    pool = EnvironmentPool(f"{FILE}:Concurrent", timeout_s=20.0)
    try:
        pool.check()
        episodes = [pool.open() for _ in range(64)]
        for i, environment in enumerate(episodes):
            environment.begin({"start": i % 5})
        assert {answer(each).observation for each in episodes} == {f"from {i}" for i in range(5)}
        start_s = time.monotonic()
        for environment in episodes:
            environment.call([{"name": "wait"}])
        pids = {answer(each).results[0] for each in episodes}
        assert time.monotonic() - start_s < 64 / 4 * 0.3
        assert pids == set(map(str, pool.workers.pids)) and len(pids) == 4
        for environment in episodes:
            environment.call([])
        found = [answer(each) for each in episodes]
        # Booleans, None and numpy's scalars count as in reward functions.
        assert [x.reward for x in found[:4]] == [1.0, None, 0.5, 1.0]
        assert {x.failure for x in found[4::5]} == {"environment_type"}
        assert {x.failure for i, x in enumerate(found) if i % 5 < 4} == {""}
    finally:
        pool.close()


def test_a_call_that_hangs_costs_the_episodes_of_its_worker_and_no_other(capsys):
    pool = EnvironmentPool(f"{FILE}:Game", timeout_s=1.0, num_workers=2)
    try:
        pool.check()
        episodes = [begun(pool) for _ in range(4)]
        for environment, text in zip(episodes, ("hang", "a", "b", "a"), strict=True):
            environment.turn(text)
        found = [answer(each) for each in episodes]
        names = ["environment_timeout", "", "environment_lost", ""]
        assert [each.failure for each in found] == names and found[3].observation == "p:a"
        again = begun(pool)
        again.turn("a")
        assert answer(again).observation == "p:a"
        # Episodes that waited for the policy are lost, too.
        episodes[1].turn("die")
        assert answer(episodes[1]).failure == "environment_crash"
        episodes[3].turn("a")
        assert answer(episodes[3]).failure == "environment_lost"
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
    names = ",".join(f"{FILE}:{each}" for each in name.split(","))
    pool = EnvironmentPool(names, timeout_s=5.0)
    try:
        with pytest.raises(ValueError, match=reason) as error:
            pool.check()
        assert "\n" not in str(error.value)
    finally:
        pool.close()
