# SPDX-License-Identifier: Apache-2.0
"""The decoding engine: receives prompts and returns sampled responses as they finish.

`Decoder` has the compiled `Programs`; a `Session` has a queue of prompts and slots for unfinished
responses. The host repeats: admit prompts to free slots (each prompt is read once, and its cache is
copied to each of its samples), launch a chunk of steps, and collect finished responses. A long
response therefore does not delay others, and weights can be swapped between chunks. Caches and
progress of the slots stay on the device. Invariants: the tokens of a response end with the first
stop token, or with the first token that completes a stop string. Its log-probs are those of the
distribution that the tokens were sampled from. With a fixed number of slots, every bit of a
response depends only on its own prompt, key and settings.

On an accelerator, a chunk is read after the next one was launched, so that the device computes
while host and caller are busy. A slot that the chunk frees is then idle for one more chunk.
Therefore, if requests wait for slots, the chunk is read before the next launch. On a CPU, whose
cores programs and host share, a chunk is read at once (`Programs.launches_ahead`).

With `keeps_caches`, the caches of ended responses stay on the device until a prompt continues them,
another response needs the row, or the weights change. Invariant: a kept cache is used with the
weights that computed all of it.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from tba_jax.decoding.programs import Caches, Programs, Slots, empty_slots
from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.decoding.sampling import fold_in
from tba_jax.models.transformer import Params


@dataclasses.dataclass(eq=False)
class _Sample:
    """An unfinished response: it waits for its prompt to be read, waits for a slot, or has one."""

    prompt: np.ndarray
    key: np.ndarray
    settings: SamplingSettings
    response: Response  # without tokens
    row: int | None = None  # of the prompt in the pool; None: the prompt was not read
    # Of each chunk: tokens, log-probs, version. They are joined once, because a join takes longer
    # than a step of a small model.
    drawn: list[tuple[np.ndarray, np.ndarray, int]] = dataclasses.field(default_factory=list)
    num_tokens: int = 0

    def so_far(self) -> Response:
        """Return the response with the tokens drawn so far, at least those of one chunk."""
        tokens, logprobs, versions = zip(*self.drawn, strict=True)
        return self.response._replace(
            tokens=np.concatenate(tokens),
            token_logprobs=np.concatenate(logprobs),
            token_versions=np.repeat(np.array(versions, np.int32), [*map(len, tokens)]),
        )


_Chunk = tuple[tuple[jax.Array, ...], tuple[_Sample | None, ...], int]
"""A launched chunk that has not been read: results, samples, and the version of the weights."""


class Session:
    """Queue and slots on one set of devices; one thread calls it. `Decoder.session` makes it.

    Args:
        params: weights, stacked or in the decoder's layout.
        num_slots: responses decoded at a time.
        version: version of the weights.
        keeps_caches: whether to keep caches of ended responses, as many as slots, for prompts that
            continue them. Such prompts depend on other requests by the rounding of their cache.
    """

    def __init__(
        self,
        decoder: Programs,
        params: Params,
        *,
        num_slots: int,
        version: int = 0,
        keeps_caches: bool = False,
    ):
        if num_slots < 1:
            raise ValueError(f"decoding got num_slots = {num_slots}; wanted at least 1")
        self.decoder, self.num_slots, self.version = decoder, num_slots, version
        self.statistics = Statistics()
        self._weights = decoder.weights(params)
        self._num_submitted = self._num_unfinished = 0  # requests; samples
        # Samples without slots. The prompts of the first ones are in the pool.
        self._queue = collections.deque[_Sample]()
        self._samples: list[_Sample | None] = [None] * num_slots  # of each slot
        self._chunk: _Chunk | None = None
        self._slots, progress = empty_slots(num_slots, decoder.num_stop_ids)  # slots: on the host
        self._progress = jax.device_put(progress, decoder.where(self._weights))
        self._history = decoder.new_cache(num_slots, self._weights)
        # Of the pool: kept caches, then the rows into which prompts are read.
        self._num_kept = num_slots if keeps_caches else 0
        self._pool = decoder.new_cache(self._num_kept + decoder.num_rows, self._weights)
        self._kept = dict[bytes, int]()  # text -> row, the least recently written row first
        self._has_states = "delta" in decoder.config.layer_kinds

    @property
    def is_idle(self) -> bool:
        """Whether all submitted responses have ended."""
        return not self._num_unfinished

    @property
    def room(self) -> int:
        """Free slots minus queued responses; negative if more are queued.

        Other threads may read the property while the session's thread decodes.
        """
        return self.num_slots - self._num_unfinished

    def submit(
        self,
        prompt: np.ndarray,
        keys: np.ndarray,
        settings: SamplingSettings,
        temperatures: np.ndarray | None = None,
    ) -> int:
        """Queue one prompt; return the number of the request, counted from 0.

        Args:
            prompt: token ids, at least one.
            keys: uint32 [S 2], threefry key data of each sample.
            settings: settings of the sampling.
            temperatures: float [S], one for each sample; None: `settings.temperature`.

        Raises:
            ValueError: the prompt is empty or too long, or has an id outside the vocabulary.
        """
        index, prompt, decoder = self._num_submitted, np.asarray(prompt), self.decoder
        size, num, wanted = decoder.config.vocab_size, len(prompt), settings.max_new_tokens
        wrong = prompt[(prompt < 0) | (prompt >= size)]
        for is_wrong, text in (
            (num == 0, "an empty prompt; give at least one token, such as the first of a text"),
            (len(wrong), f"token ids {wrong[:3]}, not 0 to {size - 1}; use the model's tokenizer"),
            (
                num + wanted > decoder.max_length,
                f"a prompt of {num} tokens and max_new_tokens = {wanted}; the cache holds "
                f"{decoder.max_length}. Shorten one of them, or raise the decoder's max_length",
            ),
        ):
            if is_wrong:
                raise ValueError(f"decode() got, in row {index}, {text}")
        own = [settings.temperature] * len(keys) if temperatures is None else temperatures
        for sample, (key, temperature) in enumerate(zip(keys, own, strict=True)):
            begun = Response(index, sample, temperature=float(temperature))
            self._queue.append(_Sample(prompt.astype(np.int32), key, settings, begun))
        self._num_submitted += 1
        self._num_unfinished += len(keys)
        return index

    def cancel(self, request: int) -> None:
        """Drop the unfinished samples of a request; other requests get its slots."""
        self._queue = collections.deque(s for s in self._queue if s.response.request != request)
        for slot, sample in enumerate(self._samples):
            if sample is not None and sample.response.request == request:
                self._assign(slot, None)
        self._num_unfinished = len(self._queue) + self.num_slots - self._samples.count(None)

    def unfinished(self, request: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return sample -> (tokens, log-probs) so far, for samples of a request that have slots."""
        own = (s for s in self._samples if s and s.response.request == request)
        begun = [sample.so_far() for sample in own if sample.num_tokens]
        return {y.sample: (y.tokens, y.token_logprobs) for y in begun}

    def swap(self, params: Params, version: int) -> None:
        """Use later weights from the next launch on; unfinished responses keep their cache."""
        self._weights, self.version = self.decoder.weights(params), version
        self._kept.clear()

    def forget(self, conversation: np.ndarray) -> None:
        """Free the kept cache of a conversation that has ended.

        Args:
            conversation: prompt and response of its last turn.
        """
        self._kept.pop(_text(conversation[:-1]), None)

    def run(self) -> Iterator[Response]:
        """Yield responses as they finish, until the session is idle."""
        while not self.is_idle:
            yield from self.step()

    def step(self) -> list[Response]:
        """Fill the free slots and launch a chunk; return the responses that ended meanwhile."""
        start_s = time.perf_counter()
        finished = self._collect() if self._queue else []
        self._admit()
        chunk = self._launch()
        finished += self._collect()
        self._chunk = None if self.is_idle else chunk
        if not self.decoder.launches_ahead:
            finished += self._collect()
        self.statistics.decode_s += time.perf_counter() - start_s
        return finished

    def _admit(self) -> None:
        """Assign samples to free slots."""
        free = [slot for slot, sample in enumerate(self._samples) if sample is None]
        while free and self._queue:
            if self._queue[0].row is None:
                self._read_prompts(len(free))
            rows = dict[int, int]()  # slot -> row
            while free and self._queue and (row := self._queue[0].row) is not None:
                slot = free.pop(0)
                rows[slot] = row
                self._assign(slot, self._queue.popleft())
            self._history = self._copied(self._history, self._pool, rows)

    def _copied(self, into: Caches, source: Caches, rows: dict[int, int]) -> Caches:
        """Return `into` with rows of `source` copied: target -> row."""
        pairs = np.zeros((2, self.num_slots), np.int32)
        pairs[:, : len(rows)] = [*rows], [*rows.values()]
        return self.decoder.copy(into, source, *pairs, np.int32(len(rows)))

    def _read_prompts(self, most: int) -> None:
        """Read prompts of the queue into the pool until they have `most` samples; at least one.

        A cached prefix is not read again. The pieces of all prompts have one width: the smallest
        one that the rest of the first prompt fits into, or the largest.
        """
        pieces, first, width = self.decoder.pieces, self._num_kept, 0
        lefts, prefixes, num_samples = list[np.ndarray](), list[tuple[int, int]](), 0
        for _, group in itertools.groupby(self._queue, key=lambda s: s.response.request):
            samples = list(group)
            prompt = samples[0].prompt[:-1]
            prefix = max(filter(_text(prompt).startswith, self._kept), key=len, default=b"")
            left = prompt[len(prefix) // prompt.itemsize :]
            if not lefts:
                width = next((n for n in pieces if len(left) <= n), max(pieces))
            elif len(lefts) == pieces[width] or num_samples >= most:
                break
            elif len(left) > width < max(pieces):
                break
            for sample in samples:
                sample.row = first + len(lefts)
                sample.response = sample.response._replace(version_min=self.version)
            num_samples += len(samples)
            prefixes.append((self._kept.pop(prefix, 0), len(prompt) - len(left)))
            lefts.append(left)
        size = pieces[width]
        lengths, at = np.zeros(size, np.int32), np.zeros((2, size), np.int32)
        lengths[: len(lefts)] = [len(left) for left in lefts]
        at[:, : len(lefts)] = np.transpose(prefixes)
        self.statistics.kept_tokens += int(at[1].sum())
        self.statistics.prompt_tokens += int(at[1].sum() + lengths.sum())
        tokens = np.zeros((size, max(1, -(-lengths.max() // width)) * width), np.int32)
        for row, left in zip(tokens, lefts, strict=False):
            row[: len(left)] = left
        for begin in range(0, tokens.shape[1], width):
            piece = tokens[:, begin : begin + width], np.clip(lengths - begin, 0, width)
            before = (at[0], at[1]) if begin or first else None
            self._pool = self.decoder.extend(self._weights, self._pool, *piece, before)
            at = np.stack([first + np.arange(size, dtype=np.int32), at[1] + piece[1]])

    def _assign(self, slot: int, sample: _Sample | None) -> None:
        """Assign a sample to a slot; None empties it. The next launched chunk uses the change."""
        new = Slots(stop_ids=-1)
        if sample is not None:
            prompt, settings = sample.prompt, sample.settings
            ids = self.decoder.eos_ids if settings.stop_ids is None else settings.stop_ids
            new = Slots(
                first=prompt[-1],
                start=len(prompt) - 1,
                keys=sample.key,
                temperature=sample.response.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                min_new_tokens=settings.min_new_tokens,
                max_new_tokens=settings.max_new_tokens,
                stop_ids=[*ids, *[-1] * (self.decoder.num_stop_ids - len(ids))],
            )
        for part, value in zip(self._slots, new, strict=True):
            part[slot] = value
        self._samples[slot] = sample

    def _launch(self) -> _Chunk | None:
        """Launch a chunk; return None if there is no response to decode."""
        if not any(self._samples):
            return None
        # The device may read an array of the host after this call, so it gets a copy. A separate
        # transfer would give up the interpreter lock, and wait for it, once per array.
        slots = jax.tree.map(np.copy, self._slots)
        self._slots.is_new[:] = False
        drawn, self._history, self._progress = self.decoder.run_chunk(
            self._weights, self._history, slots, self._progress
        )
        for x in drawn:
            x.copy_to_host_async()
        return drawn, tuple(self._samples), self.version

    def _collect(self) -> list[Response]:
        """Read the launched chunk, if there is one; return the responses that ended in it."""
        if self._chunk is None:
            return []
        (drawn, samples, version), self._chunk = self._chunk, None
        tokens, logprobs, nums, has_eos = (np.asarray(x) for x in drawn)
        finished, kept = list[Response](), dict[int, int]()  # row of the pool -> slot
        for slot, sample in enumerate(samples):
            if sample is None or self._samples[slot] is not sample:
                continue  # it ended before, or was cancelled
            num, settings, end = int(nums[slot]), sample.settings, 0
            if strings := settings.stop_strings or self.decoder.stop_strings:
                before = [part for part, _, _ in sample.drawn]
                end = strings.end(np.concatenate([*before, tokens[:num, slot]]), sample.num_tokens)
                num = end - sample.num_tokens if end else num
            sample.drawn.append((tokens[:num, slot], logprobs[:num, slot], version))
            sample.num_tokens += num
            self.statistics.tokens += num
            is_ended = bool(end or has_eos[slot])
            if not is_ended and sample.num_tokens < settings.max_new_tokens:
                continue
            y = sample.so_far()._replace(has_eos=is_ended, version_max=version)
            self._assign(slot, None)
            self._num_unfinished -= 1
            finished.append(y)
            # A state cannot go back to the token that completed a stop string.
            is_exact = not (end and self._has_states) and y.version_min == self.version
            if self._num_kept and is_exact:
                kept[self._row_for(np.concatenate([sample.prompt, y.tokens[:-1]]))] = slot
        steps = int(nums.max())
        self.statistics.steps += steps
        self.statistics.slot_steps += steps * self.num_slots
        if kept:
            self._pool = self._copied(self._pool, self._history, kept)
        return finished

    def _row_for(self, conversation: np.ndarray) -> int:
        """Return the row that keeps a conversation: its own, a free one, or the oldest."""
        text = _text(conversation)
        if (row := self._kept.pop(text, None)) is None:
            free = set(range(self._num_kept)).difference(self._kept.values())
            row = min(free) if free else self._kept.pop(next(iter(self._kept)))
        self._kept[text] = row
        return row


def _text(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.int32).tobytes()


class Decoder(Programs):
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
    ) -> list[list[Response]]:
        """Return `num_samples` responses to each prompt.

        Args:
            params: weights, on the devices to run on.
            prompts: p rows of token ids, each at least one token long.
            num_samples: S, number of responses to each prompt.
            key: JAX PRNG key, from which sample j of prompt i uses fold_in(key, i * S + j). Or the
                key data of each sample, uint32 [p S 2].
            settings: settings of the sampling.
            num_slots: responses decoded at a time; None: all.

        Raises:
            ValueError: a prompt or a setting is invalid.
        """
        p, size = len(prompts), len(prompts) * num_samples
        session = self.session(params, num_slots=min(size, num_slots or size))
        keys = key if isinstance(key, np.ndarray) else fold_in(key, np.arange(size))
        for prompt, own in zip(prompts, keys.reshape(p, num_samples, 2), strict=True):
            session.submit(prompt, own, settings)
        found = sorted(session.run(), key=lambda y: (y.request, y.sample))
        return [found[i : i + num_samples] for i in range(0, size, num_samples)]
