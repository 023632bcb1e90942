# SPDX-License-Identifier: Apache-2.0
"""Reference log-probs on a searcher's devices: a jitted program and its weights.

Invariant: with the same weights, a response has the same log-prob here as in the trainer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.models.logprobs import response_mask, row_token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import TransformerConfig


class Reference:
    """The reference on one searcher's devices.

    Args:
        program: return value of `make_reference_program` for these devices.
    """

    def __init__(self, program: Callable[..., Array], params: Any) -> None:
        self._program = program
        self.params = params

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
        is_sampled: np.ndarray | None = None,
    ) -> Array:
        """Return summed log pi_ref of padded responses, float32 [b c], without waiting.

        Args:
            tokens: int32 [b s], as `Batch.tokens`.
            prompt_lengths: int32 [b].
            response_lengths: int32 [b c].
            response_bucket: padded length of the responses, t.
            is_sampled: bool [b c t], tokens that count; None: all tokens count.
        """
        return self._program(
            self.params,
            tokens,
            prompt_lengths,
            response_lengths,
            is_sampled,
            response_bucket=response_bucket,
        )


def make_reference_program(
    config: TransformerConfig,
    scoring: Scoring,
    site: Site = ANY_DEVICE,
) -> Callable[..., Array]:
    """Return a jitted function: (params, arguments of `Reference`) -> float32 [b c].

    Args:
        scoring: scoring settings of the policy in the trainer.
    """
    sharding = ComputeSharding(config, site)
    program = jax.jit(
        functools.partial(_score, config=config, scoring=scoring, sharding=sharding),
        static_argnames=("response_bucket",),
    )
    return site.locked(program)


def _score(
    params: Any,
    tokens: Array,
    prompt_lengths: Array,
    response_lengths: Array,
    is_sampled: Array | None = None,
    *,
    response_bucket: int,
    config: TransformerConfig,
    scoring: Scoring,
    sharding: ComputeSharding,
) -> Array:
    token_values = row_token_logprobs(
        params,
        tokens,
        prompt_lengths,
        response_lengths,
        response_bucket=response_bucket,
        config=config,
        scoring=scoring,
        sharding=sharding,
    )
    b, c = response_lengths.shape
    responses = tokens[:, -c * response_bucket :].reshape(b, c, response_bucket)
    mask = response_mask(responses, response_lengths, scoring, is_sampled)
    return jnp.sum(token_values * mask, axis=-1)
