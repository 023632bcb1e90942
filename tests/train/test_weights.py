# SPDX-License-Identifier: Apache-2.0
"""A response with a weight is so many equal rows: for every objective, in every layout."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_batches import (
    CONFIG,
    REMAT,
    SETTINGS,
    keep_gradient,
    lay_out,
    make_draws,
    repeated,
    sharded,
    slow,
)
from fake_models import random_params

from tba_jax.train.objectives.base import GroupData, Totals
from tba_jax.train.objectives.registry import make_objective, objective_names
from tba_jax.train.state import init_state
from tba_jax.train.step import make_train_step
from tba_jax.train.step_metrics import STRATA_KEY

# Of up to four distinct responses, K = 6 drawn: with repeats, one alone, all of them.
STALENESS = np.arange(16).reshape(4, 4)
WEIGHTS = np.array([[3, 1, 2, 0], [6, 0, 0, 0], [1, 1, 1, 3], [2, 2, 0, 2]])
# Every registered objective, those that can learn log Z in both forms.
OBJECTIVES = {
    f"{name}_{log_z}": made
    for name in objective_names()
    for log_z in ("vargrad", "learned")
    if (made := make_objective(name, {"log_z": log_z} if name == "tb" else {})).heads
    == (("log_z",) if log_z == "learned" else ())
}


METRICS = {"tb_vargrad", "tb_learned", "online_dpo_vargrad", "grpo_vargrad"}


@functools.cache
def responses():
    """Token log-probs of policy, sampler and reference [3 p k t], mask, rewards; numpy, float64."""
    rng = np.random.default_rng(0)
    t, shape = 5, WEIGHTS.shape
    mask = np.arange(t) < rng.integers(1, t + 1, shape)[..., None]
    mask &= WEIGHTS[..., None] > 0
    tokens = np.where(mask, rng.normal(-2, 1, (3, *shape, t)), 0)
    # Some equal rewards, and the 0 of empty places is smaller than any.
    reward = np.where(WEIGHTS > 0, rng.integers(1, 4, shape) / 2, 0.0)
    return tokens, mask, reward, rng.normal(size=len(WEIGHTS))


def group_data(policy, index, weight):
    """The responses of `index` [p n] with these weights; `policy` [p k t] in place of theirs."""
    (_, behavior, reference), mask, reward, log_z = responses()

    def pick(x):
        return jnp.take_along_axis(
            jnp.asarray(x), index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1
        )

    policy, behavior, reference, mask = map(pick, (policy, behavior, reference, mask))
    weight = jnp.asarray(weight, jnp.float64)
    counted = (mask * weight[..., None]).sum()
    return GroupData(
        policy_logprob=policy.sum(-1),
        policy_token_logprobs=policy,
        behavior_token_logprobs=behavior,
        reference_logprob=reference.sum(-1),
        reference_token_logprobs=reference,
        mask=mask,
        reward=pick(reward),
        weight=weight,
        length=mask.sum(-1),
        staleness=pick(STALENESS),
        log_z=jnp.asarray(log_z),
        totals=Totals(jnp.float64(len(WEIGHTS)), weight.sum(), counted),
        token_advantages=jnp.sin(behavior),
    )


def of_objective(objective, index, weight):
    """(loss and metrics, gradient by the token log-probs of each distinct response)."""

    def loss(policy, log_z):
        data = group_data(policy, index, weight)
        data = data._replace(log_z=log_z if objective.heads else None)
        made = objective(data, 0.3)
        return made.loss, made.metrics

    policy, log_z = jnp.asarray(responses()[0][0]), jnp.asarray(responses()[3])
    return jax.value_and_grad(loss, (0, 1), has_aux=True)(policy, log_z)


# Losses and gradients of all of them: test_objective_formulas.py.
@pytest.mark.parametrize("name", [n if n in METRICS else slow(n) for n in OBJECTIVES])
def test_every_objective_counts_a_weight_as_so_many_responses(name):
    every = np.broadcast_to(np.arange(4), WEIGHTS.shape)
    rows = np.array([np.repeat(np.arange(4), w) for w in WEIGHTS])
    with jax.enable_x64(True):
        (loss, metrics), gradient = of_objective(OBJECTIVES[name], every, WEIGHTS)
        (wanted, wanted_metrics), wanted_gradient = of_objective(
            OBJECTIVES[name], rows, np.ones(rows.shape)
        )
        assert loss.dtype == jnp.float64 and abs(float(wanted)) > 1e-3
        np.testing.assert_allclose(loss, wanted, rtol=1e-12)
        assert metrics.keys() == wanted_metrics.keys()
        for key, value in wanted_metrics.items():
            np.testing.assert_allclose(metrics[key], value, rtol=1e-12, err_msg=key)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15),
            gradient,
            wanted_gradient,
        )


def part(policy, log_z, prompts):
    """These prompts of the batch; others are zeros without weights."""
    data = group_data(policy, np.broadcast_to(np.arange(4), WEIGHTS.shape), WEIGHTS)
    is_kept = np.isin(np.arange(4), prompts)

    def emptied(x):
        x = jnp.asarray(x)
        return jnp.where(is_kept.reshape(4, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))

    arrays = {name: x for name, x in data._asdict().items() if name not in ("log_z", "totals")}
    arrays = {name: None if x is None else emptied(x) for name, x in arrays.items()}
    return GroupData(**arrays, log_z=log_z, totals=data.totals)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_of_parts_add_up_and_other_prompts_add_nothing(name):
    """What lets a batch be worked on in parts; a plain mean in an objective would fail here."""
    objective = OBJECTIVES[name]

    def loss(policy, log_z, *prompts):
        data = part(policy, log_z, prompts)
        return objective(data if objective.heads else data._replace(log_z=None), 0.3).loss

    with jax.enable_x64(True):
        policy, log_z = jnp.asarray(responses()[0][0]), jnp.asarray(responses()[3])
        assert loss(policy, log_z) == 0.0
        whole = loss(policy, log_z, 0, 1, 2, 3)
        parts = [loss(policy, log_z, i) for i in range(4)]
        np.testing.assert_allclose(sum(parts), whole, rtol=1e-12)
        gradient = jax.grad(loss, (0, 1))(policy, log_z, 0, 1)
        jax.tree.map(lambda x: np.testing.assert_array_equal(x[2:], 0.0), gradient)
        assert all(np.isfinite(x).all() for x in gradient) and np.abs(gradient[0][:2]).max() > 1e-3


@functools.cache
def one_device_step(objective, **cut):
    settings = replace(SETTINGS, objective=objective, **cut)
    return make_train_step(CONFIG, keep_gradient(), optax.constant_schedule(0.0), settings)


def step_of(objective, draws, *, row_length=0, shares_prompts=False, **cut):
    state = init_state(
        random_params(CONFIG),
        keep_gradient(),
        keep_reference=objective.needs_token_reference,
        log_z_size=CONFIG.hidden_size if objective.heads else 0,
    )
    batch = lay_out(
        draws,
        row_length=row_length,
        shares_prompts=shares_prompts,
        has_prompts=bool(objective.heads),
        **cut,
    )
    state, metrics = one_device_step(objective, **cut)(state, batch)
    return state.opt_state, metrics, batch


def weighted_draws():
    draws = make_draws(weights=WEIGHTS)
    # Three versions, one of them the one that is trained.
    return [
        d._replace(
            trajectories=tuple(replace(y, version_min=-j % 3) for j, y in enumerate(d.trajectories))
        )
        for d in draws
    ]


WHOLE, PARTS = {"micro_batch_rows": 6, "is_whole": True}, {"micro_batch_rows": 2}
SHARED, PACKED = {"shares_prompts": True}, {"row_length": 18}


# Padded and packed, with shared prompts and without; scored once or, groups in parts, twice.
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("rloo_vargrad", WHOLE),
        slow("grpo_vargrad", PARTS),
        ("tb_learned", {**SHARED, **WHOLE}),
        slow("cispo_vargrad", {**SHARED, "micro_batch_rows": 4}),
        ("tb_vargrad", {**PACKED, **PARTS}),
        slow("tb_learned", {**PACKED, **WHOLE}),
        ("rloo_vargrad", {**PACKED, **SHARED, **WHOLE}),
    ],
)
def test_a_step_on_weights_is_that_on_repeated_rows(name, layout):
    draws, objective = weighted_draws(), OBJECTIVES[name]
    wanted, wanted_metrics, rows = step_of(objective, repeated(draws))
    gradient, metrics, batch = step_of(objective, draws, **layout)
    assert (rows.slots > 0).sum() == 24 and len(np.unique(batch.slots[batch.slots > 0])) == 11
    assert_same_gradient(gradient, wanted)
    assert_same_metrics(metrics, wanted_metrics)
    assert (metrics["train/rows"], wanted_metrics["train/rows"]) == (11, 24)
    np.testing.assert_allclose(metrics["train/rows_share"], 11 / 24)


def assert_same_gradient(got, wanted):
    def flat(tree):
        return np.concatenate([x.ravel() for x in jax.tree.leaves(jax.device_get(tree))])

    got, wanted = flat(got), flat(wanted)
    assert np.linalg.norm(wanted) > 0.01  # of the smallest, cispo, 0.08
    # The model computes in float32: single entries are off by a little more.
    assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted)


def assert_same_metrics(got, wanted):
    assert got.keys() == wanted.keys()
    of_rows = {"train/rows", "train/rows_share", "train/padding_share"}
    # The last is the share of distinct responses.
    got, wanted = ({**x, STRATA_KEY: x[STRATA_KEY][:-1]} for x in (got, wanted))
    for key in wanted.keys() - of_rows:
        # Sums of float32 log-probs of order 1; the sampler gap is a difference of two.
        np.testing.assert_allclose(got[key], wanted[key], rtol=1e-5, atol=1e-6, err_msg=key)


# Four parts of the batch, which divide the rows of a micro-batch: two responses on each.
KEPT = {"micro_batch_rows": 8, "is_whole": True, "row_multiple": 4}


@pytest.mark.parametrize(
    ("shares_prompts", "row_length"), [slow(False, 0), slow(True, 0), (True, 18), slow(False, 18)]
)
def test_weights_on_eight_devices(shares_prompts, row_length):
    draws, name = weighted_draws(), "tb_vargrad"
    found = []
    for shape, drawn, cut in (((1, 1, 1), repeated(draws), {}), ((2, 2, 2), draws, KEPT)):
        settings = replace(REMAT, objective=OBJECTIVES[name], **cut)
        shardings, state, step = sharded(shape, settings, keep_gradient())
        layout = {"shares_prompts": shares_prompts, "row_length": row_length} if cut else {}
        batch = lay_out(drawn, **cut, **layout)
        state, metrics = step(state, jax.device_put(batch, shardings.batch))
        found.append((state.opt_state, jax.device_get(metrics)))
    # Packed rows fit one micro-batch, or half of one: they are not padded to more.
    wide = {(False, 0): (32, 1), (True, 0): (16, 2), (True, 18): (4, 18), (False, 18): (8, 18)}
    assert batch.slots.shape == wide[shares_prompts, row_length]
    (wanted, wanted_metrics), (gradient, metrics) = found
    assert_same_gradient(gradient, wanted)
    assert_same_metrics(metrics, wanted_metrics)
