# SPDX-License-Identifier: Apache-2.0
"""Every loss in every layout and division, against its float64 formula: value and gradients.

The model is a table of one number for each scored position, so that a gradient is that of a
log-prob. The batch has repeats, masks with holes, padding and an empty slot.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import lay_out, slow
from test_losses import BETA, FORMULAS, differences, groups, named
from test_step import ONE, PACKED, PARTS, SHARED, WHOLE, problem_draws

from tba_jax.train.groups import Groups
from tba_jax.train.scoring import divide, gradients, rows_of
from tba_jax.train.step import _total


@functools.cache
def made():
    """The batch's numbers as in `test_losses.problem`, float64, without the empty slot."""
    batch, rng = lay_out(problem_draws()), np.random.default_rng(0)
    mask = batch.mask[:4]
    # Equal responses have one log-prob and one value for each token.
    table = rng.normal(-1.5, 0.5, (3, batch.tokens.size))
    policy, values, given = np.where(mask, table[:, batch.source[:4] % table.shape[1]], 0.0)
    near = np.where(mask, policy + rng.normal(0, 0.4, mask.shape), 0.0)
    far = np.where(mask, policy + rng.normal(0, 0.6, mask.shape), 0.0)
    return SimpleNamespace(
        policy=policy, behavior=near, reference=far, reward=batch.rewards[:4].astype(float),
        mask=mask, log_z=rng.normal(size=4), values=values, given=given,
    )  # fmt: skip


@functools.cache
def expected(name):
    """(value, gradient by the log-prob of each token of each response [p k t])."""
    formula = FORMULAS[name][1]
    return formula(list(groups(made().policy, made()))), differences(formula, made())


def padded(x, like):
    """The array with the empty slot, float64."""
    out = np.zeros((5, *like.shape[1 : x.ndim]), x.dtype)
    out[:4] = x
    return jnp.asarray(out)


# Of those that read a group alike, one: what differs is the formula, which test_losses.py has.
KINDS = ["reinforce", "grpo", "online_dpo", "ppo", "vineppo", "tb", "tb, learned"]
CASES = [
    ({**PACKED, **SHARED, **WHOLE}, list(FORMULAS)),
    (ONE, KINDS),
    ({**SHARED, **PARTS}, KINDS),
    *(slow(layout, list(FORMULAS)) for layout in ({}, {**PACKED, **PARTS})),
]


@pytest.mark.parametrize(("layout", "names"), CASES, ids=str)
def test_losses_have_their_value_and_gradient_in_every_layout(layout, names):
    batch = lay_out(problem_draws(), **layout)
    x, m = made(), batch.mask
    size = batch.source.max()  # one more than the last scored position
    table = np.zeros((size, 2))
    for numbers, column in ((x.policy, 0), (x.values, 1)):
        table[batch.source[:4][x.mask], column] = numbers[x.mask]
    table = table.reshape(len(batch.tokens), -1, 2)
    with jax.enable_x64(True):
        numbers = (padded(y, m) for y in (x.behavior, x.reference, x.reward, x.log_z, x.given))
        behavior, reference, reward, log_z, given = numbers
        rows = {**rows_of(batch), "index": np.arange(len(batch.tokens))}
        cut = divide(rows, batch.num_computed, layout.get("micro_batch_rows", 0), 1)

        def compute(objective, table):
            needs = objective.needs

            def loss(scored):
                found = jnp.take(scored.reshape(-1, 2), batch.source, 0, mode="fill", fill_value=0)
                logp, values = (jnp.where(m, found[..., i], 0) for i in range(2))
                terms = objective(
                    Groups(
                        logp, behavior, reference, jnp.asarray(m), reward,
                        jnp.zeros(reward.shape, jnp.int32),
                        log_z=log_z if needs.head == "log_z" else None,
                        values=values if needs.head == "value" else None,
                        advantages=given if needs.advantages else None,
                    ),
                    BETA,
                ).loss  # fmt: skip
                return jnp.where(batch.is_drawn, terms, 0).sum() / _total(needs.total, batch)

            scored, gradient = gradients(
                lambda table, rows: table[rows["index"]], loss, table, rows, cut,
                is_whole=layout.get("is_whole", False),
            )  # fmt: skip
            return loss(scored), gradient

        objectives = {name: named(name, **FORMULAS[name][0]) for name in names}
        program = jax.jit(lambda table: {n: compute(o, table) for n, o in objectives.items()})
        found = jax.device_get(program(jnp.asarray(table)))
    for name, (value, gradient) in found.items():
        wanted, by_token = expected(name)
        np.testing.assert_allclose(value, wanted, rtol=1e-6, err_msg=name)
        of_source = np.zeros(size)
        np.add.at(of_source, batch.source[:4][x.mask], by_token[x.mask])
        largest = np.abs(of_source).max()
        assert largest > 1e-4, name
        # Gradients of several micro-batches are summed in float32.
        np.testing.assert_allclose(
            gradient[..., 0].reshape(-1),
            of_source,
            rtol=0,
            atol=1e-6 * largest + 1e-8,
            err_msg=name,
        )
