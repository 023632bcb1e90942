# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step, from its batch and its sums for each response; numpy, on the host.

Invariant: every mean is over the responses of the batch, a response that was drawn twice counting
twice, or over their sampled tokens.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from tba_jax.flow.layout import Batch


class Outputs(NamedTuple):
    """What a train step returns, on the host.

    Attributes:
        numbers: scalars by name: loss, grad_norm, lr, beta, skipped_steps, ...
        sums: sums over the counted tokens of each response, [p k]: policy and reference
            (log-probs), low_ratios and high_ratios (tokens whose ratio to the sampler is below 0.8
            or above 1.2), largest_gap (largest |log-ratio|).
        own: metrics of the objective by unit (tokens or responses) and name, [p k].
        log_z: learned log Z, [p], or None.
        shown: log-probs of the tokens of the first prompt's responses, [k t], by policy and
            reference.
    """

    numbers: Mapping[str, np.ndarray]
    sums: Mapping[str, np.ndarray]
    own: Mapping[str, Mapping[str, np.ndarray]]
    log_z: np.ndarray | None
    shown: Mapping[str, np.ndarray]


# Smallest staleness of each stratum, in steps; -1 is the stratum of responses without a version.
STRATA = (0, 1, 2, 4, 8, 16, 32)


def step_metrics(batch: Batch, outputs: Outputs) -> dict[str, float]:
    """Return all metrics of a step: "train/NAME" of the batch, and "stale_STALENESS/NAME"."""
    is_drawn, sums = batch.is_drawn, outputs.sums
    tokens = batch.mask.sum(-1)
    behavior = np.where(batch.mask, batch.behavior, 0).sum(-1, dtype=np.float64)
    num, num_tokens = max(int(is_drawn.sum()), 1), max(int(tokens.sum()), 1)
    rewards = batch.rewards[is_drawn.any(1)].astype(np.float64)
    kl = sums["policy"] - sums["reference"]
    is_current = batch.staleness == 0
    values = {name: float(x) for name, x in outputs.numbers.items()}
    values |= _balance(batch, outputs)
    for unit, count in (("tokens", num_tokens), ("responses", num)):
        values |= {name: float(x.sum()) / count for name, x in outputs.own[unit].items()}
    gaps = np.where(is_current & is_drawn, sums["largest_gap"], np.nan)
    values |= {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(1).mean()),
        "kl_reference": float(kl[is_drawn].mean()),
        "nll_per_token": -float(sums["policy"].sum()) / num_tokens,
        "response_length_mean": num_tokens / num,
        "response_tokens": num_tokens,
        "sampler_gap": float(np.nanmax(gaps)) if np.isfinite(gaps).any() else np.nan,
        **_computed(batch),
        **_ratios((sums["policy"] - behavior)[is_drawn]),
    }
    strata = _strata(batch, outputs, behavior)
    return {f"train/{name}": x for name, x in values.items()} | strata


def _balance(batch: Batch, outputs: Outputs) -> dict[str, float]:
    """Return how far Trajectory Balance is from being satisfied; {} at beta = 0.

    tb_loss is the mean of (residual + log_z)^2, residual_std is its root, and log_z is the mean
    estimate of log Z: learned, or minus the mean residual of the group.
    """
    residual = _residuals(batch, outputs)
    if residual is None:
        return {}
    is_there = batch.is_drawn.any(1)
    log_z = -residual.mean(1) if outputs.log_z is None else outputs.log_z
    tb_loss = float(np.square(residual + log_z[:, None])[is_there].mean())
    return {
        "tb_loss": tb_loss,
        "log_z": float(log_z[is_there].mean()),
        "residual_std": float(np.sqrt(tb_loss)),
    }


def _residuals(batch: Batch, outputs: Outputs) -> Float[np.ndarray, "p k"] | None:
    """Return log pi - log pi_ref - r / beta of each response; None at beta = 0."""
    beta, heat = float(outputs.numbers["beta"]), outputs.numbers
    if beta <= 0:
        return None
    of_reward = float(heat.get("reward_temperature", 1.0))
    of_reference = of_reward * float(heat.get("reference_temperature", 1.0))
    target = outputs.sums["reference"] / of_reference + batch.rewards / (beta * of_reward)
    return (outputs.sums["policy"] - target).astype(np.float64)


def _ratios(log_ratio: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Return statistics of the ratios pi / mu of some responses; TB itself needs no ratio.

    ess_fraction = (sum v)^2 / (n sum v^2), v = exp(log ratio), computed in log space; the other
    numbers are percentiles of the log-ratio, in nats per response.
    """
    v = np.exp(log_ratio - log_ratio.max())
    p05, p50, p95 = np.quantile(log_ratio, [0.05, 0.5, 0.95])
    return {
        "ess_fraction": float(v.sum() ** 2 / (v.size * np.square(v).sum())),
        "log_ratio_p05": float(p05),
        "log_ratio_p50": float(p50),
        "log_ratio_p95": float(p95),
    }


def _strata(batch: Batch, outputs: Outputs, behavior: Float[np.ndarray, "p k"]) -> dict[str, float]:
    """Return statistics of the responses of similar staleness, without empty strata.

    share: share of the batch's responses. residual_rms: root mean square of the residuals minus the
    group's mean. kl_reference, kl_behavior: means of log pi - log pi_ref and of log mu - log pi.
    low_ratios, high_ratios: share of tokens with a ratio below 0.8, above 1.2. entropy: of the
    sampler, in nats per token. unique_share: number of distinct responses over number of draws.
    """
    age, sums, found = batch.staleness, outputs.sums, {}
    residual = _residuals(batch, outputs)
    if residual is not None:
        residual = residual - residual.mean(1, keepdims=True)
    tokens = batch.mask.sum(-1)
    ends = (*STRATA[1:], np.iinfo(np.int32).max)
    names = ["other_sampler", *(f"stale_{low}" for low in STRATA)]
    for name, low, high in zip(names, (-1, *STRATA), (0, *ends), strict=True):
        of = batch.is_drawn & (age >= low) & (age < high)
        if not of.any():
            continue
        num_tokens = max(int(tokens[of].sum()), 1)
        distinct = {(i, int(batch.source[i, j, 0])) for i, j in zip(*np.nonzero(of), strict=True)}
        values = {
            "share": of.sum() / batch.is_drawn.sum(),
            **_ratios((sums["policy"] - behavior)[of]),
            "kl_reference": (sums["policy"] - sums["reference"])[of].mean(),
            "kl_behavior": (behavior - sums["policy"])[of].mean(),
            "low_ratios": sums["low_ratios"][of].sum() / num_tokens,
            "high_ratios": sums["high_ratios"][of].sum() / num_tokens,
            "entropy": -behavior[of].sum() / num_tokens,
            "unique_share": len(distinct) / of.sum(),
        }
        if residual is not None:
            values["residual_rms"] = np.sqrt(np.square(residual[of]).mean())
        found |= {f"{name}/{n}": float(x) for n, x in values.items() if np.isfinite(x)}
    return found


def _computed(batch: Batch) -> dict[str, float]:
    """Return the number of responses whose tokens are computed, and shares of rows and padding."""
    if batch.segments is not None:
        used = int((batch.segments > 0).sum())
    else:
        assert batch.prompt_lengths is not None and batch.response_lengths is not None
        used = int(batch.prompt_lengths.sum() + batch.response_lengths.sum())
    num = len(np.unique(batch.source[..., 0][batch.is_drawn]))
    return {
        "rows": num,
        "rows_share": num / batch.is_drawn.size,
        "padding_share": 1 - used / (int(batch.num_computed) * batch.tokens.shape[1]),
    }
