# SPDX-License-Identifier: Apache-2.0
"""Shards of an evaluation: responses of one policy version to some of the held-out prompts."""

from collections.abc import Mapping
from typing import NamedTuple


class Lease(NamedTuple):
    """A shard of an evaluation that one searcher works on.

    Attributes:
        version: policy version to evaluate.
        shard: number of the shard.
    """

    version: int
    shard: int


class EvaluationShard(NamedTuple):
    """Graded responses to some of the held-out prompts, as JSON-compatible lists.

    Attributes:
        first: number of the first prompt of the shard; the next prompts follow.
        tokens: token IDs, by prompt and response.
        has_eos: whether a response ended by itself, by prompt and response.
        texts: response texts, by prompt.
        rewards: rewards by prompt and response; None where no reward could be computed.
        parts: name -> further reported values, by prompt and response.
        is_first_kind: whether a response has the task's first kind, by prompt and response.
        measured: name -> values by prompt, from measures that need weights.
    """

    first: int
    tokens: list[list[list[int]]]
    has_eos: list[list[bool]]
    texts: list[list[str]]
    rewards: list[list[float | None]]
    parts: Mapping[str, list[list[float]]]
    is_first_kind: list[list[bool]]
    measured: Mapping[str, list[list[float]]]
