# SPDX-License-Identifier: Apache-2.0
"""The training loop waits neither for its own weight files nor, after a signal, for responses."""

from types import SimpleNamespace

import pytest
from fake_tickets import House, make_result

from tba_jax.config.schema import make_config
from tba_jax.run.errors import RunError
from tba_jax.run.loop import Loop


def make_run(owner=None, **fields):
    """A run without devices; `weights.polled` counts deliveries."""
    weights = SimpleNamespace(polled=0, newest=0, keep=lambda version: None)

    def poll(wait_s=0.0):
        weights.polled += 1

    weights.poll = poll
    return SimpleNamespace(
        config=make_config({"batch.num_prompts": 2, "search.samples_per_prompt": 2, **fields}),
        last_eval_step=0,
        record_evaluations=lambda: False,
        weights=weights,
        owner=owner,
        server=None,
        parts=(),
        trainer=SimpleNamespace(step_index=0),
    )


@pytest.mark.parametrize(("driver", "number"), [("sync", 1), ("async", 0)])
def test_a_trainer_without_the_buffer_waits_for_weight_files_with_sync_alone(driver, number):
    run = make_run(driver=driver)
    Loop(run, lambda: False).sync(4)
    assert run.weights.polled == number


def test_a_signal_ends_the_wait_for_responses_and_the_rest_is_sampled_later():
    house, signals = House(1), [False, False, True]
    run = make_run(house.owner, driver="sync", **{"search.initial_fill": 0})
    loop = Loop(run, lambda: signals.pop(0) if signals else False)
    assert loop.sync(0) == [] and loop.wants_stop()  # no searcher answers
    house.save()
    house.restore()
    run.owner = house.owner
    again = Loop(run, lambda: False)
    again._searchers = (SimpleNamespace(step=lambda: False, grade=lambda: answer(house.owner)),)
    again.sync(0)
    assert house.owner.is_done
    assert house.merged == [0, 1]


def answer(owner):
    """Finish the tickets that may begin; return whether there were any."""
    tickets = owner.take(0, 9, 0)
    owner.put(0, [make_result(ticket.number) for ticket in tickets])
    return bool(tickets)


def test_many_groups_that_arrive_at_once_are_drawn_before_a_run_counts_as_starved():
    owner = SimpleNamespace(num_merged=0)

    def merge(step, most):
        owner.num_merged += 900  # while a step was compiling, for example
        return []

    owner.merge = merge
    run = make_run(owner, driver="async")
    loop = Loop(run, lambda: False)
    loop.no_batch()
    ledger = {"stored": 0, "rejected": {"reward_nan": 1, "reward_error": 7}}
    run.buffer = SimpleNamespace(ledger=lambda: ledger, num_trajectories=0, num_bytes=0)
    why = "900 groups were merged since the last step, and most rejections are reward_error. It"
    with pytest.raises(RunError, match=f"{why}.*in the folder logs"):
        loop.no_batch()
