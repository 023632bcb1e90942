# SPDX-License-Identifier: Apache-2.0
"""The trainer: what it makes of draws, and when it gives up."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.packing import Packing
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.train.step_plan import OwnBatches
from tba_jax.train.trainer import NonFiniteError, Trainer

PADDED = Packing(1, 2, Padding((4,), (8,), 0), policy_temperature=1.0)


def make_draws():
    prompt = Prompt(0, "", np.array([1, 2], np.int32), {})

    def trajectory(length):
        return Trajectory(
            prompt_id=0,
            response_tokens=np.arange(3, 3 + length, dtype=np.int32),
            reward=1.0,
            reward_parts={},
            behavior_token_logprobs=np.full(length, -1.0, np.float32),
            reference_logprob=-2.0,
            version_min=0,
            version_max=0,
            searcher=0,
            round=0,
            sampling_temperature=1.0,
            finish_reason="eos",
        )

    return [Draw(prompt, (trajectory(1), trajectory(6)), True, (0, 1), (1, 1), 0)]


def make_trainer(outcomes, seen, *, packing=PADDED, draws=None, **changes):
    """A trainer whose steps are finite or not, as `outcomes` says."""
    drawn = make_draws() if draws is None else draws
    buffer = SimpleNamespace(draw=lambda *_: drawn)
    outcomes, in_a_row = iter(outcomes), 0

    def train_step(state, batch):
        nonlocal in_a_row
        is_finite = next(outcomes)
        in_a_row = 0 if is_finite else in_a_row + 1
        seen.append(batch)
        loss = 1.0 if is_finite else np.nan
        metrics = {"train/loss": loss, "train/grad_norm": loss, "train/response_tokens": 7.0}
        return state, metrics | {"train/skipped_in_a_row": in_a_row, "train/skipped_steps": 0}

    arguments = {
        "state": SimpleNamespace(step=jnp.int32(0)),
        "train_step": train_step,
        "batches": OwnBatches(buffer, packing, num_steps=10, sync_period=1, checkpoint_period=0),
        "transport": SimpleNamespace(is_publishing=False),
        "clock": lambda: 0.0,
    }
    return Trainer(**(arguments | changes))


def test_nonfinite_steps_are_fatal_only_in_a_row():
    trainer = make_trainer([False, False, True, False, False, False], [])
    for _ in range(5):
        trainer.step()
    assert trainer.step_index == 5
    with pytest.raises(NonFiniteError, match=r"step 5: loss nan.*3 consecutive.*learning_rate"):
        trainer.step()


def test_batches_are_packed_if_rows_have_a_length():
    seen: list = []
    trainer = make_trainer([True], seen)
    trainer.step()
    assert isinstance(seen[0], Batch) and seen[0].tokens.shape == (2, 12)
    trainer = make_trainer([True], seen, packing=replace(PADDED, row_length=16))
    trainer.step()
    assert isinstance(seen[1], PackedBatch) and seen[1].tokens.shape == (1, 16)


def test_staleness_counts_a_response_as_often_as_it_was_drawn():
    draw = make_draws()[0]
    young, old = draw.trajectories[0], replace(draw.trajectories[1], version_min=-3)
    drawn = [draw._replace(trajectories=(young, old), weights=(1, 3), num_repeats=2)]
    trainer = make_trainer([True], [], draws=drawn, packing=replace(PADDED, group_size=4))
    values = trainer.step()
    assert values["buffer/staleness_histogram"] == [[0, 1], [3, 3]]
    assert values["buffer/staleness_mean"] == 9 / 4 and values["buffer/repeat_fraction"] == 0.5
    assert trainer.counters.staleness_counts == {0: 1, 3: 3}
