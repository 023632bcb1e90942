# SPDX-License-Identifier: Apache-2.0
"""Every loss against its published formula, written down in numpy over rows of responses.

Values directly; gradients by central differences of the formula, in which `now` is the policy
where gradients flow and `then` the same policy where they are stopped. Nothing of it uses jax's
autodiff or the parts that losses are made of.
"""

import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.train.groups import Groups, of_sums
from tba_jax.train.objectives import make_objective, objective_names

BETA = 0.3
# Three prompts with K = 6 responses, of which some are equal.
DRAWS = np.array([[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 3, 3], [0, 0, 1, 1, 2, 3]])
T = 6


def problem():
    """Arrays [p k t] and [p k] of a small batch; the sampler is near the policy.

    The third and the fifth token are observations, except at the end of a response. Equal responses
    have equal log-probs of the policy, and each its own of its sampler.
    """
    rng = np.random.default_rng(3)

    def drawn(x):
        return np.take_along_axis(x, DRAWS.reshape(*DRAWS.shape, *[1] * (x.ndim - 2)), axis=1)

    lengths = rng.integers(1, T + 1, (3, 4))[..., None]
    mask = np.arange(T) < lengths
    mask &= (np.arange(T) % 2 == 1) | (np.arange(T) == 0) | (np.arange(T) == lengths - 1)
    policy = np.where(mask, rng.normal(-1.5, 0.5, mask.shape), 0.0)
    reference = np.where(mask, policy + rng.normal(0, 0.6, mask.shape), 0.0)
    values = np.where(mask, rng.normal(size=mask.shape), 0.0)
    given = np.where(mask, rng.normal(size=mask.shape), 0.0)
    reward = drawn(rng.integers(0, 4, (3, 4)) / 2)
    mask, policy, reference, values, given = map(drawn, (mask, policy, reference, values, given))
    return SimpleNamespace(
        policy=policy,
        behavior=np.where(mask, policy + rng.normal(0, 0.4, mask.shape), 0.0),
        reference=reference,
        reward=reward,
        mask=mask,
        log_z=rng.normal(size=3),
        values=values,
        begun=None,
        given=given,
    )


def terms_of(objective, policy, made):
    """The term of each response, [p k]."""
    head = objective.needs.head
    groups = Groups(
        logp=jnp.where(made.mask, policy, 0.0),
        behavior=jnp.asarray(made.behavior),
        reference=jnp.asarray(made.reference),
        mask=jnp.asarray(made.mask),
        reward=jnp.asarray(made.reward),
        staleness=jnp.zeros(made.reward.shape, jnp.int32),
        log_z=jnp.asarray(made.log_z) if head == "log_z" else None,
        values=jnp.asarray(made.values) if head == "value" else None,
        advantages=jnp.asarray(made.given) if objective.needs.advantages else None,
        start_values=None if made.begun is None else jnp.asarray(made.begun),
    )
    return objective(groups, BETA).loss


def loss_of(objective, policy, made):
    totals = {"prompts": 3, "responses": DRAWS.size, "tokens": made.mask.sum()}
    return terms_of(objective, policy, made).sum() / totals[objective.needs.total]


def groups(policy, made):
    """Each prompt's K responses as rows: lists of their tokens' log-probs, rewards, ages."""
    for i in range(len(made.mask)):

        def tokens(x, i=i):
            return [x[i, j][made.mask[i, j]] for j in range(made.mask.shape[1])]

        yield SimpleNamespace(
            now=tokens(policy),
            then=tokens(made.policy),
            mu=tokens(made.behavior),
            ref=tokens(made.reference),
            r=made.reward[i],
            log_z=made.log_z[i],
            a=tokens(made.given),
            v=tokens(made.values),
        )


def total(x):
    return np.array([tokens.sum() for tokens in x])


def others(x):
    return np.array([np.delete(x, j).mean() for j in range(len(x))])


def normalised(r):
    return (r - r.mean()) / (r.std(ddof=1) + 1e-4)


def ppo(ratio, advantage, low, high):
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


# The mean over all responses of a number for each. `of` is a function of one group.
def over_responses(of):
    return lambda gs: np.mean(np.concatenate([of(g) for g in gs]))


def tokens_of(g, advantage, low=0.2, high=0.2):
    """PPO's gain of each token, as a list of rows."""
    return [
        ppo(np.exp(a - b), x, low, high) for a, b, x in zip(g.now, g.mu, advantage, strict=True)
    ]


def rloo(g):
    r = g.r - BETA * (total(g.then) - total(g.ref))
    return -(r - others(r)) * total(g.now)


def proximal_rloo(g):
    r = g.r - BETA * (total(g.mu) - total(g.ref))
    return -ppo(np.exp(total(g.now) - total(g.mu)), r - others(r), 0.2, 0.2)


def grpo(g):
    gains = tokens_of(g, normalised(g.r))
    kls = [np.exp(b - a) - (b - a) - 1 for a, b in zip(g.now, g.ref, strict=True)]
    return np.array([-np.mean(x - BETA * kl) for x, kl in zip(gains, kls, strict=True)])


def gspo(g):
    ratio = np.exp([np.mean(a - b) for a, b in zip(g.now, g.mu, strict=True)])
    return -ppo(ratio, normalised(g.r), 3e-4, 4e-4)


def dapo(gs):
    gains = [x for g in gs for x in tokens_of(g, normalised(g.r), 0.2, 0.28)]
    return -np.mean(np.concatenate(gains))


def ppo_with_values(gs):
    gains, errors = [], []
    for g in gs:
        rewards = g.r - BETA * (total(g.mu) - total(g.ref))
        for now, mu, v, r in zip(g.now, g.mu, g.v, rewards, strict=True):
            a = r - v
            gains.append(ppo(np.exp(now - mu), a, 0.2, 0.2))
            errors.append(a**2 / 2)  # the target is the advantage above the value
    return 0.1 * np.mean(np.concatenate(errors)) - np.mean(np.concatenate(gains))


def cispo(gs, cap=5.0):
    def of(g):
        parts = [
            np.minimum(np.exp(b - c), cap) * a * x
            for a, b, c, x in zip(g.now, g.then, g.mu, normalised(g.r), strict=True)
        ]
        return -np.mean(np.concatenate(parts))

    return np.mean([of(g) for g in gs])


def ipo(gs, bound=0.1, weight=1e-3):
    """Tokens whose probability changed by more than the bound keep the squared log-ratio only."""
    parts = []
    for g in gs:
        for now, then, mu, a in zip(g.now, g.then, g.mu, g.r - g.r.mean(), strict=True):
            is_kept = np.abs(np.exp(then) - np.exp(mu)) <= bound
            parts.append(weight * (now - mu) ** 2 - np.where(is_kept, np.exp(now - mu) * a, 0))
    return np.mean(np.concatenate(parts))


def online_dpo(gs):
    def of(g):
        h = total(g.now) - total(g.ref)
        best, worst = g.r.argmax(), g.r.argmin()
        return np.log1p(np.exp(-BETA * (h[best] - h[worst]))) if np.ptp(g.r) else 0.0

    return np.mean([of(g) for g in gs])


def balance(residual, log_z):
    """beta / 2 times the mean square of residual(group, policy) + log_z(group)."""

    def of(g):
        return BETA * (residual(g, g.now) + log_z(g)) ** 2 / 2

    return over_responses(of)


def tb_residual(g, policy):
    return total(policy) - total(g.ref) - g.r / BETA


def vargrad(g):
    return -np.mean(tb_residual(g, g.then))


def weighted_tokens(weigh):
    """TB whose gradient by each token has a weight: a surrogate, as the weight is detached."""

    def of(g):
        t = tb_residual(g, g.then) + vargrad(g)
        flow = [
            np.sum(weigh(np.exp(b - c)) * (a - b))
            for a, b, c in zip(g.now, g.then, g.mu, strict=True)
        ]
        # The value of the square, and the gradient of the weighted sum.
        return BETA * (t**2 / 2 + t * np.array(flow))

    return over_responses(of)


def clamped(g, policy, bound=0.5):
    """The clamp is of the value: the gradient is that of the policy's log-prob."""
    fixed = [np.clip(a - b, -bound, bound).sum() for a, b in zip(g.then, g.ref, strict=True)]
    return np.array(fixed) + total(policy) - total(g.then) - g.r / BETA


def behavior_log_z(g):
    return np.mean(g.r / BETA - (total(g.mu) - total(g.ref)))


EXACT = {"importance": "none"}
FORMULAS = {
    "reinforce": ({}, over_responses(
        lambda g: -(g.r - BETA * (total(g.then) - total(g.ref))) * total(g.now))),
    "rloo": ({}, over_responses(rloo)),
    "proximal_rloo": ({}, over_responses(proximal_rloo)),
    "grpo": ({}, over_responses(grpo)),
    "dr_grpo": ({}, over_responses(
        lambda g: -np.array([x.sum() for x in tokens_of(g, g.r - g.r.mean())]))),
    "dapo": ({}, dapo),
    "gspo": ({}, over_responses(gspo)),
    "cispo": ({}, cispo),
    "cispo, cap": ({"importance_cap": 1.1}, lambda gs: cispo(gs, 1.1)),
    "ipo": ({}, ipo),
    "ipo, bound": ({"probability_bound": 0.02}, lambda gs: ipo(gs, 0.02)),
    "online_dpo": ({}, online_dpo),
    "ppo": ({}, ppo_with_values),
    "vineppo": ({}, lambda gs: -np.mean(np.concatenate([
        x for g in gs for x in tokens_of(g, g.a)]))),
    "tb": (EXACT, balance(tb_residual, vargrad)),
    "tb, paper": (
        EXACT | {"scale": "paper"}, lambda gs: balance(tb_residual, vargrad)(gs) * 2 / BETA),
    "tb, learned": (EXACT | {"log_z": "learned"}, balance(tb_residual, lambda g: g.log_z)),
    "tb, centred by the sampler": (
        EXACT | {"kl_center": "behavior"}, balance(tb_residual, behavior_log_z)),
    "tb, clamped": (
        EXACT | {"kl_clamp": 0.5}, balance(clamped, lambda g: -np.mean(clamped(g, g.then)))),
    "tb, token clip": (
        {"importance": "token_clip", "importance_cap": 1.3},
        weighted_tokens(lambda w: np.where(w > 1.3, 0, w))),
    "tb, default": ({}, weighted_tokens(lambda w: np.where(w > 8, 0, w))),
}  # fmt: skip


def test_every_objective_has_a_formula_here():
    assert {name.split(",")[0] for name in FORMULAS} == set(objective_names())


def named(name, **own):
    """The objective of a formula's name."""
    return make_objective(name.split(",")[0], own)


@functools.cache
def computed(make=problem):
    """(loss, gradient) of every objective, in one program."""
    made = make()
    objectives = {name: named(name, **fields) for name, (fields, _) in FORMULAS.items()}

    def compute(policy):
        return {
            name: jax.value_and_grad(lambda p, each=each: loss_of(each, p, made))(policy)
            for name, each in objectives.items()
        }

    with jax.enable_x64(True):
        return jax.device_get(jax.jit(compute)(jnp.asarray(made.policy)))


def differences(formula, made):
    """Central differences [p k t] of the formula by the policy's log-prob of each token."""
    step, found = 1e-5, np.zeros_like(made.policy)
    for at in zip(*np.nonzero(made.mask), strict=True):
        moved = [made.policy.copy(), made.policy.copy()]
        moved[0][at] += step
        moved[1][at] -= step
        values = [formula(list(groups(x, made))) for x in moved]
        found[at] = (values[0] - values[1]) / (2 * step)
    return found


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_are_those_of_the_formula(name):
    (loss, gradient), formula, made = computed()[name], FORMULAS[name][1], problem()
    np.testing.assert_allclose(loss, formula(list(groups(made.policy, made))), rtol=1e-12)
    expected = differences(formula, made)
    largest = np.abs(expected).max()
    assert largest > 1e-3
    # A central difference in float64: its error is of the order of step^2.
    np.testing.assert_allclose(gradient, expected, atol=1e-8 * max(1, largest) + 1e-7 * largest)


def test_a_group_depends_on_no_other_group_and_an_empty_one_has_no_gradient():
    """Micro-batches of whole groups are computed one after the other."""
    made = vars(problem()) | {"begun": np.zeros(3)}
    made = {name: np.concatenate([x, np.zeros_like(x[:1])]) for name, x in made.items()}
    objectives = {name: named(name, **fields) for name, (fields, _) in FORMULAS.items()}

    @jax.jit
    def compute(policy, reward):
        given = SimpleNamespace(**made | {"reward": reward, "begun": None})
        return {
            name: jax.value_and_grad(lambda p, x=x: terms_of(x, p, given)[1:].sum())(policy)
            for name, x in objectives.items()
        }

    with jax.enable_x64(True):
        policy, reward = map(jnp.asarray, (made["policy"], made["reward"]))
        found = compute(policy, reward)
        other = compute(policy.at[0].add(0.5), reward.at[0].multiply(-2.0))
    chex.assert_trees_all_equal(found, other)
    for name, (_, gradient) in found.items():
        assert np.abs(gradient[1:3]).max() > 1e-3 and not gradient[::3].any(), name


@pytest.mark.parametrize("has_begun", [False, True])
def test_values_are_pulled_to_what_advantages_say_when_the_step_began(has_begun):
    """Of an update that is not a step's first, the values that it began with are given."""
    made = problem()
    begun = np.where(made.mask, np.random.default_rng(8).normal(size=made.mask.shape), 0.0)
    begun = begun if has_begun else made.values
    objective = named("ppo")

    def loss(policy, values):
        changed = SimpleNamespace(
            **vars(made) | {"values": values, "begun": begun if has_begun else None}
        )
        return loss_of(objective, policy, changed)

    with jax.enable_x64(True):
        given = map(jnp.asarray, (made.policy, made.values))
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(*given)
    expected, total = np.zeros((2, *made.mask.shape)), 0.0
    reward = made.reward - BETA * (made.behavior.sum(-1) - made.reference.sum(-1))
    share = 1 / made.mask.sum()
    for i, j in np.ndindex(DRAWS.shape):
        at = i, j, made.mask[i, j]
        a = reward[i, j] - begun[at]
        ratio = np.exp(made.policy[at] - made.behavior[at])
        error = made.values[at] - (a + begun[at])
        total += share * (0.05 * error**2 - ppo(ratio, a, 0.2, 0.2)).sum()
        is_open = np.where(a > 0, ratio < 1.2, ratio > 0.8)
        expected[0][at] = -share * np.where(is_open, ratio * a, 0)
        expected[1][at] = 0.1 * share * error
    np.testing.assert_allclose(value, total, rtol=1e-12)
    np.testing.assert_allclose(gradients, expected, rtol=1e-10, atol=1e-15)


def of_equal_rewards():
    made = problem()
    made.reward[:] = 1 / 3  # no binary fraction
    made.given[:] = 0
    made.reference = made.behavior = made.policy
    made.values[:] = 1 / 3
    return made


@pytest.mark.parametrize("name", [name for name, (fields, _) in FORMULAS.items() if not fields])
def test_a_group_of_equal_rewards_has_no_advantage(name):
    """Exactly none of a baseline: with log-probs of the reference, TB and RLOO have gradients."""
    gradient = computed(of_equal_rewards)[name][1]
    if name == "reinforce":
        assert np.abs(gradient).max() > 1e-3
    else:
        np.testing.assert_allclose(gradient, 0, atol=0 if name != "tb, default" else 1e-7)


def test_metrics_of_a_clip_say_which_side():
    zeros = np.zeros((2, 2, 3), np.float32)
    made = Groups(
        logp=zeros + np.log(np.array([0.5, 0.9, 1.5], np.float32)),
        behavior=zeros,
        reference=zeros,
        mask=zeros == 0,
        reward=np.array([[0.0, 1.0], [1.0, 1.0]], np.float32),
        staleness=np.zeros((2, 2), np.int32),
    )
    metrics = jax.jit(lambda x: make_objective("grpo")(x, BETA).metrics)(made)
    np.testing.assert_array_equal(metrics["clip_low"][0], [[1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(metrics["clip_high"][0], [[0, 0, 0], [0, 0, 1]])
    assert not metrics["clip_low"][1].any() and not metrics["clip_high"][1].any()


@pytest.mark.parametrize("field, shape", [("reward", (2, 3)), ("mask", (2, 2, 4)), ("log_z", (3,))])
def test_a_wrong_shape_is_an_assertion_that_names_both_shapes(field, shape):
    groups = of_sums(jnp.zeros((2, 2)), jnp.zeros((2, 2)), jnp.zeros((2, 2)))
    groups = groups._replace(**{field: jnp.zeros(shape)})
    with pytest.raises(AssertionError, match=rf"(?s)Groups.{field} beside logp \(2, 2, 1\).*") as e:
        make_objective("tb")(groups, BETA)
    assert str(shape) in str(e.value)
