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
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tba_jax.flow.bin_packing import Placements, place
from tba_jax.flow.padding import Padding, bucket_length, left_pad
from tba_jax.flow.trajectory import Draw, Trajectory

# A batch is laid out as numpy and becomes jax arrays on its way into the train step.
HostOrDeviceArray: TypeAlias = Any

# Numbers of rows to compile for: of rows by prompt, of packed rows, and of a single micro-batch.
_BY_PROMPT_BUCKETS, _PACKED_BUCKETS, _PARTS_OF_ONE = 4, 6, 3
# Numbers of rows to compile the reference's pass for.
_MISSING_BUCKETS = 3

OF_GROUPS = (
    "source",
    "mask",
    "behavior",
    "reference",
    "rewards",
    "staleness",
    "is_drawn",
    "prompt_sizes",
    "advantages",
)
"""Fields of a batch whose first axis is p."""


class Batch(NamedTuple):
    """K responses to each of p prompts, and n rows of tokens in which the model computes them.

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
        prompts: int32 [q s], left-padded prompts, then empty rows so that devices divide q; None
            unless a learned log Z reads them.
        prompt_sizes: int32 [p], tokens of each of `prompts`.
    """

    tokens: HostOrDeviceArray
    source: HostOrDeviceArray
    mask: HostOrDeviceArray
    behavior: HostOrDeviceArray
    reference: HostOrDeviceArray
    rewards: HostOrDeviceArray
    staleness: HostOrDeviceArray
    is_drawn: HostOrDeviceArray
    num_computed: HostOrDeviceArray
    missing: HostOrDeviceArray | None = None
    prompt_lengths: HostOrDeviceArray | None = None
    response_lengths: HostOrDeviceArray | None = None
    segments: HostOrDeviceArray | None = None
    positions: HostOrDeviceArray | None = None
    contexts: HostOrDeviceArray | None = None
    is_prompt: HostOrDeviceArray | None = None
    advantages: HostOrDeviceArray | None = None
    prompts: HostOrDeviceArray | None = None
    prompt_sizes: HostOrDeviceArray | None = None


class Shape(NamedTuple):
    """One possible layout of rows.

    Attributes:
        responses: c, number of responses in a row; 1 in packed rows.
        at_once: number of rows in a micro-batch; 0: all rows of the batch.
        buckets: compiled numbers of rows, ascending.
    """

    responses: int
    at_once: int
    buckets: tuple[int, ...]


class _Sequence(NamedTuple):
    """A path of a response (`Trajectory.paths`), which follows its prompt in a row.

    Attributes:
        prompt: index of the prompt.
        slots: slots of the equal responses.
        response: one of them.
        path: tokens of the path within the response.
    """

    prompt: int
    slots: list[int]
    response: Trajectory
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
        has_prompts, has_advantages: whether a batch has `prompts` and `advantages`.
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
    has_prompts: bool = False
    has_advantages: bool = False
    uncounted: tuple[int, ...] = ()
    reference: str = "stored"

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Layouts of rows, of which the first suffices for every batch.

        A row has space for K responses, for half of K, and so on. Narrow rows suffice for groups
        with few distinct responses. A larger group takes several rows, each with its prompt.
        """
        if not self.shares_prompts or self.row_length:
            return (self._shape(1),)
        widest = self.group_size
        if self.micro_batch_rows:
            widest = min(widest, self.micro_batch_rows // self.row_multiple)
        widths = dict.fromkeys(math.ceil(widest / 2**i) for i in range(_BY_PROMPT_BUCKETS))
        return tuple(self._shape(c) for c in widths if c == widest or self._holds_groups(c))

    def _holds_groups(self, c: int) -> bool:
        at_once = rows_at_once(self.micro_batch_rows, c, self.row_multiple)
        return not (self.is_whole and math.ceil(self.group_size / c) > at_once)

    def _shape(self, c: int) -> Shape:
        at_once = rows_at_once(self.micro_batch_rows, c, self.row_multiple)
        p, pieces = self.num_prompts, math.ceil(self.group_size / c)
        if at_once:
            most = most_rows(p, pieces, at_once=at_once, is_whole=self.is_whole)
            few = row_buckets(at_once, self.row_multiple, _PARTS_OF_ONE) if self.row_length else ()
            return Shape(c, at_once, (*(n for n in few if n < most), most))
        if self.shares_prompts and not self.row_length:
            # One row for each prompt. Where these rows do not suffice, a wider layout does.
            return Shape(c, 0, row_buckets(p, self.row_multiple, 1))
        num = _PACKED_BUCKETS if self.row_length else _BY_PROMPT_BUCKETS
        return Shape(c, 0, row_buckets(p * self.group_size, self.row_multiple, num))

    def batch(self, draws: Sequence[Draw], step: int) -> Batch:
        """Return the batch of some draws.

        Args:
            draws: p draws of K responses or none, of which at least one has responses.
            step: version that is trained.

        Raises:
            ValueError: a prompt or response exceeds its largest bucket, or both exceed a row; or a
                response lacks advantages.
        """
        groups = [_sequences(i, d) for i, d in enumerate(draws)]
        longest = max(len(d.prompt.tokens) for d in draws)
        lengths = self.padding.lengths(
            longest, max(len(y.response_tokens) for d in draws for y in d.trajectories)
        )
        shapes = self.shapes
        placed = [self._place(draws, groups, shape) for shape in shapes]
        best = _cheapest(shapes, [x.num_rows for x in placed], *lengths)
        shape, rows = shapes[best], placed[best]
        num_rows = _compiled_rows(rows.num_rows, shape)
        batch = self.empty(shape, num_rows, *lengths)
        lacking = self._fill_groups(batch, draws, step)
        # Row q of micro-batch b of `num` is row q * num + b.
        at_once = min(shape.at_once or num_rows, num_rows)
        num = num_rows // at_once
        order = rows.rows % at_once * num + rows.rows // at_once
        used = math.ceil(rows.num_rows / at_once)
        sequences, missing = [x for group in groups for x in group], set()
        if self.row_length:
            self._fill_packed(batch, draws, sequences, rows, order)
        else:
            self._fill_by_prompt(batch, draws, groups, shape.responses, order)
        for at, sequence in enumerate(sequences):
            if any((sequence.prompt, j) in lacking for j in sequence.slots):
                missing.add(int(order[at if self.row_length else rows.piece_of[at]]))
        if self.has_prompts:
            assert batch.prompts is not None and batch.prompt_sizes is not None
            prompts = [d.prompt.tokens for d in draws]
            prompts += [prompts[0][:0]] * (-len(prompts) % self.row_multiple)
            batch.prompts[:] = left_pad(prompts, lengths[0], self.padding.pad_id)
            batch.prompt_sizes[:] = [len(d.prompt.tokens) for d in draws]
        return batch._replace(
            num_computed=np.int32(used * at_once),
            missing=self._padded(sorted(missing), num_rows, at_once),
        )

    def empty(self, shape: Shape, num_rows: int, prompt: int, response: int) -> Batch:
        """Return a batch of padding; planned runs use its shapes.

        Args:
            shape: layout of the rows.
            num_rows: n.
            prompt, response: padded lengths; packed rows always have the longest response.
        """
        p, k, c = self.num_prompts, self.group_size, shape.responses
        t = self.padding.response_buckets[-1] if self.row_length else response
        width = self.row_length or prompt + c * t
        rows, tokens, groups = (num_rows, width), (p, k, t), (p, k)
        scored = num_rows * (width if self.row_length else c * t)
        packed = self.row_length > 0
        shared = packed and self.shares_prompts
        queries = -(-p // self.row_multiple) * self.row_multiple

        def array(is_there: bool, shape: tuple[int, ...], dtype: Any = np.int32) -> Any:
            return np.zeros(shape, dtype) if is_there else None

        return Batch(
            tokens=np.full(rows, self.padding.pad_id, np.int32),
            source=np.full(tokens, scored, np.int32),
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
            contexts=array(shared, rows),
            is_prompt=array(shared, rows, bool),
            advantages=array(self.has_advantages, tokens, np.float32),
            prompts=array(self.has_prompts, (queries, prompt)),
            prompt_sizes=array(self.has_prompts, (p,)),
        )

    def largest(self) -> Batch:
        """Return a batch of padding in the largest shape of a run."""
        shape, longest = self.shapes[0], self.padding.largest
        return self.empty(
            shape, shape.buckets[-1], longest.prompt_buckets[0], longest.response_buckets[0]
        )

    def _fill_groups(self, batch: Batch, draws: Sequence[Draw], step: int) -> set[tuple[int, int]]:
        """Write everything that belongs to responses; return the responses without a reference."""
        lacking = set()
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
                    lacking.add((i, j))
                batch.rewards[i, j] = y.reward
                is_of_policy = y.sampling_temperature == self.policy_temperature
                has_version = y.version_min >= 0 and is_of_policy
                batch.staleness[i, j] = step - y.version_min if has_version else -1
                batch.is_drawn[i, j] = True
                if batch.advantages is not None:
                    if y.token_advantages is None:
                        raise ValueError(
                            f"a response to prompt {y.prompt_id} has no advantages, which this "
                            "objective needs; start the run in another --workdir"
                        )
                    batch.advantages[i, j, :n] = y.token_advantages
        return lacking

    def _place(
        self, draws: Sequence[Draw], groups: Sequence[list[_Sequence]], shape: Shape
    ) -> Placements:
        """Return the row of each piece, before micro-batches spread the rows.

        A piece is a sequence in packed rows, and up to c sequences of a prompt in other rows.

        Raises:
            ValueError: a sequence is longer than a row.
        """
        at_once = shape.at_once if self.is_whole else 0
        if not self.row_length:
            c = shape.responses
            found = place([[1] * math.ceil(len(g) / c) for g in groups], 1, at_once)
            first, pieces = 0, []
            for group in groups:
                pieces += [first + i // c for i in range(len(group))]
                first += math.ceil(len(group) / c)
            return found._replace(piece_of=pieces)
        sizes = [len(d.prompt.tokens) for d in draws]
        lengths = [
            [size + x.path.stop - x.path.start for x in group]
            for size, group in zip(sizes, groups, strict=True)
        ]
        longest = max(n for group in lengths for n in group)
        if longest > self.row_length:
            raise ValueError(
                f"a prompt with its response has {longest} tokens and does not fit a row of "
                f"{self.row_length}; raise config.batch.packed_length"
            )
        return place(lengths, self.row_length, at_once, sizes if self.shares_prompts else None)

    def _fill_by_prompt(
        self,
        batch: Batch,
        draws: Sequence[Draw],
        groups: Sequence[list[_Sequence]],
        c: int,
        order: np.ndarray,
    ) -> None:
        t = batch.source.shape[2]
        first = batch.tokens.shape[1] - c * t
        assert batch.prompt_lengths is not None and batch.response_lengths is not None
        piece = 0
        for draw, group in zip(draws, groups, strict=True):
            x = draw.prompt.tokens
            for number, sequence in enumerate(group):
                row, column = order[piece + number // c], number % c
                n, start = sequence.path.stop - sequence.path.start, first + column * t
                batch.tokens[row, first - len(x) : first] = x
                batch.tokens[row, start : start + n] = _tokens(sequence)
                batch.prompt_lengths[row] = len(x)
                batch.response_lengths[row, column] = n
                _connect(batch, sequence, row * c * t + column * t)
            piece += math.ceil(len(group) / c)

    def _fill_packed(
        self,
        batch: Batch,
        draws: Sequence[Draw],
        sequences: Sequence[_Sequence],
        rows: Placements,
        order: np.ndarray,
    ) -> None:
        assert batch.segments is not None and batch.positions is not None
        for at, sequence in enumerate(sequences):
            x = draws[sequence.prompt].prompt.tokens
            row, start = order[at], int(rows.starts[at])
            own = x if rows.leads[at] else x[:0]
            first = start + len(own)
            stop = first + sequence.path.stop - sequence.path.start
            batch.tokens[row, start:stop] = np.concatenate([own, _tokens(sequence)])
            batch.segments[row, start:stop] = at + 1
            batch.positions[row, start:first] = np.arange(len(own))
            batch.positions[row, first:stop] = len(x) + np.arange(stop - first)
            if batch.is_prompt is not None:
                batch.is_prompt[row, start:first] = True
            _connect(batch, sequence, row * self.row_length + first)
        if batch.contexts is not None:
            is_there = batch.segments > 0
            begun = np.cumsum(is_there & (batch.positions == 0), axis=1)
            batch.contexts[:] = np.where(is_there, begun, 0)

    def _padded(self, missing: list[int], num_rows: int, at_once: int) -> np.ndarray | None:
        """Return `Batch.missing` with one of a few sizes, which micro-batches divide."""
        if not missing:
            return None
        sizes = row_buckets(
            num_rows, at_once if at_once < num_rows else self.row_multiple, _MISSING_BUCKETS
        )
        size = bucket_length(len(missing), sizes)
        return np.array(missing + [num_rows] * (size - len(missing)), np.int32)


def _sequences(prompt: int, draw: Draw) -> list[_Sequence]:
    """Return the distinct sequences of a draw: equal responses are computed once."""
    slots: dict[Any, list[int]] = {}
    for j, y in enumerate(draw.trajectories):
        slots.setdefault((y.response_tokens.tobytes(), y.path_lengths), []).append(j)
    return [
        _Sequence(prompt, own, y, path)
        for own in slots.values()
        for y in (draw.trajectories[own[0]],)
        for path in y.paths
    ]


def _tokens(sequence: _Sequence) -> np.ndarray:
    return sequence.response.response_tokens[sequence.path]


def _connect(batch: Batch, sequence: _Sequence, first: int) -> None:
    """Write the source of a sequence's tokens, which begin at scored position `first`."""
    path = sequence.path
    batch.source[sequence.prompt, sequence.slots, path] = first + np.arange(path.stop - path.start)


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


def row_buckets(most: int, multiple: int, num: int) -> tuple[int, ...]:
    """Return up to `num` row counts to compile for, ascending: `most`, its half, its quarter, ...

    Args:
        most: number of rows that always suffices.
        multiple: divisor of the counts, which are rounded up.
        num: maximum number of counts.

    Example: row_buckets(256, 8, 4) == (32, 64, 128, 256).
    """
    return tuple(sorted({math.ceil(most / 2**i / multiple) * multiple for i in range(num)}))


def _compiled_rows(needed: int, shape: Shape) -> int:
    """Return the compiled number of rows for a batch that needs `needed` rows.

    Only episodes that fork need more rows than the largest compiled number. Their batches have a
    multiple of that number, which is then compiled, too.
    """
    most = shape.buckets[-1]
    return (
        math.ceil(needed / most) * most if needed > most else bucket_length(needed, shape.buckets)
    )


def _cheapest(shapes: Sequence[Shape], needed: Sequence[int], prompt: int, response: int) -> int:
    """Return the index of the layout with the fewest computed tokens; the first of equal ones."""

    def tokens(i: int) -> float:
        shape, rows = shapes[i], needed[i]
        if rows > shape.buckets[-1] and len(shapes) > 1:
            return math.inf
        worked = _compiled_rows(rows, shape)
        if 0 < shape.at_once < worked:  # micro-batches of padding are skipped
            worked = math.ceil(rows / shape.at_once) * shape.at_once
        return worked * (prompt + shape.responses * response)

    return min(range(len(shapes)), key=tokens)
