# SPDX-License-Identifier: Apache-2.0
"""The trainer: what it makes of draws, when results are read, and when it gives up."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from fake_groups import make_trajectory

from tba_jax.flow.layout import RowLayout
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Draw, Prompt
from tba_jax.train.trainer import NonFiniteError, Trainer

PADDED = RowLayout(1, 2, Padding((4,), (8,), 0))


def make_draws():
    """A draw of a response of one token and of one of six."""
    ys = [make_trajectory(0, range(3, 3 + n), reward=1.0) for n in (1, 6)]
    ys = tuple(replace(y, sampling_temperature=1.0) for y in ys)
    return [Draw(Prompt(0, "", np.array([1, 2], np.int32), {}), ys, True, (0, 1))]


def make_trainer(outcomes, *, layout=PADDED, draws=None, kept=None, step=0):
    """A trainer whose steps are finite or not, as `outcomes` says; `kept` gets references."""
    draws = make_draws() if draws is None else draws
    outcomes, in_a_row = iter(outcomes), 0

    def train_step(state, batch):
        nonlocal in_a_row
        is_finite = next(outcomes)
        in_a_row = 0 if is_finite else in_a_row + 1
        loss = jnp.float32(1.0 if is_finite else np.nan)
        numbers = {"loss": loss, "grad_norm": loss, "beta": jnp.float32(0.1)}
        sums = ("policy", "reference", "low_ratios", "high_ratios", "largest_gap")
        outputs = {
            "numbers": numbers | {"skipped_in_a_row": in_a_row, "skipped_steps": 0},
            "sums": {name: jnp.zeros(batch.rewards.shape) for name in sums},
            "own": {"tokens": {}, "responses": {}},
            "log_z": None,
            "shown": {"policy": jnp.zeros((2, 8)), "reference": jnp.zeros((2, 8))},
        }
        reference = jnp.arange(float(batch.source.size)).reshape(batch.source.shape)
        return state, outputs, None if batch.missing is None else reference

    trainer = Trainer(
        state=SimpleNamespace(step=jnp.int32(step)),
        train_step=train_step,
        weights=SimpleNamespace(is_publishing=False),
        keep_references=None if kept is None else lambda draws, values: kept.append(values),
        clock=lambda: 0.0,
    )
    step_once = trainer.step
    trainer.step = lambda: step_once(lambda: (layout.batch(draws, trainer.step_index), draws))
    return trainer


def test_nonfinite_steps_are_fatal_only_in_a_row():
    trainer = make_trainer([False, False, True, False, False, False])
    trainer.step()
    assert trainer.finished(pending=1) == [] and trainer.step_index == 1
    for _ in range(5):
        assert trainer.step()
    found = [(x.step, x.values["train/response_tokens"]) for x in trainer.finished(pending=1)]
    assert found == [(step, 7) for step in (1, 2, 3, 4, 5)]
    with pytest.raises(NonFiniteError, match=r"step 5: loss nan.*3 consecutive.*learning_rate"):
        trainer.finished()


def test_log_probs_of_the_reference_are_kept_with_their_tokens():
    kept = []
    make_trainer([True], kept=kept).step()
    ((one, six),) = kept[0]
    assert (one.tolist(), six.tolist()) == ([0], [8, 9, 10, 11, 12, 13])
    (draw,) = make_draws()
    ys = [replace(y, reference_token_logprobs=y.behavior_token_logprobs) for y in draw.trajectories]
    scored = [draw._replace(trajectories=tuple(ys))]
    make_trainer([True], draws=scored, kept=kept).step()
    assert len(kept) == 1


def test_staleness_counts_a_response_as_often_as_it_was_drawn():
    draw = make_draws()[0]
    young, old = replace(draw.trajectories[0], version_min=3), draw.trajectories[1]
    given = replace(old, version_min=-1)
    drawn = [draw._replace(trajectories=(young, old, old, given), ids=(0, 1, 1, 2))]
    layout = replace(PADDED, group_size=4)
    trainer = make_trainer([True], draws=drawn, layout=layout, step=3)
    trainer.step()
    ((_, values, shown),) = trainer.finished()
    assert values["buffer/staleness_histogram"] == [[0, 1], [3, 2]]
    assert values["buffer/staleness_mean"] == 2 and values["buffer/repeat_fraction"] == 1 / 4
    assert shown.draw is drawn[0]
