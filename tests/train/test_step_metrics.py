# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step against numpy over the drawn responses, and episodes that fork."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_batches import CONFIG, SCORING, SETTINGS, gradient_of, lay_out, make_draws, slow
from fake_models import random_params, scored_tokens

from tba_jax.settings import Schedule
from tba_jax.train.metrics import Outputs, step_metrics
from tba_jax.train.objectives import make_objective

STEP, BETA = 9, 0.2
REPEATS = [[3, 1, 0, 0], [1, 1, 1, 1], [0, 2, 1, 1]]
VERSIONS = [[9, 9, 6, 0], [6, 7, 1, 9], [9, 6, 6, -1]]


def drawn():
    """Draws with repeats, observations, an empty slot, and a response of another temperature."""
    draws = make_draws(p=3, repeats=REPEATS)

    def marked(y, version):
        is_sampled = np.arange(len(y.response_tokens)) % 3 != 1
        return replace(y, version_min=version, is_sampled=is_sampled)

    draws = [
        d._replace(
            trajectories=tuple(
                marked(y, VERSIONS[i][j]) for y, j in zip(d.trajectories, d.ids, strict=True)
            )
        )
        for i, d in enumerate(draws)
    ]
    hot = replace(draws[1].trajectories[0], sampling_temperature=1.5)
    draws[1] = draws[1]._replace(trajectories=(hot, *draws[1].trajectories[1:]))
    return [*draws, draws[0]._replace(trajectories=(), ids=())]


@pytest.fixture(scope="module")
def found():
    """(metrics, numbers of the drawn responses [12] by name) of one step."""
    draws = drawn()
    batch = lay_out(draws, STEP)
    settings = replace(SETTINGS, objective=make_objective("dapo"), beta=Schedule(BETA))
    outputs = Outputs(**gradient_of(batch, settings)[1])
    numbers = {
        "age": batch.staleness,
        "policy": outputs.sums["policy"],
        "mu": (batch.behavior * batch.mask).sum(-1),
        "ref": np.where(batch.mask, batch.reference, 0).sum(-1),
        "tokens": batch.mask.sum(-1),
        "reward": batch.rewards,
        "low": outputs.sums["low_ratios"],
        "high": outputs.sums["high_ratios"],
        "clip_low": outputs.own["tokens"]["clip_low"],
    }
    rows = {name: np.asarray(x, np.float64)[:3].ravel() for name, x in numbers.items()}
    rows["id"] = np.array([10 * i + j for i, d in enumerate(draws) for j in d.ids])
    return step_metrics(batch, outputs), SimpleNamespace(**rows)


def test_means_are_over_drawn_responses_and_sampled_tokens(found):
    values, x = found
    tokens, rewards = x.tokens.sum(), x.reward.reshape(3, 4)
    ratio = np.exp(x.policy - x.mu)
    expected = {
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(1).mean(),
        "kl_reference": (x.policy - x.ref).mean(),
        "nll_per_token": -x.policy.sum() / tokens,
        "response_tokens": tokens,
        "response_length_mean": tokens / 12,
        "clip_low": x.clip_low.sum() / tokens,
        "ess_fraction": ratio.sum() ** 2 / (12 * (ratio**2).sum()),
        "log_ratio_p95": np.quantile(np.log(ratio), 0.95),
        # A response that a draw contains twice is one row.
        "rows": len(set(x.id)),
        "beta": BETA,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(values[f"train/{name}"], value, rtol=1e-5, err_msg=name)
    # Balance is the variance of each group.
    residual = (x.policy - x.ref - x.reward / BETA).reshape(3, 4)
    np.testing.assert_allclose(values["train/tb_loss"], residual.var(1).mean(), rtol=1e-5)
    np.testing.assert_allclose(values["train/log_z"], -residual.mean(), rtol=1e-4)


def test_strata_are_the_statistics_of_the_responses_of_each_age(found):
    values, x = found
    names = {key.split("/")[0] for key in values} - {"train"}
    assert names == {"stale_0", "stale_2", "stale_8", "other_sampler"}
    np.testing.assert_allclose(values["other_sampler/share"], 2 / 12)
    at = np.isin(x.age, (2, 3))
    x = SimpleNamespace(**{name: y[at] for name, y in vars(x).items()})
    tokens, ratio, num = x.tokens.sum(), np.exp(x.policy - x.mu), at.sum()
    expected = {
        "share": num / 12,
        "ess_fraction": ratio.sum() ** 2 / (num * (ratio**2).sum()),
        "log_ratio_p50": np.quantile(np.log(ratio), 0.5),
        "kl_reference": np.mean(x.policy - x.ref),
        "kl_behavior": np.mean(x.mu - x.policy),
        "low_ratios": x.low.sum() / tokens,
        "high_ratios": x.high.sum() / tokens,
        "entropy": -x.mu.sum() / tokens,
        "unique_share": len(set(x.id)) / num,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(values[f"stale_2/{name}"], value, rtol=1e-5, err_msg=name)


# Of each episode: its paths, and the tokens that the policy sampled. The second path of (2, 5)
# begins with three tokens that repeat the first path.
FORKS = {
    (0, 1): ((2, 5), (1, 1, 0, 0, 0, 1, 1)),
    (1, 0): ((3, 1, 2), (0, 1, 1, 1, 0, 1)),
    (1, 2): ((), (1, 0, 1, 1)),
}
LAYOUTS = [
    slow({"micro_batch_rows": 2}),
    slow({"shares_prompts": True}),
    {"row_length": 16, "shares_prompts": True},
]


def forked_draws():
    """Two prompts with three responses each, of which two fork."""
    draws, rng = make_draws(p=2, k=3, t=7), np.random.default_rng(3)
    for (i, j), (lengths, marks) in FORKS.items():
        is_sampled = np.array(marks, bool)
        rows = list(draws[i].trajectories)
        rows[j] = replace(
            rows[j],
            response_tokens=rng.integers(3, CONFIG.vocab_size, len(marks)).astype(np.int32),
            behavior_token_logprobs=np.where(is_sampled, -2, 0).astype(np.float32),
            reference_token_logprobs=np.full(len(marks), -2, np.float32),
            is_sampled=is_sampled,
            path_lengths=lengths,
        )
        draws[i] = draws[i]._replace(trajectories=tuple(rows))
    return draws


def alone(params, prompt, y):
    """log pi of the sampled tokens of the paths, each path alone in a row; their sum."""
    total = 0.0
    for path in y.paths:
        tokens = y.response_tokens[path]
        found = scored_tokens(CONFIG, params, prompt.tokens, tokens, SCORING, multiple=16)
        is_sampled = np.ones(len(tokens)) if y.is_sampled is None else y.is_sampled[path]
        total += found @ is_sampled
    return total


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_episode_has_the_sum_of_its_paths_in_every_layout(layout):
    draws, params = forked_draws(), random_params(CONFIG)
    batch = lay_out(draws, **layout)
    _, outputs = gradient_of(batch)
    wanted = [[alone(params, d.prompt, y) for y in d.trajectories] for d in draws]
    # Float32, in rows of other lengths.
    np.testing.assert_allclose(outputs["sums"]["policy"], wanted, atol=1e-5)
