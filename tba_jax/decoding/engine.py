# SPDX-License-Identifier: Apache-2.0
"""The decoding engine: receives prompts and returns sampled responses as they finish.

`Decoder` has the programs of `Compiled`; a `Session` has the slots of one stream of requests.
`StopStrings` detects texts that end a response. Invariants: the tokens of a response end with the
first stop token, or with the first token that completes a stop string. Its log-probs are those of
the distribution that the tokens were sampled from. With a fixed number of slots, every bit of a
response depends only on its own prompt, key and settings.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from tba_jax.decoding.compiled import Compiled
from tba_jax.decoding.keys import row_keys
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.session import Session
from tba_jax.models.transformer import Params


class Decoded(NamedTuple):
    """Responses of one `decode` call, as host arrays.

    Attributes:
        tokens: int32 [p k t], `pad_id` after the end; t = max_new_tokens.
        lengths: int32 [p k], number of tokens of each response, including the stop token.
        token_logprobs: float32 [p k t], log-probs under the sampling distribution; 0 at padding.
        has_eos: bool [p k], False if the length limit cut the response.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    token_logprobs: np.ndarray
    has_eos: np.ndarray


class Decoder(Compiled):
    """Decoder of one architecture: opens sessions, and decodes whole batches of prompts."""

    def session(self, params: Params, **options: Any) -> Session:
        """Return an empty session on the devices of `params`; options are those of `Session`."""
        return Session(self, params, **options)

    def decode(
        self,
        params: Params,
        prompts: Sequence[np.ndarray],
        *,
        num_samples: int,
        key: Array | np.ndarray,
        settings: SamplingSettings,
        num_slots: int | None = None,
        temperatures: np.ndarray | None = None,
    ) -> Decoded:
        """Draw `num_samples` responses to each prompt.

        Args:
            params: weights, on the devices to run on.
            prompts: p rows of token ids, each at least one token long.
            num_samples: S, number of responses to each prompt.
            key: JAX PRNG key, from which sample j of prompt i uses fold_in(key, i * S + j). Or the
                key data of each sample, uint32 [p S 2] (`row_keys`).
            settings: settings of the sampling.
            num_slots: responses decoded at a time; None: all.
            temperatures: float [p S], one for each response; None: `settings.temperature`.

        Raises:
            ValueError: a prompt or a setting is invalid.
        """
        for name, value in (("number of prompts", len(prompts)), ("num_samples", num_samples)):
            if value < 1:
                raise ValueError(f"decode() got {name} = {value}; wanted at least 1")
        p, k, t = len(prompts), num_samples, settings.max_new_tokens
        num_slots = min(p * k, num_slots or p * k)
        session = self.session(
            params,
            num_slots=num_slots,
            prefill_prompts=min(p, -(-num_slots // k)),
            num_stop_ids=len(settings.stop_ids) if settings.stop_ids is not None else None,
        )
        given = isinstance(key, np.ndarray)
        of_samples = key if given else row_keys(key, p * k).reshape(p, k, 2)
        for i, (prompt, own) in enumerate(zip(prompts, of_samples, strict=True)):
            session.submit(prompt, own, settings, None if temperatures is None else temperatures[i])
        out = Decoded(
            tokens=np.full((p, k, t), self.pad_id, np.int32),
            lengths=np.zeros((p, k), np.int32),
            token_logprobs=np.zeros((p, k, t), np.float32),
            has_eos=np.zeros((p, k), bool),
        )
        for response in session.run():
            at = (response.request, response.sample)
            n = len(response.tokens)
            out.tokens[at][:n] = response.tokens
            out.token_logprobs[at][:n] = response.token_logprobs
            out.lengths[at] = n
            out.has_eos[at] = response.has_eos
        return out
