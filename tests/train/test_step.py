# SPDX-License-Identifier: Apache-2.0
"""The train step: one loss and gradient in every layout and cut, and the state after it."""

import functools
from dataclasses import replace

import chex
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
    changed,
    gradient_of,
    lay_out,
    make_batch,
    make_draws,
    slow,
)
from fake_models import random_params, tiny_config, token_logprobs

from tba_jax.models.transformer import apply
from tba_jax.settings import Schedule
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.groups import Groups
from tba_jax.train.losses import summed, tb
from tba_jax.train.metrics import Outputs, step_metrics
from tba_jax.train.objectives import Needs, Objective, make_objective, objective
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import Head, init_state
from tba_jax.train.step import make_reference_pass, make_train_step

BETA, T = 0.1, 6
# K = 6 responses, of which some are equal: 3 distinct of the first prompt, 1 of the second.
REPEATS = [[3, 1, 2, 0], [6, 0, 0, 0], [1, 1, 1, 3], [2, 2, 0, 2]]
HEAD = Head(jnp.linspace(-1, 1, CONFIG.hidden_size, dtype=jnp.float32), jnp.float32(0.3))


def observed(y):
    """The response with observations in it, which no policy sampled, and with advantages."""
    n = len(y.response_tokens)
    is_sampled = (np.arange(n) % 3 != 1) | (np.arange(n) == n - 1)
    behavior = np.where(is_sampled, y.behavior_token_logprobs, np.float32(0))
    own = {"behavior_token_logprobs": behavior, "token_advantages": np.sin(y.response_tokens)}
    return replace(y, is_sampled=is_sampled, **own)


@functools.cache
def problem_draws():
    """Draws with repeats, masks with holes and an empty slot; equal tokens of two versions."""
    draws = changed(make_draws(repeats=REPEATS), observed)
    twin = replace(draws[0].trajectories[0], version_min=-2, reward=0.5)
    twin = replace(twin, behavior_token_logprobs=1.25 * twin.behavior_token_logprobs)
    draws[0] = draws[0]._replace(trajectories=(twin, *draws[0].trajectories[1:]))
    return [*draws, draws[0]._replace(trajectories=(), ids=())]


def arrays():
    """Groups of the draws, and tokens of each response after its prompt, written down by hand."""
    draws = [d for d in problem_draws() if d.trajectories]
    p, k = len(draws), 6
    names = ("behavior", "reference", "advantages")
    found = {name: np.zeros((p, k, T), np.float32) for name in names}
    mask, tokens = np.zeros((p, k, T), bool), np.zeros((p, k, 4 + T), np.int32)
    lengths, reward = np.zeros((p, k), np.int32), np.zeros((p, k), np.float32)
    for i, j in np.ndindex(p, k):
        y = draws[i].trajectories[j]
        n = lengths[i, j] = len(y.response_tokens)
        tokens[i, j, :4], tokens[i, j, 4 : 4 + n] = draws[i].prompt.tokens, y.response_tokens
        mask[i, j, :n], reward[i, j] = y.is_sampled, y.reward
        found["behavior"][i, j, :n] = y.behavior_token_logprobs
        found["reference"][i, j, :n] = np.where(y.is_sampled, y.reference_token_logprobs, 0)
        found["advantages"][i, j, :n] = y.token_advantages
    return found, mask, tokens, lengths, reward


@functools.cache
def forward():
    """(log-probs, values of the head) [p k t] of each response alone in a padded row; their VJP."""
    _, mask, tokens, lengths, _ = arrays()
    prompt = np.full(lengths.shape, 4, np.int32)

    def values(params, head):
        rows, index = tokens.reshape(-1, 4 + T), np.arange(4 + T)[None]
        hidden = apply(
            params, rows, jnp.broadcast_to(index, rows.shape),
            index < 4 + lengths.reshape(-1, 1), config=CONFIG, compute_dtype=jnp.float32,
        )  # fmt: skip
        return (hidden[:, 3:-1] @ head.weight + head.bias).reshape(mask.shape)

    @jax.jit
    def run(params, head):
        logp = token_logprobs(
            params, tokens, prompt, lengths, response_bucket=T, config=CONFIG, scoring=SCORING
        )
        return jnp.where(mask, logp, 0), jnp.where(mask, values(params, head), 0)

    return jax.vjp(run, random_params(CONFIG), HEAD)


@functools.cache
def expected(name, **own):
    """(loss, gradient, log-probs) of the objective on every response alone in a padded row."""
    objective, (found, mask, _, _, reward) = make_objective(name, own), arrays()
    (logp, values), pull = forward()
    totals = {"prompts": len(reward), "responses": reward.size, "tokens": mask.sum()}

    def loss(logp, values):
        groups = Groups(
            logp=logp,
            behavior=jnp.asarray(found["behavior"]),
            reference=jnp.asarray(found["reference"]),
            mask=jnp.asarray(mask),
            reward=jnp.asarray(reward),
            staleness=jnp.zeros(reward.shape, jnp.int32),
        )
        if objective.needs.head == "value":
            groups = groups._replace(values=values)
        if objective.needs.advantages:
            groups = groups._replace(advantages=jnp.asarray(found["advantages"]))
        if objective.needs.head == "log_z":
            # The state before the first token has seen the prompt alone.
            groups = groups._replace(log_z=values[:, 0, 0])
        return objective(groups, BETA).loss.sum() / totals[objective.needs.total]

    value, cotangents = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(logp, values)
    gradient = pull(cotangents)
    return value, gradient if objective.needs.head else gradient[0], logp


ONE, PARTS, WHOLE = (
    {"micro_batch_rows": 1},
    {"micro_batch_rows": 4},
    {"micro_batch_rows": 6, "is_whole": True},
)
SHARED, PACKED = {"shares_prompts": True}, {"row_length": 18}
# By default without a head, with advantages and with values; test_losses.py has all formulas.
CASES = [
    slow("tb", {**SHARED, **WHOLE}),
    ("tb", SHARED),
    slow("grpo", {**PACKED, **PARTS}),
    ("ppo", {**PACKED, **SHARED, **WHOLE}),
    ("vineppo", {**PACKED, **PARTS}),
    slow("online_dpo", {**SHARED, **PARTS}),
    slow("ppo", ONE),
    slow("tb learned", {**SHARED, **PARTS}),
    slow("tb learned", {**PACKED, **SHARED}),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_loss_and_gradient_are_those_of_each_response_alone(name, layout):
    own = {"log_z": "learned"} if "learned" in name else {}
    loss, wanted, logp = expected(name.split()[0], **own)
    objective = make_objective(name.split()[0], own)
    batch = lay_out(problem_draws(), **layout, has_advantages=objective.needs.advantages)
    # Equal tokens are computed once: 3, 1, 4 and 3 distinct responses to the four prompts.
    assert len(np.unique(batch.source[batch.mask])) < batch.mask.sum()
    cut = {key: layout[key] for key in ("micro_batch_rows", "is_whole") if key in layout}
    settings = replace(SETTINGS, objective=objective, beta=Schedule(BETA), **cut)
    gradient, outputs = gradient_of(batch, settings, head=HEAD if objective.needs.head else None)
    np.testing.assert_allclose(outputs["numbers"]["loss"], loss, rtol=1e-5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted))
    assert largest > 1e-2
    # float32 sums in another order, of numbers up to the largest
    chex.assert_trees_all_close(gradient, wanted, rtol=0, atol=2e-6 * largest)
    np.testing.assert_allclose(outputs["sums"]["policy"][:4], logp.sum(-1), atol=1e-5)
    assert not outputs["sums"]["policy"][4].any()
    np.testing.assert_allclose(outputs["shown"]["policy"][:, :T], logp[0], atol=1e-5)


@pytest.mark.parametrize("layout", [PACKED, slow({**SHARED, **WHOLE})], ids=str)
def test_the_reference_is_computed_in_the_rows_that_lack_it(layout):
    """The rest of the batch keeps its own numbers, to the bit."""
    draws = problem_draws()
    lacking = draws[2].trajectories[0]
    draws = changed(
        draws, lambda y: replace(y, reference_token_logprobs=None) if y is lacking else y
    )
    batch = lay_out(draws, **layout)
    cut = {key: layout[key] for key in ("micro_batch_rows", "is_whole") if key in layout}
    score = make_reference_pass(CONFIG, replace(SETTINGS, **cut))
    params = random_params(CONFIG)
    assert (batch.missing < len(batch.tokens)).sum() == 1
    found = np.asarray(score(params, batch))
    of_all = expected("tb")[2]
    # Log-probs of the same parameters: those of the policy, in rows of other lengths.
    np.testing.assert_allclose(found[2, 0], of_all[2, 0] * batch.mask[2, 0], atol=1e-5)
    is_known = ~np.isnan(batch.reference)
    np.testing.assert_array_equal(found[is_known], batch.reference[is_known])
    whole = lay_out(draws, **layout, reference="scored")
    np.testing.assert_allclose(np.asarray(score(params, whole))[:4], of_all, atol=1e-5)
    assert lay_out(problem_draws(), **layout).missing is None


def infinite(groups, beta, *, epochs=1):
    """TB, and a loss that is not finite and whose gradient is where a reward is above 1000."""
    return tb(groups, beta).loss + jnp.where(groups.reward > 1000, jnp.inf, 0)


@functools.cache
def adam_step(epochs=1):
    """(step, function that makes its first state), for tests that share its program."""
    objective = Objective("infinite", infinite, (("epochs", epochs),))
    optimizer, rate = optax.scale_by_adam(), Schedule(0.1, 0.0, 10, "linear")
    step = make_train_step(CONFIG, optimizer, rate, replace(SETTINGS, objective=objective))
    return step, lambda: init_state(random_params(CONFIG), optimizer, keep_reference=False)


@functools.cache
def reference_step():
    """The same, with a reference that has a temperature and is replaced every two steps."""
    settings = replace(
        SETTINGS,
        reference_temperature=Schedule(1.0, 2.0, 4, "linear"),
        reward_temperature=Schedule(2.0, 1.0, 4, "linear"),
        reference_reset_period=2,
    )
    step = make_train_step(CONFIG, optax.identity(), Schedule(0.5), settings)
    return step, lambda: init_state(random_params(CONFIG), optax.identity(), keep_reference=True)


@objective(Needs(head="value"))
def weighted(groups, beta, *, epochs=1):
    """Each token's log-prob times its value as the step began, and the values, which change."""
    begun = groups.values if groups.start_values is None else groups.start_values
    return summed(groups, groups.logp * jax.lax.stop_gradient(begun) + groups.values)


@objective(Needs(head="value"))
def constant(groups, beta):
    """The same, where all values are 0.3 as the step begins."""
    return summed(groups, groups.logp * 0.3 + groups.values)


def test_several_updates_are_a_loop_over_the_same_batch():
    """What is held fixed is that of the start; the values of the later updates are others."""
    batch, updates = lay_out(make_draws(repeats=REPEATS)), 3
    head = Head(jnp.zeros(CONFIG.hidden_size), jnp.float32(0.3))

    def trained(objective, times):
        settings = replace(SETTINGS, objective=objective)
        step = make_train_step(CONFIG, optax.identity(), Schedule(0.5), settings)
        sizes = {"keep_reference": False, "head_size": CONFIG.hidden_size}
        state = init_state(random_params(CONFIG), optax.identity(), **sizes)
        state = state._replace(head=jax.tree.map(jnp.copy, head))
        losses = []
        for _ in range(times):
            state, outputs = step(state, batch)
            losses.append(outputs["numbers"]["loss"])
        return state, outputs["numbers"], np.mean(losses)

    wanted, _, loss = trained(Objective("constant", constant), updates)
    state, numbers, _ = trained(Objective("weighted", weighted, (("epochs", updates),)), 1)
    np.testing.assert_allclose(numbers["loss"], loss, rtol=1e-4)
    assert (numbers["updates"], int(state.step), int(state.skipped_steps)) == (updates, 1, 0)
    before = random_params(CONFIG)
    moved = max(
        float(np.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(wanted.params), jax.tree.leaves(before), strict=True)
    )
    assert moved > 0.01 and abs(float(wanted.head.bias) - 0.3) > 0.1
    # float32 sums in another order, carried through three updates
    found = state.params, state.head
    chex.assert_trees_all_close(found, (wanted.params, wanted.head), rtol=0, atol=1e-4 * moved)


@pytest.mark.parametrize("epochs", [1, slow(2)])
def test_a_step_that_is_not_finite_changes_only_the_counters(epochs):
    """Also where the loss is infinite and its gradient is finite."""
    step, initial = adam_step(epochs)
    state, _ = step(initial(), make_batch())
    before = jax.device_get(state)
    for in_a_row, reward in ((1, np.nan), (2, 2000)):
        state, outputs = step(state, broken(make_batch(), reward))
        numbers = outputs["numbers"]
        assert not np.isfinite(numbers["loss"]) and numbers.get("updates", 0) == 0
        assert (0 < numbers["grad_norm"] < np.inf) == (reward == 2000)
        assert numbers["skipped_in_a_row"] == numbers["skipped_steps"] == in_a_row
    after = jax.device_get(state)
    chex.assert_trees_all_equal(after.params, before.params)
    chex.assert_trees_all_equal(after.opt_state.inner_state, before.opt_state.inner_state)
    assert (after.step, after.skipped_steps, after.skipped_in_a_row) == (3, 2, 2)
    # The next update is the one that the skipped steps would have been, at their learning rate.
    wanted, wanted_outputs = step(jax.device_put(before), make_batch(seed=1))
    got, outputs = step(state, make_batch(seed=1))
    chex.assert_trees_all_equal(got.params, wanted.params)
    assert outputs["numbers"]["lr"] == wanted_outputs["numbers"]["lr"]
    assert (int(got.skipped_steps), int(got.skipped_in_a_row)) == (2, 0)


@pytest.mark.parametrize(
    ("name", "param_dtype", "rows"),
    [("adamw", "bfloat16", 16), slow("adamw", "bfloat16", 8), slow("adafactor", "float32", 8)],
)
def test_every_dtype_trains_and_stays_what_it_is(name, param_dtype, rows):
    optimizer = make_optimizer(OptimizerSettings(name, b2=0.99, weight_decay=0.01))
    scoring = replace(SCORING, compute_dtype="bfloat16")
    # Traced for the gradient, for the value and for the shapes of outputs, and never again.
    chex.clear_trace_counter()
    loss = chex.assert_max_traces(tb, n=3)
    objective = replace(SETTINGS.objective, loss=loss)
    settings = replace(SETTINGS, objective=objective, scoring=scoring, micro_batch_rows=rows)
    step = make_train_step(CONFIG, optimizer, Schedule(3e-3), settings)
    params = jax.tree.map(lambda x: x.astype(param_dtype), random_params(CONFIG))
    state = init_state(params, optimizer, keep_reference=False)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    floats = [x for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and all(x.dtype == param_dtype for x in floats)
    losses = []
    for _ in range(12):
        state, outputs = step(state, make_batch())
        losses.append(float(outputs["numbers"]["loss"]))
    assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    assert losses[-1] < 0.7 * losses[0], losses


def test_a_reset_replaces_the_reference_by_the_policy():
    step, initial = reference_step()
    state, _ = step(initial(), make_batch())
    chex.assert_trees_all_equal(state.reference_params, random_params(CONFIG))
    state, _ = step(state, make_batch())
    chex.assert_trees_all_equal(state.reference_params, state.params)


@pytest.mark.slow
def test_remat_and_micro_batches_take_less_memory():
    config = tiny_config(num_layers=8)
    state = jax.eval_shape(
        lambda: init_state(random_params(config), optax.identity(), keep_reference=False)
    )

    def temporaries(**changes):
        settings = replace(SETTINGS, **changes)
        step = make_train_step(config, optax.identity(), Schedule(0.1), settings)
        lowered = step.lower(state, make_batch(p=8, prompt=40, t=40))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    none, dots, layers = (temporaries(remat=name) for name in ("none", "dots", "layers"))
    assert layers < 0.8 * dots < 0.8 * 0.8 * none, (none, dots, layers)
    # A quarter of the rows at a time, and a sum of gradients, small in this model.
    assert temporaries(micro_batch_rows=8) < 0.4 * none


def test_temperatures_move_with_the_step_and_scale_the_target():
    """log R = (log pi_ref / gamma + r / beta) / T_r, as in TBA's red-teaming."""
    batch = make_batch()
    (step, initial), (plain, first) = reference_step(), adam_step()
    for at, gamma, heat in ((0, 1.0, 2.0), (2, 1.5, 1.5), (9, 2.0, 1.0)):
        outputs = step(initial()._replace(step=jnp.int32(at)), batch)[1]
        numbers = outputs["numbers"]
        assert (numbers["reference_temperature"], numbers["reward_temperature"]) == (gamma, heat)
        # The same loss as the plain step's on numbers that were divided by hand.
        by_hand = batch._replace(
            reference=batch.reference / (gamma * heat), rewards=batch.rewards / heat
        )
        wanted = plain(first(), by_hand)[1]
        np.testing.assert_allclose(numbers["loss"], wanted["numbers"]["loss"], rtol=1e-6)
        values = step_metrics(batch, Outputs(**jax.device_get(outputs)))
        np.testing.assert_allclose(values["train/tb_loss"], numbers["loss"] * 20, rtol=1e-5)
        np.testing.assert_allclose(values["train/reward_mean"], batch.rewards.mean())
