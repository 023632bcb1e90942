# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step against numpy over the drawn responses, one by one."""

from dataclasses import replace

import numpy as np
import pytest
from fake_batches import SETTINGS, gradient_of, lay_out, make_draws

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
    """(metrics, responses with their log-probs) of one step."""
    draws = drawn()
    batch = lay_out(draws, STEP)
    settings = replace(SETTINGS, objective=make_objective("dapo"), beta=Schedule(BETA))
    outputs = Outputs(**gradient_of(batch, settings)[1])
    responses = []
    for i, d in enumerate(draws):
        for j, y in enumerate(d.trajectories):
            at = batch.mask[i, j]
            n = len(y.response_tokens)
            responses.append(
                {
                    "prompt": i,
                    "age": int(batch.staleness[i, j]),
                    "policy": outputs.sums["policy"][i, j],
                    "mu": y.behavior_token_logprobs[at[:n]].sum(),
                    "ref": y.reference_token_logprobs[at[:n]].sum(),
                    "tokens": int(at.sum()),
                    "reward": y.reward,
                    "low": outputs.sums["low_ratios"][i, j],
                    "high": outputs.sums["high_ratios"][i, j],
                    "id": (i, d.ids[j]),
                    "clip_low": outputs.own["tokens"]["clip_low"][i, j],
                }
            )
    return step_metrics(batch, outputs), responses


def column(rows, name):
    return np.array([row[name] for row in rows], np.float64)


def test_means_are_over_drawn_responses_and_sampled_tokens(found):
    values, rows = found
    tokens, rewards = column(rows, "tokens").sum(), column(rows, "reward").reshape(3, 4)
    ratio = np.exp(column(rows, "policy") - column(rows, "mu"))
    expected = {
        "reward_mean": rewards.mean(),
        "reward_std": rewards.std(1).mean(),
        "kl_reference": (column(rows, "policy") - column(rows, "ref")).mean(),
        "nll_per_token": -column(rows, "policy").sum() / tokens,
        "response_tokens": tokens,
        "response_length_mean": tokens / 12,
        "clip_low": column(rows, "clip_low").sum() / tokens,
        "ess_fraction": ratio.sum() ** 2 / (12 * (ratio**2).sum()),
        "log_ratio_p95": np.quantile(np.log(ratio), 0.95),
        # A response that a draw contains twice is one row.
        "rows": len({row["id"] for row in rows}),
        "beta": BETA,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(values[f"train/{name}"], value, rtol=1e-5, err_msg=name)


def test_balance_is_the_variance_of_each_group(found):
    values, rows = found
    residual = column(rows, "policy") - column(rows, "ref") - column(rows, "reward") / BETA
    residual = residual.reshape(3, 4)
    np.testing.assert_allclose(values["train/tb_loss"], residual.var(1).mean(), rtol=1e-5)
    np.testing.assert_allclose(values["train/log_z"], -residual.mean(), rtol=1e-4)


def test_strata_are_the_statistics_of_the_responses_of_each_age(found):
    values, rows = found
    names = {key.split("/")[0] for key in values} - {"train"}
    assert names == {"stale_0", "stale_2", "stale_8", "other_sampler"}
    np.testing.assert_allclose(values["other_sampler/share"], 2 / 12)
    some = [row for row in rows if row["age"] in (2, 3)]
    policy, mu, ref = (column(some, name) for name in ("policy", "mu", "ref"))
    tokens, ratio = column(some, "tokens").sum(), np.exp(policy - mu)
    expected = {
        "share": len(some) / 12,
        "ess_fraction": ratio.sum() ** 2 / (len(some) * (ratio**2).sum()),
        "log_ratio_p50": np.quantile(np.log(ratio), 0.5),
        "kl_reference": np.mean(policy - ref),
        "kl_behavior": np.mean(mu - policy),
        "low_ratios": column(some, "low").sum() / tokens,
        "high_ratios": column(some, "high").sum() / tokens,
        "entropy": -mu.sum() / tokens,
        "unique_share": len({row["id"] for row in some}) / len(some),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(values[f"stale_2/{name}"], value, rtol=1e-5, err_msg=name)
