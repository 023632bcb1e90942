# SPDX-License-Identifier: Apache-2.0
"""Input and result of a loss: groups of responses, and one term per response."""

from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Groups(NamedTuple):
    """K responses to each of p prompts. Arrays [p k t] are 0 where `mask` is False.

    Attributes:
        logp: [p k t], the policy's log-probs of the tokens; gradients flow through them.
        behavior: [p k t], log-probs of the distribution that each token was sampled from.
        reference: [p k t], log-probs of the reference.
        mask: [p k t], counted tokens: sampled ones, and EOS unless `objective.mask_eos`.
        reward: [p k], raw, not divided by beta.
        staleness: [p k], steps since the version that sampled the response; 0 for responses that no
            version of the policy sampled.
        log_z: [p], learned log Z of each prompt; None without that head.
        values: [p k t], learned value of the state before each token; None without that head.
        start_values: [p k t], `values` at the start of a step that makes several updates, or None.
        advantages: [p k t], estimated by the searcher; None unless the objective reads them.
    """

    logp: Float[Array, "p k t"]
    behavior: Float[Array, "p k t"]
    reference: Float[Array, "p k t"]
    mask: Bool[Array, "p k t"]
    reward: Float[Array, "p k"]
    staleness: Int[Array, "p k"]
    log_z: Float[Array, " p"] | None = None
    values: Float[Array, "p k t"] | None = None
    start_values: Float[Array, "p k t"] | None = None
    advantages: Float[Array, "p k t"] | None = None


class Terms(NamedTuple):
    """What a loss returns.

    Attributes:
        loss: [p k], to be summed and divided by the total of the objective.
        metrics: name -> [p k t] or [p k]; logged as "train/NAME", a mean over counted tokens or
            over responses.
    """

    loss: Float[Array, "p k"]
    metrics: Mapping[str, Array] = {}


def check_groups(groups: Groups) -> None:
    """Refuse groups whose arrays disagree in shape; the message has both shapes.

    Raises:
        AssertionError: an array has another shape than `groups.logp`, or its prefix.
    """
    chex.assert_rank(groups.logp, 3)
    p, k, t = groups.logp.shape
    for name, x in groups._asdict().items():
        if x is not None:
            shape = {"reward": (p, k), "staleness": (p, k), "log_z": (p,)}.get(name, (p, k, t))
            chex.assert_shape(x, shape, custom_message=f"Groups.{name} beside logp {(p, k, t)}")


def of_sums(
    logp: Float[Array, "p k"],
    reference: Float[Array, "p k"],
    reward: Float[Array, "p k"],
    log_z: Float[Array, " p"] | None = None,
) -> Groups:
    """Return groups of one-token responses, sampled from the policy, with these log-probs."""
    return Groups(
        logp=logp[..., None],
        behavior=jax.lax.stop_gradient(logp)[..., None],
        reference=reference[..., None],
        mask=jnp.ones((*reward.shape, 1), bool),
        reward=reward,
        staleness=jnp.zeros(reward.shape, jnp.int32),
        log_z=log_z,
    )
