# SPDX-License-Identifier: Apache-2.0
"""The train step: schedules, equivalences and sharding."""

import functools
import types
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_batches import (
    CONFIG,
    SCORING,
    SETTINGS,
    broken,
    lay_out,
    make_batch,
    make_draws,
    named,
    slow,
)
from fake_models import random_params, tiny_config

from tba_jax.settings import Schedule
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.micro_batches import cut_rows
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import init_state
from tba_jax.train.step import make_train_step
from tba_jax.train.step_metrics import SHOWN_KEY
from tba_jax.train.step_settings import Target


@functools.cache
def sgd_step(settings):
    """(optimizer, train step) with SGD: Adam's first update is the gradient's sign, which magnifies
    rounding."""
    schedule = optax.constant_schedule(0.1)
    optimizer = optax.sgd(schedule)
    return optimizer, make_train_step(CONFIG, optimizer, schedule, settings)


def run_step(batch, settings=SETTINGS, *, params=None):
    optimizer, step = sgd_step(settings)
    params = random_params(CONFIG) if params is None else params
    state = init_state(params, optimizer, keep_reference=False)
    return step(state, batch)


def assert_close_states(got, expected):
    jax.tree.map(
        # float32 sums in another order
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        jax.device_get(got.params),
        jax.device_get(expected.params),
    )


def assert_close_metrics(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        # Sums of 96 float32 log-probs of order 1; the sampler gap is a difference of two.
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


# K = 4: whole groups, parts of groups, single rows, a group and space for half of one.
@pytest.mark.parametrize(
    ("objective", "micro_batch_rows"),
    [("tb", 2), ("rloo", 6), slow("rloo", 4), slow("tb", 1)],
)
def test_accumulated_step_equals_the_whole_one(objective, micro_batch_rows):
    cut = {"micro_batch_rows": micro_batch_rows, "is_whole": micro_batch_rows >= 4}
    settings = replace(SETTINGS, objective=named(objective))
    expected, expected_metrics = run_step(make_batch(), settings)
    got, metrics = run_step(make_batch(**cut), replace(settings, **cut))
    assert_close_states(got, expected)
    if micro_batch_rows == 6:  # a third of each is padding
        share = 1 - (1 - expected_metrics["train/padding_share"]) * 4 / 6
        expected_metrics = {**expected_metrics, "train/padding_share": share}
    assert_close_metrics(metrics, expected_metrics)


def test_rows_that_micro_batches_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="micro_batch_rows=3 does not divide the 16 rows"):
        run_step(make_batch(), replace(SETTINGS, micro_batch_rows=3))


def test_a_batch_of_fewer_rows_than_a_micro_batch_is_one():
    slots = jnp.asarray([[1], [2], [0]])
    rows: Any = types.SimpleNamespace(tokens=types.SimpleNamespace(slots=slots))
    cut = cut_rows(rows, 8, is_whole=True)
    assert cut.num == cut.used == 1
    np.testing.assert_array_equal(cut.take(slots, jnp.int32(0)), slots)
    assert cut_rows(rows, 1, is_whole=False).num == 3


def test_train_step_metrics_against_numpy():
    batch = make_batch()
    _, metrics = run_step(batch)
    np.testing.assert_allclose(metrics["train/reward_mean"], batch.rewards.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["train/response_tokens"], batch.response_lengths.sum())
    assert np.isfinite(metrics["train/sampler_gap"])  # step 0, versions 0
    stale = batch._replace(versions=np.full((4, 4), -1, np.int32))
    assert np.isnan(run_step(stale)[1]["train/sampler_gap"])


def test_reference_at_the_trainer_starts_as_the_policy_and_is_reset():
    optimizer, step = sgd_step(replace(SETTINGS, reference_reset_period=2))
    state = init_state(random_params(CONFIG), optimizer, keep_reference=True)
    start = jax.device_get(state.params)
    state, metrics = step(state, make_batch())
    np.testing.assert_allclose(metrics["train/kl_reference"], 0.0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.reference_params), start)
    state, metrics = step(state, make_batch())
    assert abs(float(metrics["train/kl_reference"])) > 1e-4
    reference, policy = jax.device_get((state.reference_params, state.params))
    jax.tree.map(np.testing.assert_array_equal, reference, policy)


def test_tokens_of_an_environment_are_in_no_sum():
    # The same tokens left out: as those that end a response, and as those it did not write.
    draws = make_draws()
    batch = lay_out(draws)
    ends = replace(SETTINGS, scoring=replace(SCORING, mask_eos=True, eos_ids=(3, 7)))
    expected, expected_metrics = run_step(batch, ends)
    _, plain = run_step(batch)
    assert float(plain["train/loss"]) != float(expected_metrics["train/loss"])
    marked = [d._replace(trajectories=tuple(map(marked_by_hand, d.trajectories))) for d in draws]
    got, metrics = run_step(lay_out(marked))
    assert_close_states(got, expected)
    for name in ("train/loss", "train/grad_norm", "train/kl_reference"):
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
    in_rows, in_rows_metrics = run_step(lay_out(marked, row_length=18))
    assert_close_states(in_rows, expected)
    assert_close_metrics_of_layouts(in_rows_metrics, metrics)


def marked_by_hand(y):
    is_sampled = ~np.isin(y.response_tokens, (3, 7))
    behavior = np.where(is_sampled, y.behavior_token_logprobs, np.float32(0.0))
    return replace(y, is_sampled=is_sampled, behavior_token_logprobs=behavior)


def assert_close_metrics_of_layouts(got, expected):
    name = "train/padding_share"
    assert_close_metrics({**got, name: 0.0}, {**expected, name: 0.0})


# All at once; micro-batches of which some are padding, with groups in several, and with whole ones.
@pytest.mark.parametrize(("objective", "micro_batch_rows"), [("tb", 4), slow("rloo", 3)])
def test_packed_step_equals_the_padded_one(objective, micro_batch_rows):
    cut = {"micro_batch_rows": micro_batch_rows, "is_whole": micro_batch_rows == 4}
    rows = make_batch(row_length=18, **cut)
    assert (rows.slots[-1] == 0).all()
    scoring = replace(SCORING, mask_eos=True, eos_ids=(3, 7))
    settings = replace(SETTINGS, objective=named(objective), scoring=scoring, shows_tokens=True)
    expected, expected_metrics = run_step(make_batch(), settings)
    got, metrics = run_step(rows, replace(settings, **cut))
    assert_close_states(got, expected)
    shown, wanted = (x.pop(SHOWN_KEY)["policy"] for x in (metrics, expected_metrics))
    assert np.count_nonzero(wanted) == make_batch().response_lengths[0].sum()
    np.testing.assert_allclose(shown[:, : wanted.shape[1]], wanted, atol=1e-5)
    assert_close_metrics_of_layouts(metrics, expected_metrics)


@pytest.mark.parametrize(("row_length", "micro_batch_rows"), [(0, 0), slow(18, 4)])
def test_an_empty_slot_is_as_if_its_prompt_were_not_there(row_length, micro_batch_rows):
    draws = make_draws(p=3)
    empty = draws[1]._replace(trajectories=(), weights=(), ids=())
    # Means over prompts, over responses and over tokens.
    settings = replace(SETTINGS, objective=named("cispo"))
    expected, expected_metrics = run_step(lay_out([draws[0], draws[2]]), settings)
    cut = {"micro_batch_rows": micro_batch_rows, "is_whole": micro_batch_rows == 4}
    batch = lay_out([draws[0], empty, draws[2]], row_length=row_length, **cut)
    got, metrics = run_step(batch, replace(settings, **cut))
    assert_close_states(got, expected)
    of_layout = {f"train/{name}": 0.0 for name in ("padding_share", "rows_share")}
    assert_close_metrics({**metrics, **of_layout}, {**expected_metrics, **of_layout})


def test_a_step_that_is_not_finite_changes_only_the_counters():
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    optimizer = optax.adam(schedule)
    step = make_train_step(CONFIG, optimizer, schedule, SETTINGS)
    state = init_state(random_params(CONFIG), optimizer, keep_reference=False)
    state, _ = step(state, make_batch())
    before = jax.device_get(state)
    for in_a_row in (1, 2):
        state, metrics = step(state, broken(make_batch()))
        assert not np.isfinite(metrics["train/loss"])
        assert metrics["train/skipped_in_a_row"] == metrics["train/skipped_steps"] == in_a_row
    after = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
    assert (after.step, after.skipped_steps, after.skipped_in_a_row) == (3, 2, 2)
    # The next update is the one the skipped steps would have been, at their learning rate.
    expected, expected_metrics = step(jax.device_put(before), make_batch(seed=1))
    got, metrics = step(state, make_batch(seed=1))
    jax.tree.map(np.testing.assert_array_equal, got.params, jax.device_get(expected.params))
    assert metrics["train/lr"] == expected_metrics["train/lr"]
    assert (metrics["train/skipped_steps"], metrics["train/skipped_in_a_row"]) == (2, 0)


# Storage of parameters and optimiser, dtype of matmul inputs.
@pytest.mark.parametrize(
    ("param_dtype", "compute_dtype"),
    [slow("float32", "bfloat16"), ("bfloat16", "bfloat16")],
)
@pytest.mark.parametrize("name", ["adamw", slow("adafactor")])
def test_every_dtype_trains_and_stays_what_it_is(name, param_dtype, compute_dtype):
    schedule = optax.constant_schedule(3e-3)
    optimizer = make_optimizer(OptimizerSettings(name, b2=0.99, weight_decay=0.01), schedule)
    settings = replace(
        SETTINGS, scoring=replace(SCORING, compute_dtype=compute_dtype), micro_batch_rows=8
    )
    step = make_train_step(CONFIG, optimizer, schedule, settings)
    params = jax.tree.map(lambda x: x.astype(param_dtype), random_params(CONFIG))
    state = init_state(params, optimizer, keep_reference=False)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    assert all(x.dtype == param_dtype for x in jax.tree.leaves(state.params))
    floats = [x for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and all(x.dtype == param_dtype for x in floats)
    losses = []
    for _ in range(12):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["train/loss"]))
    assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    assert all(value.dtype in (jnp.float32, jnp.int32) for value in metrics.values())
    assert losses[-1] < 0.7 * losses[0], losses


@pytest.mark.parametrize(("micro_batch_rows", "keep_reference"), [(2, True), slow(0, False)])
def test_the_whole_state_is_updated_in_place(micro_batch_rows, keep_reference):
    schedule = optax.constant_schedule(1e-3)
    optimizer = make_optimizer(OptimizerSettings("adamw", b2=0.99, weight_decay=0.01), schedule)
    settings = replace(SETTINGS, micro_batch_rows=micro_batch_rows, reference_reset_period=2)
    step = make_train_step(CONFIG, optimizer, schedule, settings)
    state = init_state(random_params(CONFIG), optimizer, keep_reference=keep_reference)
    memory = step.lower(state, make_batch()).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(state))


@pytest.mark.slow
def test_remat_and_micro_batches_take_less_memory():
    config = tiny_config(num_layers=8)
    optimizer = optax.sgd(0.1)
    state = jax.eval_shape(
        lambda: init_state(random_params(config), optimizer, keep_reference=False)
    )

    def temporaries(**changes):
        settings = replace(SETTINGS, **changes)
        step = make_train_step(config, optimizer, optax.constant_schedule(0.1), settings)
        lowered = step.lower(state, make_batch(p=8, prompt=40, t=40))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    none, dots, layers = (temporaries(remat=name) for name in ("none", "dots", "layers"))
    assert layers < 0.8 * dots < 0.8 * 0.8 * none, (none, dots, layers)
    # A quarter of the rows at a time, and a sum of gradients, small in this model.
    assert temporaries(micro_batch_rows=8) < 0.4 * none


def test_temperatures_move_with_the_step_and_scale_the_target():
    batch = make_batch()
    target = Target(Schedule(0.1), Schedule(1.0, 2.0, 4, "linear"), Schedule(2.0, 1.0, 4, "linear"))
    settings = replace(SETTINGS, target=target)
    optimizer, step = sgd_step(settings)
    _, plain = sgd_step(SETTINGS)
    params = random_params(CONFIG)
    for at, gamma, heat in ((0, 1.0, 2.0), (2, 1.5, 1.5), (4, 2.0, 1.0), (9, 2.0, 1.0)):
        state = init_state(jax.tree.map(jnp.copy, params), optimizer, keep_reference=False)
        _, metrics = step(state._replace(step=jnp.int32(at)), batch)
        assert metrics["train/reference_temperature"] == gamma
        assert metrics["train/reward_temperature"] == heat
        # The same loss as the plain step's on numbers that were divided by hand.
        by_hand = batch._replace(
            reference_logprob=batch.reference_logprob / (gamma * heat),
            rewards=batch.rewards / heat,
        )
        state = init_state(jax.tree.map(jnp.copy, params), optimizer, keep_reference=False)
        np.testing.assert_allclose(
            metrics["train/loss"], plain(state, by_hand)[1]["train/loss"], rtol=1e-6
        )
