# SPDX-License-Identifier: Apache-2.0
"""VinePPO: clipped token ratios; advantages are differences of values estimated by sampling."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.train.groups import Groups, Terms
from tba_jax.train.losses import ClipHigh, ClipLow, clipped, log_ratio, summed
from tba_jax.train.objectives import Needs, objective


@objective(
    Needs(beta="unused", total="tokens", advantages=True),
    also=("epochs", "minibatches", "vine_tokens", "vine_samples"),
)
def vineppo(
    groups: Groups,
    beta: Float[Array, ""] | float,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
) -> Terms:
    """-min(rho A_t, clip(rho) A_t) for each token; no KL term and no learned value.

    A_t comes from `search.state_values`: the value of the next state minus the value of the state.
    Each value is the mean reward of continuations by the policy that drew the response.

    References:
        VinePPO, arXiv:2410.01679.
    """
    assert groups.advantages is not None, "VinePPO needs the searcher's advantages"
    ratio = jnp.exp(log_ratio(groups))
    gain, metrics = clipped(ratio, groups.advantages, clip_low, clip_high)
    return Terms(-summed(groups, gain), metrics)
