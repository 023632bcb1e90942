# SPDX-License-Identifier: Apache-2.0
"""Grader: converts response tokens to texts, rewards and kinds, for searchers and evaluations.

Invariant: every response has a result, and the results are in the order of the responses.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.source import RewardSource, ScoreResult, Verdict, summed


class Grades(NamedTuple):
    """Texts, rewards and kinds of n responses.

    Attributes:
        texts: responses as text, without special tokens.
        rewards: a finite number, or None if the response has a reason.
        reasons: name of the failure, or None if the response has a reward.
        parts: with several rewards, name -> n values of each; nan for no reward.
        is_first_kind: whether a response is of the task's first kind; False for tasks without
            kinds.
    """

    texts: list[str]
    rewards: list[float | None]
    reasons: list[str | None]
    parts: Mapping[str, Sequence[float]]
    is_first_kind: list[bool]

    def between(self, start: int, stop: int) -> "Grades":
        """Return the grades of responses start, ..., stop - 1."""
        chosen = slice(start, stop)
        texts, rewards, reasons, parts, is_first_kind = self
        own = {name: values[chosen] for name, values in parts.items()}
        return Grades(texts[chosen], rewards[chosen], reasons[chosen], own, is_first_kind[chosen])

    @property
    def kind_share(self) -> float:
        """Return the share of responses of the task's first kind."""
        return sum(self.is_first_kind) / len(self.is_first_kind)


@dataclasses.dataclass(frozen=True)
class Grader:
    """Thread-safe computation of the texts, rewards and kinds of responses.

    Attributes:
        rewards: source of the rewards; None: the environment gives them.
        decode_text: token ids -> text of each response, special tokens dropped.
        response_kind: text -> kind of the response, or None.
        first_kind: the kind whose share is logged; "": no share is logged.
        adds: whether rewards of the source are added to those of the environment; if not, the
            source scores only responses without a verdict.
        data_sets: values of the column `data_set` for which rewards are reported separately.
    """

    rewards: RewardSource | None
    decode_text: Callable[[Sequence[np.ndarray]], list[str]]
    response_kind: Callable[[str], str | None]
    first_kind: str
    data_sets: tuple[str, ...] = ()
    adds: bool = False

    def grade(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[np.ndarray],
        has_eos: Sequence[bool],
        verdicts: Sequence[Verdict | None] = (),
    ) -> Grades:
        """Grade n responses, of one group or of a whole round.

        Args:
            responses: int32 [t] each, end-of-sequence included.
            has_eos: False if the length limit cut the response.
            verdicts: results of the environments of the responses; None: the environment gives no
                rewards.
        """
        texts = self.decode_text(responses)
        given = verdicts or [None] * len(texts)
        asked = [i for i, verdict in enumerate(given) if self._asks(verdict)]
        scores = ScoreResult([None] * len(asked), ["reward_none"] * len(asked), "")
        if asked and self.rewards is not None:
            scores = self.rewards.score(
                [prompts[i].text for i in asked],
                [texts[i] for i in asked],
                {name: [prompts[i].columns[name] for i in asked] for name in prompts[0].columns},
                completion_ids=[responses[i] for i in asked],
                has_eos=[has_eos[i] for i in asked],
            )
        scores = _merged(scores, asked, given) if any(given) else scores
        is_first = [
            bool(self.first_kind) and self.response_kind(x) == self.first_kind for x in texts
        ]
        of_sets = {
            name: [
                math.nan if reward is None or p.columns["data_set"] != name else reward
                for p, reward in zip(prompts, scores.rewards, strict=True)
            ]
            for name in self.data_sets
        }
        parts = {**scores.parts, **of_sets}
        return Grades(texts, scores.rewards, scores.reasons, parts, is_first)

    def _asks(self, verdict: Verdict | None) -> bool:
        """Return whether the source scores a response with this verdict."""
        if verdict is None:
            return True
        return self.adds and self.rewards is not None and verdict.reason in (None, "reward_none")


def _merged(
    scores: ScoreResult, asked: Sequence[int], verdicts: Sequence[Verdict | None]
) -> ScoreResult:
    """Return the result of each response: the sum of its verdict and its score.

    A reward that does not apply (`reward_none`) is left out of the sum.
    """
    place = {i: j for j, i in enumerate(asked)}

    def spread(values: Sequence[Any], missing: Any) -> list[Any]:
        return [values[place[i]] if i in place else missing for i in range(len(verdicts))]

    own = [verdict or Verdict(None, "reward_none") for verdict in verdicts]
    environment = ScoreResult([v.reward for v in own], [v.reason for v in own], "")
    source = ScoreResult(
        spread(scores.rewards, None),
        spread(scores.reasons, "reward_none"),
        scores.first_traceback,
        {name: spread(values, math.nan) for name, values in scores.parts.items()},
    )
    both = (environment, source) if asked else (environment,)
    return summed(("environment", "task.reward")[: len(both)], both, (1.0,) * len(both))
