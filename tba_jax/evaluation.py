# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a policy: greedy responses to the task's evaluation split, graded.

It uses the decoder and the reward pool that training uses, at one pinned policy version. It does
not know whether a trainer is running.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tba_jax.decoding.engine import Decoder, SamplingSettings
from tba_jax.rewards.source import RewardSource
from tba_jax.trajectory import Prompt


class Evaluation(NamedTuple):
    """Result of one evaluation.

    Attributes:
        pass_at_1: mean reward of the greedy responses (share right where rewards are 0 or 1).
        n: prompts graded.
        num_skipped: prompts left out as too long.
        num_failed: responses whose reward could not be computed; they count as 0 in pass_at_1.
        response_length_mean: tokens, end-of-sequence included.
        kind_share: share of the task's first response kind, 0 where it names none.
        texts: every response.
        rewards: every reward, None where it failed.
    """

    pass_at_1: float
    n: int
    num_skipped: int
    num_failed: int
    response_length_mean: float
    kind_share: float
    texts: list[str]
    rewards: list[float | None]

    def metrics(self) -> dict[str, float]:
        """The scalar part, JSON-compatible."""
        return {
            "pass_at_1": self.pass_at_1,
            "n": self.n,
            "num_skipped": self.num_skipped,
            "num_failed": self.num_failed,
            "response_length_mean": self.response_length_mean,
            "kind_share": self.kind_share,
        }


class Evaluator:
    """Greedy evaluation over a fixed list of prompts.

    Args:
        prompts: the evaluation prompts, the same for every call.
        num_skipped: how many prompts were left out as too long; only reported.
        decoder: the decoding engine.
        rewards: computes rewards.
        decode_text: token ids -> texts.
        response_kind, first_kind: as for the searcher.
        max_new_tokens: response limit.
        num_slots: responses decoded at a time.
    """

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        num_skipped: int,
        decoder: Decoder,
        rewards: RewardSource,
        decode_text: Callable[[Sequence[np.ndarray]], list[str]],
        response_kind: Callable[[str], str | None],
        first_kind: str,
        max_new_tokens: int,
        num_slots: int,
    ) -> None:
        self.prompts = list(prompts)
        self.num_skipped = num_skipped
        self._decoder = decoder
        self._rewards = rewards
        self._decode_text = decode_text
        self._response_kind = response_kind
        self._first_kind = first_kind
        self._max_new_tokens = max_new_tokens
        self._num_slots = num_slots

    def run(self, params: Any) -> Evaluation:
        """Decode greedily and grade."""
        decoded = self._decoder.decode(
            params,
            [p.tokens for p in self.prompts],
            num_samples=1,
            key=jax.random.key(0),  # greedy decoding draws nothing from it
            settings=SamplingSettings(self._max_new_tokens, temperature=0.0),
            num_slots=self._num_slots,
        )
        lengths = decoded.lengths[:, 0]
        responses = [y[0, :n] for y, n in zip(decoded.tokens, lengths, strict=True)]
        texts = self._decode_text(responses)
        columns = {
            name: [p.columns[name] for p in self.prompts] for name in self.prompts[0].columns
        }
        scores = self._rewards.score(
            [p.text for p in self.prompts],
            texts,
            columns,
            completion_ids=responses,
            has_eos=decoded.has_eos[:, 0].tolist(),
        )
        values = [0.0 if r is None else float(r) for r in scores.rewards]
        kinds = [self._response_kind(text) for text in texts]
        return Evaluation(
            pass_at_1=float(np.mean(values)),
            n=len(values),
            num_skipped=self.num_skipped,
            num_failed=sum(r is None for r in scores.rewards),
            response_length_mean=float(np.mean(lengths)),
            kind_share=sum(kind == self._first_kind for kind in kinds) / len(kinds)
            if self._first_kind
            else 0.0,
            texts=texts,
            rewards=list(scores.rewards),
        )
