# SPDX-License-Identifier: Apache-2.0
"""The decoding engine: prompts in, sampled responses out as they finish.

`Decoder` has the programs of `Compiled`; a `Session` has the slots of one stream of requests.
`StopStrings` detects texts that end a response. Invariants: a response is (tokens up to and
including the first stop token, or the first token that completes a stop string; log-probs of the
distribution actually sampled from). With a fixed number of slots and cache length it depends only
on its own prompt, key and settings.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array

from tba_jax.decoding import keys
from tba_jax.decoding.compiled import Compiled
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.session import Session
from tba_jax.models.transformer import Params


class Decoded(NamedTuple):
    """Responses of one `decode` call; host arrays.

    Attributes:
        tokens: int32 [p k t], `pad_id` after the end; t = max_new_tokens.
        lengths: int32 [p k], tokens of each response, the stop token included.
        token_logprobs: float32 [p k t], of the distribution sampled from; 0 at padding.
        has_eos: bool [p k], False if the length limit cut the response.
        version_min, version_max: int32 [p k], oldest and newest version that read its prompt or
            drew a token.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    token_logprobs: np.ndarray
    has_eos: np.ndarray
    version_min: np.ndarray
    version_max: np.ndarray


class Decoder(Compiled):
    """Decoding for one architecture: sessions, and whole batches of prompts at once."""

    def session(
        self,
        params: Params,
        *,
        num_slots: int,
        min_slots: int | None = None,
        prefill_prompts: int = 1,
        num_stop_ids: int | None = None,
        version: int = 0,
        is_fed: bool = False,
    ) -> Session:
        """Return an empty session on the devices of `params`.

        Args:
            params: weights, stacked or in the decoder's layout.
            num_slots: responses decoded at a time.
            min_slots: minimum number of slots. While the queue is empty and half of the slots are
                free, their number is halved. None: an eighth of num_slots, and halved only while a
                response may take 64 more steps. With min_slots=num_slots, responses depend bit for
                bit only on their own prompt, key and settings.
            prefill_prompts: prompts per prefill call (fewer if they are long).
            num_stop_ids: maximum stop ids of a request; None: the number of eos_ids.
            version: version of the weights.
            is_fed: prompts are submitted while the session runs: it keeps its slots, and prefills
                as many rows as there are prompts, rounded up to a power of two.
        """
        return Session(
            self, params, num_slots, min_slots, prefill_prompts, num_stop_ids, version, is_fed
        )

    def decode(
        self,
        params: Params,
        prompts: Sequence[np.ndarray],
        *,
        num_samples: int,
        key: Array | np.ndarray,
        settings: SamplingSettings,
        num_slots: int | None = None,
        min_slots: int | None = None,
        version: int = 0,
        temperatures: np.ndarray | None = None,
    ) -> Decoded:
        """Draw `num_samples` responses to each prompt.

        Args:
            params: weights, on the devices to run on.
            prompts: p rows of token ids, each at least one token long.
            num_samples: S.
            key: JAX PRNG key; sample j of prompt i draws from fold_in(key, i * S + j). Or uint32
                [p S 2], the key data of each sample (`row_keys`).
            settings: settings of the sampling.
            num_slots: responses decoded at a time; None: all.
            min_slots: as in `session`.
            version: version of `params`.
            temperatures: float [p S], one for each response; None: `settings.temperature`.

        Raises:
            ValueError: a prompt or a setting that cannot be decoded.
        """
        for name, value in (("number of prompts", len(prompts)), ("num_samples", num_samples)):
            if value < 1:
                raise ValueError(f"decode() got {name} = {value}; wanted at least 1")
        p, k, t = len(prompts), num_samples, settings.max_new_tokens
        num_slots = min(p * k, num_slots or p * k)
        session = self.session(
            params,
            num_slots=num_slots,
            min_slots=min_slots,
            prefill_prompts=min(p, -(-num_slots // k)),
            num_stop_ids=len(settings.stop_ids) if settings.stop_ids is not None else None,
            version=version,
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
            version_min=np.zeros((p, k), np.int32),
            version_max=np.zeros((p, k), np.int32),
        )
        for response in session.run():
            at = (response.request, response.sample)
            n = len(response.tokens)
            out.tokens[at][:n] = response.tokens
            out.token_logprobs[at][:n] = response.token_logprobs
            out.lengths[at] = n
            out.has_eos[at] = response.has_eos
            out.version_min[at] = response.version_min
            out.version_max[at] = response.version_max
        return out


def row_keys(key: Array | np.ndarray, num_rows: int) -> np.ndarray:
    """Return uint32 [num_rows 2]: key data of fold_in(key, row) per row, from a key or its data."""
    return keys.fold_in(keys.key_data(key), np.arange(num_rows))
