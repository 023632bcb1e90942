# SPDX-License-Identifier: Apache-2.0
"""Conversion of draws to batches with padded rows, or with several sequences per row.

Invariant: in any layout, every token, reward and log-prob of a draw is in the batch once, and the
weight of a response is its number of draws.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.bin_packing import Placements, most_rows, place, rows_at_once
from tba_jax.flow.padding import Padding, bucket_length, left_pad
from tba_jax.flow.trajectory import Draw, Trajectory

# Numbers of rows to compile for padded rows, which have three lengths of prompts and responses.
_PADDED_BUCKETS = 4
# Numbers of rows to compile for packed rows, which have one length.
_PACKED_BUCKETS = 6
# Numbers of rows to compile if all rows fit one micro-batch: its size, a half and a quarter.
_PARTS_OF_ONE = 3


class Shape(NamedTuple):
    """One possible row layout of a batch.

    Attributes:
        responses: c, number of responses in a row.
        at_once: number of rows in a micro-batch; 0: all rows of the batch.
        buckets: compiled numbers of rows, ascending.
    """

    responses: int
    at_once: int
    buckets: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Packing:
    """Layout of this process's draws as rows of a batch.

    With micro-batches the number of rows is constant, because micro-batches of padding are skipped.
    Without micro-batches, or if all packed rows fit one micro-batch, the number of rows is one of a
    few compiled numbers. Row q of micro-batch b of `num` is row q * num + b of the batch: the rows
    of a micro-batch are evenly spaced, so that sharded rows stay on their devices.

    Attributes:
        num_prompts: p, number of prompts of this process.
        group_size: K, the sum of the weights of a draw.
        padding: the shapes of padded rows.
        policy_temperature: divides the policy's logits. A response that was drawn at another
            temperature gets version -1.
        row_length: number of tokens of a packed row; 0: rows are padded.
        shares_prompts: a padded row has a prompt and up to K responses, and a packed row has one
            copy of a prompt before its responses. False: each response has a copy of its prompt.
        row_multiple: divisor of the number of rows, also of rows with prompts alone: the number
            of devices that divide the rows.
        micro_batch_rows: maximum number of responses in a micro-batch; 0: all.
        is_whole: whether all rows of a draw are in one micro-batch.
        has_prompts: whether the batch has rows with prompts alone.
        has_advantages: whether the batch has advantages of tokens.
    """

    num_prompts: int
    group_size: int
    padding: Padding
    policy_temperature: float
    row_length: int = 0
    shares_prompts: bool = False
    row_multiple: int = 1
    micro_batch_rows: int = 0
    is_whole: bool = False
    has_prompts: bool = False
    has_advantages: bool = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Compiled row layouts, of which the first suffices for every batch.

        A row has space for K responses, for half of K, and so on. Rows for few responses are
        shorter and suffice for groups with few distinct responses. A larger group is divided over
        several rows, each with a copy of the prompt.
        """
        if not self.shares_prompts or self.row_length:
            return (self._shape(1),)
        widest = self.group_size
        if self.micro_batch_rows:
            widest = min(widest, self.micro_batch_rows // self.row_multiple)
        widths = dict.fromkeys(math.ceil(widest / 2**i) for i in range(_PADDED_BUCKETS))
        return tuple(self._shape(c) for c in widths if c == widest or self._holds_groups(c))

    def _holds_groups(self, c: int) -> bool:
        needed = math.ceil(self.group_size / c)
        at_once = rows_at_once(self.micro_batch_rows, c, self.row_multiple)
        return not (self.is_whole and needed > at_once)

    def _shape(self, c: int) -> Shape:
        at_once = rows_at_once(self.micro_batch_rows, c, self.row_multiple)
        if at_once:
            pieces = math.ceil(self.group_size / c)
            most = most_rows(
                self.num_prompts, pieces, micro_batch_rows=at_once, is_whole=self.is_whole
            )
            few = row_buckets(at_once, self.row_multiple, _PARTS_OF_ONE) if self.row_length else ()
            return Shape(c, at_once, (*(n for n in few if n < most), most))
        if self.shares_prompts and not self.row_length:
            # One row for each prompt. Where these rows do not suffice, another layout does.
            return Shape(c, 0, row_buckets(self.num_prompts, self.row_multiple, 1))
        num = _PACKED_BUCKETS if self.row_length else _PADDED_BUCKETS
        most = self.num_prompts * self.group_size
        return Shape(c, 0, row_buckets(most, self.row_multiple, num))

    def batch(self, draws: Sequence[Draw]) -> Batch | PackedBatch:
        """Return the batch of some draws.

        Args:
            draws: p draws, of which at least one has responses.

        Raises:
            ValueError: a prompt or response exceeds its largest bucket, or both exceed a row.
        """
        shapes = self.shapes
        candidates = [self._placements(draws, shape) for shape in shapes]
        needed = [x.num_rows for x in candidates]
        prompt, response = self.padding.lengths(*_longest(draws))
        best = _cheapest(shapes, needed, prompt, response)
        shape, placements = shapes[best], candidates[best]
        num_rows, c = _compiled_rows(needed[best], shape), shape.responses
        length = self.row_length or prompt + c * response
        rows = _Rows.filled(
            self._sequences(
                draws, placements, shape, None if self.row_length else (prompt, response)
            ),
            (num_rows, length),
            self.padding.pad_id,
            has_advantages=self.has_advantages,
        )
        rows = rows.interleaved(max(1, num_rows // (shape.at_once or num_rows)))
        slots = rows.slots
        of_slots = _of_slots(draws, self.group_size, self.policy_temperature)
        if self.has_prompts:
            prompts = [d.prompt.tokens for d in draws]
            prompts += [prompts[0][:0]] * (-len(prompts) % self.row_multiple)
            of_slots["prompts"] = left_pad(prompts, prompt, self.padding.pad_id)
        if self.row_length:
            return PackedBatch(
                rows.tokens,
                slots,
                rows.positions,
                rows.behavior,
                is_sampled=rows.is_sampled,
                token_advantages=rows.advantages,
                contexts=rows.contexts if self.shares_prompts else None,
                paths=rows.paths,
                places=rows.places,
                **of_slots,
            )

        def of_responses(x: np.ndarray) -> np.ndarray:
            return x[:, prompt:].reshape(num_rows, c, response, *x.shape[2:])

        def of_forks(places: np.ndarray) -> dict[str, np.ndarray]:
            lengths = np.count_nonzero(of_responses(slots), axis=2)
            return {"path_lengths": lengths.astype(np.int32), "places": of_responses(places)}

        return Batch(
            rows.tokens,
            of_responses(slots).max(axis=2),
            of_responses(rows.behavior),
            is_sampled=None if rows.is_sampled is None else of_responses(rows.is_sampled),
            token_advantages=None if rows.advantages is None else of_responses(rows.advantages),
            **({} if rows.places is None else of_forks(rows.places)),
            **of_slots,
        )

    def _placements(self, draws: Sequence[Draw], shape: Shape) -> Placements:
        """Return the positions of sequences before `interleaved` reorders the rows.

        A sequence is a response with its prompt; in padded rows, c responses with their prompt.

        Raises:
            ValueError: a sequence is longer than a row.
        """
        lengths = [
            [len(d.prompt.tokens) + x.stop - x.start for y in d.trajectories for x in y.paths]
            for d in draws
        ]
        longest = max(
            len(d.prompt.tokens) + len(y.response_tokens) for d in draws for y in d.trajectories
        )
        if self.row_length and longest > self.row_length:
            raise ValueError(
                f"a prompt with its response has {longest} tokens and does not fit a row of "
                f"{self.row_length}; raise config.batch.packed_length"
            )
        if not self.row_length:
            lengths = [[1] * math.ceil(len(group) / shape.responses) for group in lengths]
        is_packed_after_prompts = self.row_length and self.shares_prompts
        return place(
            lengths,
            row_length=self.row_length or 1,
            micro_batch_rows=shape.at_once if self.is_whole else 0,
            prompts=[len(d.prompt.tokens) for d in draws] if is_packed_after_prompts else None,
        )

    def _sequences(
        self,
        draws: Sequence[Draw],
        placements: Placements,
        shape: Shape,
        padded: tuple[int, int] | None,
    ) -> Iterator["_Sequence"]:
        """Yield all sequences with their placements in the rows.

        Args:
            draws: p draws.
            padded: padded lengths of prompt and response; None: rows are packed.
        """
        piece, starts, c = 0, placements.starts.tolist(), shape.responses
        empty = np.zeros(0, np.int32)
        for i, d in enumerate(draws):
            x = d.prompt.tokens
            paths = [(j, y, k) for j, y in enumerate(d.trajectories) for k in range(len(y.paths))]
            for number, (j, y, path) in enumerate(paths):
                at = piece + number // c
                row, slot = int(placements.rows[at]), i * self.group_size + j + 1
                if padded is not None:
                    first = padded[0] + number % c * padded[1]
                    yield _Sequence(slot, x, y, path, row, len(x), padded[0], first)
                    continue
                own = x if placements.leads[at] else empty
                end = starts[at] + len(own)
                yield _Sequence(slot, own, y, path, row, len(x), end, end)
            piece += math.ceil(len(paths) / c)


def _compiled_rows(needed: int, shape: Shape) -> int:
    """Return the compiled number of rows for a batch that needs `needed` rows.

    Only episodes that fork need more rows than the largest compiled number. Their batches have a
    multiple of that number, which is then compiled, too.
    """
    most = shape.buckets[-1]
    if needed > most:
        return math.ceil(needed / most) * most
    return bucket_length(needed, shape.buckets)


def _cheapest(shapes: Sequence[Shape], needed: Sequence[int], prompt: int, response: int) -> int:
    """Return the index of the layout with the fewest computed tokens; the first of equal ones."""

    def tokens(i: int) -> float:
        shape, rows = shapes[i], needed[i]
        if rows > shape.buckets[-1]:
            return math.inf
        # Micro-batches without a response are skipped.
        worked = bucket_length(rows, shape.buckets)
        if 0 < shape.at_once < worked:
            worked = math.ceil(rows / shape.at_once) * shape.at_once
        return worked * (prompt + shape.responses * response)

    return min(range(len(shapes)), key=tokens)


def row_buckets(most: int, multiple: int, num: int) -> tuple[int, ...]:
    """Return up to `num` row counts to compile for, ascending: `most`, its half, its quarter, ...

    Args:
        most: number of rows that always suffices.
        multiple: divisor of the counts, which are rounded up.
        num: maximum number of counts.

    Example: row_buckets(256, 8, 4) == (32, 64, 128, 256).
    """
    return tuple(sorted({math.ceil(most / 2**i / multiple) * multiple for i in range(num)}))


def _longest(draws: Sequence[Draw]) -> tuple[int, int]:
    """Return the lengths of the longest prompt and of the longest response in tokens."""
    return (
        max(len(d.prompt.tokens) for d in draws),
        max(len(y.response_tokens) for d in draws for y in d.trajectories),
    )


class _Sequence(NamedTuple):
    """A path of a response (`Trajectory.paths`) after its prompt, and its position in a row.

    Attributes:
        slot: slot of the response in the batch.
        prompt: tokens of the prompt; empty if the prompt is placed before another response.
        response: the response.
        path: index of the path.
        row: index of the row.
        position: position of the first response token in the sequence: the prompt's length.
        prompt_end: first column of the row after the prompt.
        first: column of the first response token in the row.
    """

    slot: int
    prompt: np.ndarray
    response: Trajectory
    path: int
    row: int
    position: int
    prompt_end: int
    first: int


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Arrays [n s] of rows with whole sequences; slots and positions are 0 at padding."""

    tokens: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    behavior: np.ndarray
    is_sampled: np.ndarray | None
    advantages: np.ndarray | None
    paths: np.ndarray | None
    places: np.ndarray | None

    @classmethod
    def filled(
        cls,
        sequences: Iterable[_Sequence],
        shape: tuple[int, int],
        pad_id: int,
        *,
        has_advantages: bool,
    ) -> "_Rows":
        """Return rows that contain all sequences at their places.

        `is_sampled` is None if no token comes from an environment. `paths` and `places` are None
        if no episode forks.
        """
        sequences = list(sequences)
        has_environment = any(x.response.is_sampled is not None for x in sequences)
        has_forks = any(x.path for x in sequences)
        rows = cls(
            np.full(shape, pad_id, np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
            np.zeros(shape, bool) if has_environment else None,
            np.zeros(shape, np.float32) if has_advantages else None,
            np.zeros(shape, np.int32) if has_forks else None,
            np.zeros(shape, np.int32) if has_forks else None,
        )
        for slot, x, y, path, row, position, end, first in sequences:
            of_path = y.paths[path]
            n, last = len(x), first + of_path.stop - of_path.start
            of_prompt, of_response = slice(end - n, end), slice(first, last)
            rows.tokens[row, of_prompt] = x
            rows.tokens[row, of_response] = y.response_tokens[of_path]
            rows.slots[row, of_prompt] = rows.slots[row, of_response] = slot
            rows.positions[row, of_prompt] = np.arange(n)
            rows.positions[row, of_response] = position + np.arange(last - first)
            rows.behavior[row, of_response] = y.behavior_token_logprobs[of_path]
            if rows.paths is not None and rows.places is not None:
                rows.paths[row, of_prompt] = rows.paths[row, of_response] = path
                rows.places[row, of_response] = np.arange(of_path.start, of_path.stop)
            if rows.advantages is not None:
                if y.token_advantages is None:
                    raise ValueError(
                        f"a response to prompt {y.prompt_id} has no advantages, which this "
                        "objective needs; start the run in another --workdir"
                    )
                rows.advantages[row, of_response] = y.token_advantages[of_path]
            if rows.is_sampled is not None:
                is_sampled = True if y.is_sampled is None else y.is_sampled[of_path]
                rows.is_sampled[row, of_response] = is_sampled
        return rows

    @property
    def contexts(self) -> np.ndarray:
        """Return `PackedBatch.contexts`; a prompt begins at position 0."""
        is_there = self.slots > 0
        begun = np.cumsum(is_there & (self.positions == 0), axis=1, dtype=np.int32)
        return np.where(is_there, begun, 0).astype(np.int32)

    def interleaved(self, num: int) -> "_Rows":
        """Move row b * m + q, which is row q of micro-batch b of `num`, to row q * num + b."""

        def spread(x: np.ndarray | None) -> Any:
            if x is None or num == 1:
                return x
            return x.reshape(num, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

        return _Rows(*(spread(getattr(self, f.name)) for f in dataclasses.fields(self)))


def _of_slots(
    draws: Sequence[Draw], group_size: int, policy_temperature: float
) -> dict[str, np.ndarray]:
    """Return name -> array [p k] of the values per response; 0 in empty slots."""

    def version(y: Trajectory) -> int:
        return y.version_min if y.sampling_temperature == policy_temperature else -1

    shape = len(draws), group_size
    dtypes = {
        "prompt_lengths": np.int32,
        "response_lengths": np.int32,
        "rewards": np.float32,
        "reference_logprob": np.float32,
        "versions": np.int32,
        "weights": np.float32,
    }
    found = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
    for i, d in enumerate(draws):
        # Empty slots have a prompt length, too, because log Z is computed from the prompt alone.
        found["prompt_lengths"][i, 0] = len(d.prompt.tokens)
        for j, (y, weight) in enumerate(zip(d.trajectories, d.weights, strict=True)):
            found["prompt_lengths"][i, j] = len(d.prompt.tokens)
            found["response_lengths"][i, j] = len(y.response_tokens)
            found["rewards"][i, j] = y.reward
            found["reference_logprob"][i, j] = y.reference_logprob
            found["versions"][i, j] = version(y)
            found["weights"][i, j] = weight
    return found
