# SPDX-License-Identifier: Apache-2.0
"""Tickets of searchers and their results.

A ticket is one prompt, of which a searcher samples the responses; its result is their group. An
evaluation ticket is a shard of the held-out prompts. Invariant: a result that `check_result`
accepts counts every response once (tests/flow/test_tickets.py).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tba_jax.flow.trajectory import Group, Prompt


class Ticket(NamedTuple):
    """A prompt for a searcher; the number determines prompt and random key.

    Attributes:
        responses: given responses, int32 [t] each, to score instead of sampling; (): sample.
    """

    number: int
    prompt: Prompt
    responses: tuple[np.ndarray, ...] = ()


class EvaluationTicket(NamedTuple):
    """A shard of an evaluation: held-out prompts that one searcher answers.

    Attributes:
        version: policy version to evaluate.
        first: number of the first prompt of the shard; the next prompts follow.
    """

    version: int
    first: int
    prompts: tuple[Prompt, ...]


class EvaluationShard(NamedTuple):
    """Graded responses to the prompts of a shard, as JSON-compatible lists.

    Attributes:
        first: as in `EvaluationTicket`.
        tokens: token IDs, by prompt and response.
        has_eos: whether a response ended by itself, by prompt and response.
        texts: response texts, by prompt.
        rewards: rewards by prompt and response; None where no reward could be computed.
        is_first_kind: whether a response has the task's first kind, by prompt and response.
        parts: name -> further reported values, by prompt and response.
        measured: name -> values by prompt, from measures that need weights.
    """

    first: int
    tokens: list[list[list[int]]]
    has_eos: list[list[bool]]
    texts: list[list[str]]
    rewards: list[list[float | None]]
    is_first_kind: list[list[bool]]
    parts: Mapping[str, list[list[float]]]
    measured: Mapping[str, list[list[float]]]


class EvaluationResult(NamedTuple):
    """Result of an evaluation ticket.

    Attributes:
        version, first: as in `EvaluationTicket`.
        shard: the responses; None: the searcher has no weights of this version.
    """

    version: int
    first: int
    shard: EvaluationShard | None


class DecodeCounts(NamedTuple):
    """Counts of decode sessions, as in their `Statistics`."""

    tokens: int = 0
    slot_steps: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0

    def plus(self, other: "DecodeCounts") -> "DecodeCounts":
        """Return the sum of two counts, field by field."""
        return DecodeCounts(*map(sum, zip(self, other, strict=True)))


class Report(NamedTuple):
    """Metrics of the responses of one ticket, and times in seconds.

    Attributes:
        tokens: number of sampled tokens; 0 for given responses.
        means: metric name -> mean over the responses, nan if it is not known; logged as
            "search/NAME".
        ticket_s: from the start of the decoding to the end of the grading.
        decode_s: the ticket's share of the searcher's decoding time.
        reward_s: the ticket's share of the time for rewards.
    """

    tokens: int
    means: Mapping[str, float]
    ticket_s: float = 0.0
    decode_s: float = 0.0
    reward_s: float = 0.0


def summarise(reports: Sequence[Report]) -> dict[str, float]:
    """Return search metrics of the tickets that one sync merged; {} without tickets."""
    if not reports:
        return {}
    decode_s = sum(r.decode_s for r in reports)
    names = dict.fromkeys(name for r in reports for name in r.means)
    return {
        "search/tickets": float(len(reports)),
        "search/decode_s": decode_s,
        "search/reward_s": sum(r.reward_s for r in reports),
        "search/ticket_s": sum(r.ticket_s for r in reports),
        "search/tokens_per_s": sum(r.tokens for r in reports) / max(decode_s, 1e-9),
        **{f"search/{n}": mean_known([r.means.get(n, math.nan) for r in reports]) for n in names},
    }


def mean_known(values: Sequence[float]) -> float:
    """Return the mean of the values that are not nan; nan if there are none."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else math.nan


class Result(NamedTuple):
    """Result of a ticket.

    Attributes:
        number: number of the ticket.
        version: policy version with which the ticket began.
    """

    number: int
    version: int
    group: Group
    report: Report

    @property
    def generated(self) -> int:
        """Number of responses, with the rejected ones."""
        return len(self.group.trajectories) + sum(self.group.rejected.values())

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the responses: a token, its log-prob and its mark take 9."""
        return 9 * sum(len(y.response_tokens) for y in self.group.trajectories)


def check_result(result: Result) -> None:
    """Refuse a result that would break the buffer or a train step later.

    Raises:
        ValueError: a reward is not finite, log-probs are missing, or a response is empty.
    """
    wanted = result.group.prompt.prompt_id
    for y in result.group.trajectories:
        count, logprobs = len(y.response_tokens), y.behavior_token_logprobs
        advantages = y.token_advantages
        sizes = [len(x) for x in (logprobs, advantages, y.is_sampled) if x is not None]
        rules = [
            (y.prompt_id == wanted, f"the response is in the group of prompt {wanted}"),
            (math.isfinite(y.reward), f"reward is {y.reward}; count the response as rejected"),
            (count, "an empty response; wanted at least its last token"),
            (set(sizes) == {count}, f"its arrays have {sizes} values for {count} tokens"),
            (np.isfinite(logprobs).all(), _DIVERGED),
            (advantages is None or np.isfinite(advantages).all(), "token_advantages is not finite"),
            (y.is_sampled is None or y.is_sampled.any(), "no token was sampled; leave it out"),
        ]
        for is_met, why in rules:
            if not is_met:
                raise ValueError(f"ticket {result.number}, prompt {y.prompt_id}: {why}")


_DIVERGED = (
    "the log-probs of the policy are not finite, so it has diverged. Lower "
    "--config.optimizer.learning_rate or raise --config.objective.beta, and start again with "
    "another --workdir, because the newest checkpoint may have diverged, too"
)
