# SPDX-License-Identifier: Apache-2.0
"""Layout of a batch: groups of responses, and the rows in which the model computes their tokens.

There are two layouts of rows: a prompt once with up to c responses behind it, and packed rows of
several prompts, each with its responses behind it. `Batch.source` connects groups and rows. Equal
responses to a prompt have the same source, so their tokens are computed once; reward, staleness and
the sampler's log-probs belong to each response.

Invariants: a sequence is never cut; every token of a draw has exactly one source; and the rows of a
micro-batch are evenly spaced, so that sharded rows stay on their devices.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.flow.padding import Padding, Placements, bucket_length, place, row_buckets
from tba_jax.flow.trajectory import Draw

# Numbers of rows to compile for: of rows with one response, of packed rows, of packed rows that fit
# one micro-batch, and of rows that lack the reference.
_SINGLE_BUCKETS, _PACKED_BUCKETS, _PARTS_OF_ONE, _MISSING_BUCKETS = 4, 6, 3, 3

OF_GROUPS = "source mask behavior reference rewards staleness is_drawn advantages".split()
"""Fields of a batch whose first axis is p."""


class Batch(NamedTuple):
    """K responses to each of p prompts, and n rows of tokens in which the model computes them.

    Arrays are numpy on the host, and jax arrays in the train step.

    A row by prompt is [prompt, left-padded | c responses, each right-padded to t], and x = c t of
    its positions are scored. A packed row has whole sequences, then padding, and x = s.

    Attributes:
        tokens: int32 [n s].
        source: int32 [p k t], position of each token in the scored positions [n x] of all rows;
            n x at padding.
        mask: bool [p k t], tokens that count in log pi(y|x).
        behavior: float32 [p k t], log-probs of the distribution that was sampled from.
        reference: float32 [p k t], log-probs of the reference; nan where they are to be computed.
        rewards: float32 [p k].
        staleness: int32 [p k], steps since the oldest version that sampled the response; -1 if no
            version of the policy sampled it, or at another temperature.
        is_drawn: bool [p k]; False in an empty slot.
        num_computed: int32, number of rows of the micro-batches that have a sequence.
        missing: int32 [m], rows whose reference is to be computed, then n; None: no row.
        prompt_lengths: int32 [n], tokens of the prompt of a row by prompt; None in packed rows.
        response_lengths: int32 [n c], tokens of each response of a row by prompt.
        segments: int32 [n s], number of each position's sequence in a packed row; 0 at padding. A
            prompt belongs to the sequence that follows it. None in rows by prompt.
        positions: int32 [n s], position in the sequence, of packed rows.
        contexts: int32 [n s], number of the prompt that a position can see, from 1; None: each
            response of the packed rows has its own prompt.
        is_prompt: bool [n s], positions of prompts; None without contexts.
        advantages: float32 [p k t], advantages of tokens; None unless the objective reads them.
    """

    tokens: Any
    source: Any
    mask: Any
    behavior: Any
    reference: Any
    rewards: Any
    staleness: Any
    is_drawn: Any
    num_computed: Any
    missing: Any = None
    prompt_lengths: Any = None
    response_lengths: Any = None
    segments: Any = None
    positions: Any = None
    contexts: Any = None
    is_prompt: Any = None
    advantages: Any = None


class _Sequence(NamedTuple):
    """A path of a response (`Trajectory.paths`), which follows its prompt in a row.

    Attributes:
        prompt: index of the prompt in the batch.
        slots: indices of the equal responses of the prompt that have this path.
        tokens: int32, tokens of the path.
        path: range of the path in the tokens of the response.
    """

    prompt: int
    slots: list[int]
    tokens: np.ndarray
    path: slice


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Layout of the draws of a run as batches.

    With micro-batches the number of rows is constant, because micro-batches of padding are skipped.
    Otherwise, or if all packed rows fit one micro-batch, it is one of a few compiled numbers.

    Attributes:
        num_prompts, group_size: p and K.
        padding: padded lengths of prompts and responses.
        policy_temperature: divides the policy's logits; a response that was sampled at another
            temperature has no version.
        row_length: number of tokens of a packed row; 0: rows by prompt.
        shares_prompts: a prompt precedes several responses. False: each response has its own copy.
        row_multiple: divisor of the number of rows: the number of devices that divide the rows.
        micro_batch_rows: maximum number of responses in a micro-batch; 0: all.
        is_whole: whether all rows of a draw are in one micro-batch.
        has_advantages: whether a batch has `advantages`.
        uncounted: tokens that do not count in log pi(y|x), such as EOS with `objective.mask_eos`.
        reference: stored: log-probs of the reference come with the responses, and are computed
            where a response lacks them; scored: they are computed in every step; none: they are 0.
    """

    num_prompts: int
    group_size: int
    padding: Padding
    policy_temperature: float = 1.0
    row_length: int = 0
    shares_prompts: bool = False
    row_multiple: int = 1
    micro_batch_rows: int = 0
    is_whole: bool = False
    has_advantages: bool = False
    uncounted: tuple[int, ...] = ()
    reference: str = "stored"

    @property
    def responses(self) -> int:
        """c, number of responses behind the prompt of a row; 1 in packed rows.

        If a micro-batch does not hold a group, the group has several rows, each with the prompt.
        """
        if not self.shares_prompts or self.row_length:
            return 1
        at_once = self.micro_batch_rows // self.row_multiple
        return min(self.group_size, at_once or self.group_size)

    @property
    def at_once(self) -> int:
        """Number of rows in a micro-batch; 0: all rows of the batch."""
        return rows_at_once(self.micro_batch_rows, self.responses, self.row_multiple)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Compiled numbers of rows, ascending."""
        p, pieces, at_once = self.num_prompts, -(-self.group_size // self.responses), self.at_once
        if at_once:
            most = most_rows(p, pieces, at_once=at_once, is_whole=self.is_whole)
            few = row_buckets(at_once, self.row_multiple, _PARTS_OF_ONE) if self.row_length else ()
            return (*(n for n in few if n < most), most)
        num = _PACKED_BUCKETS if self.row_length else _SINGLE_BUCKETS
        return row_buckets(p * pieces, self.row_multiple, 1 if self.responses > 1 else num)

    def batch(self, draws: Sequence[Draw], step: int) -> Batch:
        """Return the batch of some draws.

        Args:
            draws: p draws of K responses or none, of which at least one has responses.
            step: version that is trained.

        Raises:
            ValueError: a prompt or response exceeds its largest bucket, or both exceed a row.
        """
        groups = [_sequences(i, d) for i, d in enumerate(draws)]
        sequences = [x for group in groups for x in group]
        prompt = max(len(d.prompt.tokens) for d in draws)
        prompt = bucket_length(prompt, self.padding.prompt_buckets)
        response = max(len(y.response_tokens) for d in draws for y in d.trajectories)
        response = bucket_length(response, self.padding.response_buckets)
        places = self._place(draws, groups, prompt, response)
        # Only episodes that fork need more than the largest number, and then a multiple of it.
        most = self.buckets[-1]
        num_rows = -(-places.num_rows // most) * most
        if places.num_rows <= most:
            num_rows = bucket_length(places.num_rows, self.buckets)
        batch = self.empty(num_rows, prompt, response)
        self._fill_groups(batch, draws, step)
        # Row q of micro-batch b of `num` is row q * num + b.
        at_once = min(self.at_once or num_rows, num_rows)
        num = num_rows // at_once
        rows = places.rows % at_once * num + places.rows // at_once
        self._fill_rows(batch, draws, sequences, places._replace(rows=rows))
        scored = self._scored(batch)
        missing = np.unique(batch.source[np.isnan(batch.reference)] // scored).tolist()
        multiple = at_once if at_once < num_rows else self.row_multiple
        size = bucket_length(len(missing), row_buckets(num_rows, multiple, _MISSING_BUCKETS))
        padded = missing + [num_rows] * (size - len(missing))
        return batch._replace(
            num_computed=np.int32(-(-places.num_rows // at_once) * at_once),
            missing=None if not missing else np.array(padded, np.int32),
        )

    def empty(self, num_rows: int, prompt: int, response: int) -> Batch:
        """Return a batch of padding.

        Args:
            num_rows: n.
            prompt, response: padded lengths; packed rows always have the longest response.
        """
        p, k, c = self.num_prompts, self.group_size, self.responses
        packed, t = self.row_length > 0, response
        if packed:
            t = self.padding.response_buckets[-1]
        width, scored = self.row_length or prompt + c * t, self.row_length or c * t
        rows, tokens, groups = (num_rows, width), (p, k, t), (p, k)

        def array(is_there: bool, shape: tuple[int, ...], dtype: Any = np.int32) -> Any:
            return np.zeros(shape, dtype) if is_there else None

        return Batch(
            tokens=np.full(rows, self.padding.pad_id, np.int32),
            source=np.full(tokens, num_rows * scored, np.int32),
            mask=np.zeros(tokens, bool),
            behavior=np.zeros(tokens, np.float32),
            reference=np.zeros(tokens, np.float32),
            rewards=np.zeros(groups, np.float32),
            staleness=np.zeros(groups, np.int32),
            is_drawn=np.zeros(groups, bool),
            num_computed=np.int32(0),
            prompt_lengths=array(not packed, (num_rows,)),
            response_lengths=array(not packed, (num_rows, c)),
            segments=array(packed, rows),
            positions=array(packed, rows),
            contexts=array(packed and self.shares_prompts, rows),
            is_prompt=array(packed and self.shares_prompts, rows, bool),
            advantages=array(self.has_advantages, tokens, np.float32),
        )

    def _scored(self, batch: Batch) -> int:
        """Return the number of scored positions of a row."""
        return self.row_length or self.responses * batch.source.shape[2]

    def largest(self) -> Batch:
        """Return a batch of padding in the largest shape of a run."""
        lengths = self.padding.prompt_buckets[-1], self.padding.response_buckets[-1]
        return self.empty(self.buckets[-1], *lengths)

    def _fill_groups(self, batch: Batch, draws: Sequence[Draw], step: int) -> None:
        """Write everything that belongs to responses."""
        for i, draw in enumerate(draws):
            for j, y in enumerate(draw.trajectories):
                n = len(y.response_tokens)
                batch.mask[i, j, :n] = True if y.is_sampled is None else y.is_sampled
                if self.uncounted:
                    batch.mask[i, j, :n] &= ~np.isin(y.response_tokens, self.uncounted)
                batch.behavior[i, j, :n] = y.behavior_token_logprobs
                if self.reference == "stored" and y.reference_token_logprobs is not None:
                    batch.reference[i, j, :n] = y.reference_token_logprobs
                elif self.reference != "none":
                    batch.reference[i, j, :n] = np.nan
                batch.rewards[i, j] = y.reward
                is_of_policy = y.sampling_temperature == self.policy_temperature
                has_version = y.version_min >= 0 and is_of_policy
                batch.staleness[i, j] = step - y.version_min if has_version else -1
                batch.is_drawn[i, j] = True
                if batch.advantages is not None:
                    assert y.token_advantages is not None, "the response has no advantages"
                    batch.advantages[i, j, :n] = y.token_advantages

    def _place(
        self,
        draws: Sequence[Draw],
        groups: Sequence[list[_Sequence]],
        prompt: int,
        response: int,
    ) -> Placements:
        """Return row and start of each sequence, before micro-batches spread the rows.

        The start of a row by prompt is that of the response; a packed row has the prompt there, if
        the sequence leads.

        Raises:
            ValueError: a sequence is longer than a row.
        """
        at_once = self.at_once if self.is_whole else 0
        if not self.row_length:
            c = self.responses
            # Up to c sequences of a group are in the row of one piece.
            pieces = [-(-len(group) // c) for group in groups]
            found = place([[1] * num for num in pieces], 1, at_once)
            number = np.concatenate([np.arange(len(group)) for group in groups])
            first = np.repeat(np.cumsum([0, *pieces[:-1]]), [len(group) for group in groups])
            piece = first + number // c
            starts = prompt + number % c * response
            return Placements(found.rows[piece], starts, found.leads[piece], found.num_rows)
        sizes = [len(d.prompt.tokens) for d in draws]
        lengths = [
            [size + len(x.tokens) for x in group] for size, group in zip(sizes, groups, strict=True)
        ]
        longest = max(n for group in lengths for n in group)
        if longest > self.row_length:
            raise ValueError(
                f"a prompt with its response has {longest} tokens and does not fit a row of "
                f"{self.row_length}; raise config.batch.packed_length"
            )
        return place(lengths, self.row_length, at_once, sizes if self.shares_prompts else None)

    def _fill_rows(
        self,
        batch: Batch,
        draws: Sequence[Draw],
        sequences: Sequence[_Sequence],
        places: Placements,
    ) -> None:
        """Write the sequences with their prompts into their rows, and their sources."""
        width, t, scored = batch.tokens.shape[1], batch.source.shape[2], self._scored(batch)
        for at, sequence in enumerate(sequences):
            x, n = draws[sequence.prompt].prompt.tokens, len(sequence.tokens)
            row, start = places.rows[at], int(places.starts[at])
            if not self.row_length:
                prompt_end = width - scored
                batch.tokens[row, prompt_end - len(x) : prompt_end] = x
                batch.prompt_lengths[row] = len(x)
                batch.response_lengths[row, (start - prompt_end) // t] = n
            else:
                own = x if places.leads[at] else x[:0]
                first, start = start, start + len(own)
                batch.tokens[row, first:start] = own
                batch.segments[row, first : start + n] = at + 1
                batch.positions[row, first:start] = np.arange(len(own))
                batch.positions[row, start : start + n] = len(x) + np.arange(n)
                if batch.is_prompt is not None:
                    batch.is_prompt[row, first:start] = True
            batch.tokens[row, start : start + n] = sequence.tokens
            source = row * scored + start - (width - scored) + np.arange(n)
            batch.source[sequence.prompt, sequence.slots, sequence.path] = source
        if batch.contexts is not None:
            is_there = batch.segments > 0
            begun = np.cumsum(is_there & (batch.positions == 0), axis=1)
            batch.contexts[:] = np.where(is_there, begun, 0)


def _sequences(prompt: int, draw: Draw) -> list[_Sequence]:
    """Return the distinct sequences of a draw: equal responses are computed once."""
    slots: dict[Any, list[int]] = {}
    for j, y in enumerate(draw.trajectories):
        slots.setdefault((y.response_tokens.tobytes(), y.path_lengths), []).append(j)
    return [
        _Sequence(prompt, own, draw.trajectories[own[0]].response_tokens[path], path)
        for own in slots.values()
        for path in draw.trajectories[own[0]].paths
    ]


# --- numbers of rows -------------------------------------------------------------------------


def rows_at_once(responses: int, responses_per_row: int, multiple: int) -> int:
    """Return the number of rows in a micro-batch of at most `responses` responses; 0 for all rows.

    Args:
        responses: maximum number of responses in a micro-batch; 0: all responses.
        responses_per_row: c, number of responses in a row.
        multiple: divisor of the result: number of devices that divide the rows.
    """
    return max(1, responses // multiple // responses_per_row) * multiple if responses else 0


def most_rows(num_prompts: int, group_size: int, *, at_once: int, is_whole: bool) -> int:
    """Return a number of rows that always suffices for p groups of K pieces; at_once divides it.

    No piece is longer than a row. If groups stay whole, a group does not fit a micro-batch of m
    rows only if more than m - K rows are in use, so a micro-batch holds at least m // K groups.
    """
    if is_whole:
        return math.ceil(num_prompts / (at_once // group_size)) * at_once
    return math.ceil(num_prompts * group_size / at_once) * at_once
