# SPDX-License-Identifier: Apache-2.0
"""VinePPO: clipped token ratios; advantages are differences of values estimated by sampling."""

from typing import Annotated

import jax.numpy as jnp

from tba_jax.train.groups import Groups, Terms
from tba_jax.train.losses import Beta, ClipHigh, ClipLow, Epochs, clipped, log_ratio, summed
from tba_jax.train.objectives import About, Needs, objective


@objective(Needs(beta="unused", total="tokens", advantages=True))
def vineppo(
    groups: Groups,
    beta: Beta,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    epochs: Epochs = 1,
    vine_tokens: Annotated[
        int, About("tokens of a response between two states with estimated values", at_least=1)
    ] = 8,
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
