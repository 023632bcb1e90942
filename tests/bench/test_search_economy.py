# SPDX-License-Identifier: Apache-2.0
"""The economy of search: real admission, outboxes and buffer, with time and decoding pretended."""

import json

import pytest

from tba_jax.bench.search_economy import SAMPLES, Case, World, difficulty, main, measure


def run(case, steps=60):
    (result,) = measure(steps, [case])["cases"]
    return result


def test_balanced_search_trains_on_what_it_generates_within_its_bound():
    result = run(Case(4, 1.0, 4))
    assert result["latency_steps"] < 4
    assert result["trained_share"] > 0.93  # of 60 steps, at most 4 wait at the end
    assert abs(result["length_rank"] - 0.5) < 0.03
    assert result["staleness_p95"] <= 4
    assert result["slot_use"] > 0.85


def test_responses_slower_than_the_bound_are_late_and_not_lost():
    """16 searchers share the work of 4, so each response takes four times as long."""
    result = run(Case(16, 1.0, 2))
    assert result["latency_steps"] > 2 and result["late_share"] > 0.5
    assert result["trained_share"] > 0.85  # a larger part of a short run is under way at its end
    assert abs(result["length_rank"] - 0.5) < 0.05


@pytest.mark.parametrize(("late", "holds"), [("train", False), ("wait", True)])
def test_a_bound_that_the_weights_outlast_holds_where_the_trainer_waits_for_it(late, holds):
    """Three steps' time from a publication until searchers have it, and a bound of two steps."""
    world = World(Case(4, 1.5, 2, delivery=3.0, late=late))
    world.run(30)
    result = world.result()
    assert (result["late_share"] == 0) == holds
    assert (result["staleness_max"] <= 2) == holds
    assert (result["wait_share"] > 0.3) == holds  # its price
    assert world.num_groups > 0.8 * 32 * 30


def test_the_surplus_of_too_many_searchers_is_not_generated():
    world = World(Case(4, 2.0, 4))
    world.run(60)
    generated = world.num_groups
    # What 60 steps take, and what waits within the bound.
    assert generated <= 32 * (60 + 4 + 1)
    assert world.result()["slot_use"] < 0.9 < world.result()["trained_share"]


def test_every_response_is_counted_once():
    world = World(Case(4, 1.0, 4))
    world.run(10)
    ledger = world.buffer.ledger()
    assert ledger["generated"] == SAMPLES * world.num_groups == len(world.lengths)
    assert world.trained <= set(world.lengths)


def test_difficulty_lies_between_one_and_e():
    values = [difficulty(i) for i in range(200)]
    assert 1.0 <= min(values) < 1.1 and 2.5 < max(values) <= 2.7183


@pytest.mark.slow
def test_the_command_prints_cases_as_json(capsys):
    assert main(["--steps=5", "--json"]) == 0
    cases = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    wanted = {"searchers", "supply", "trained_share", "length_rank", "slot_use", "effective_m"}
    assert wanted | {"staleness_p95", "late_share"} <= set(cases[0])
