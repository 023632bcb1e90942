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
while host and caller are busy. A slot that the chunk frees is then idle for one more chunk; so the
chunk is read before if requests wait for slots. On a CPU, whose cores programs and host share, a
chunk is read at once (`Programs.launches_ahead`).

With `keeps_caches`, the caches of ended responses stay on the device until a prompt continues them,
another response needs the row, or the weights change. Invariant: a kept cache is used with the
weights that computed all of it.
"""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from tba_jax.decoding.keys import row_keys
from tba_jax.decoding.programs import Caches, Programs, Slots, empty_slots
from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.models.transformer import Params


@dataclasses.dataclass(eq=False)
class _Sample:
    """An unfinished response: it waits for its prompt to be read, waits for a slot, or has one."""

    prompt: np.ndarray
    key: np.ndarray
    settings: SamplingSettings
    response: Response  # so far
    row: int = 0  # of the prompt in the pool


class _Chunk(NamedTuple):
    """A launched chunk that has not been read: its samples, and the version of the weights."""

    drawn: tuple[jax.Array, ...]
    samples: tuple[_Sample | None, ...]
    version: int


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
        self._requests = collections.deque[list[_Sample]]()
        self._waiting = collections.deque[_Sample]()  # their prompts are in the pool
        self._samples: list[_Sample | None] = [None] * num_slots  # of each slot
        self._num_submitted = self._num_unfinished = 0  # requests; samples
        # Changed on the host; before the next chunk, the copy on the device is replaced.
        self._slots, progress = empty_slots(num_slots, decoder.num_stop_ids)
        self._is_changed = False
        self._where = decoder.where(self._weights)
        self._placed, self._progress = jax.device_put((self._slots, progress), self._where)
        self._history = decoder.new_cache(num_slots, self._weights)
        # Of the pool: kept caches, then the rows into which prompts are read.
        self._num_kept = num_slots if keeps_caches else 0
        self._pool = decoder.new_cache(self._num_kept + decoder.num_rows, self._weights)
        self._drop_kept()
        self._has_states = "delta" in decoder.config.layer_kinds
        self._chunk: _Chunk | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no response is unfinished."""
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
        index, prompt = self._num_submitted, np.asarray(prompt)
        self._check(prompt, settings, index)
        prompt, none = prompt.astype(np.int32), np.zeros(0, np.int32)
        if temperatures is None:
            temperatures = np.full(len(keys), settings.temperature, np.float32)
        begun = Response(index, 0, none, none.astype(np.float32), False, 0, 0, 1.0, none)
        self._requests.append(
            [
                _Sample(prompt, key, settings, begun._replace(sample=j, temperature=float(t)))
                for j, (key, t) in enumerate(zip(keys, temperatures, strict=True))
            ]
        )
        self._num_submitted += 1
        self._num_unfinished += len(keys)
        return index

    def _check(self, prompt: np.ndarray, settings: SamplingSettings, index: int) -> None:
        decoder, size = self.decoder, self.decoder.config.vocab_size
        if len(prompt) == 0:
            raise ValueError(
                f"decode() got an empty prompt (row {index}); give at least one token, such as "
                "the beginning-of-sequence token"
            )
        if len(prompt) + settings.max_new_tokens > decoder.max_length:
            raise ValueError(
                f"decode() got a prompt of {len(prompt)} tokens (row {index}) and max_new_tokens "
                f"= {settings.max_new_tokens}; the cache holds {decoder.max_length}. Shorten one "
                "of them, or make the decoder with a larger max_length"
            )
        if prompt.min() < 0 or prompt.max() >= size:
            bad = int(prompt[(prompt < 0) | (prompt >= size)][0])
            raise ValueError(
                f"decode() got token id {bad} in the prompt of row {index}; the model has ids 0 "
                f"to {size - 1}. Use the tokenizer that belongs to the model"
            )

    def cancel(self, request: int) -> None:
        """Drop the unfinished samples of a request; other requests get its slots."""
        requests = (r for r in self._requests if r and r[0].response.request != request)
        self._requests = collections.deque(requests)
        self._waiting = collections.deque(s for s in self._waiting if s.response.request != request)
        for slot, sample in enumerate(self._samples):
            if sample is not None and sample.response.request == request:
                self._assign(slot, None)
        queued = sum(map(len, self._requests)) + len(self._waiting)
        self._num_unfinished = queued + sum(s is not None for s in self._samples)

    def unfinished(self, request: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return sample -> (tokens, log-probs) so far, for samples of a request that have slots."""
        responses = (each.response for each in self._samples if each is not None)
        return {
            y.sample: (y.tokens, y.token_logprobs)
            for y in responses
            if y.request == request and len(y.tokens)
        }

    def swap(self, params: Params, version: int) -> None:
        """Use later weights from the next launch on; unfinished responses keep their cache."""
        self._weights, self.version = self.decoder.weights(params), version
        self._drop_kept()

    def forget(self, conversation: np.ndarray) -> None:
        """Free the kept cache of a conversation that has ended.

        Args:
            conversation: prompt and response of its last turn.
        """
        self._release(_bytes(conversation[:-1]))

    def _drop_kept(self) -> None:
        """Make all rows free. `_kept` is text -> row, the least recently written row first."""
        self._kept = collections.OrderedDict[bytes, int]()
        for row in range(self._num_kept):
            self._kept[_bytes(np.array([-1, row]))] = row  # a text that no prompt begins with

    def _release(self, text: bytes) -> None:
        """Make the row of a text free, so that the next text gets it."""
        if (row := self._kept.pop(text, None)) is not None:
            self._kept[free := _bytes(np.array([-1, row]))] = row
            self._kept.move_to_end(free, last=False)

    def _row_for(self, text: bytes) -> int:
        """Return the row for a text: its own, else a free one, else the least recently written."""
        row = self._kept.pop(text) if text in self._kept else self._kept.popitem(last=False)[1]
        self._kept[text] = row
        return row

    def run(self) -> Iterator[Response]:
        """Yield responses as they finish, until the session is idle."""
        while not self.is_idle:
            yield from self.step()

    def step(self) -> list[Response]:
        """Fill the free slots and launch a chunk; return the responses that ended meanwhile."""
        start_s = time.perf_counter()
        finished = self._collect() if self._waiting or self._requests else []
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
        while free and (self._waiting or self._requests):
            if not self._waiting:
                self._read_prompts(len(free))
            slots, free = free[: len(self._waiting)], free[len(self._waiting) :]
            samples = [self._waiting.popleft() for _ in slots]
            for slot, sample in zip(slots, samples, strict=True):
                self._assign(slot, sample)
            rows = [sample.row for sample in samples]
            self._history = self._copied(self._history, self._pool, slots, rows)

    def _copied(self, into: Caches, source: Caches, targets: list[int], rows: list[int]) -> Caches:
        """Return `into` with rows of `source` copied to `targets`."""
        pairs = np.zeros((2, self.num_slots), np.int32)
        pairs[:, : len(rows)] = targets, rows
        return self.decoder.copy(into, source, *pairs, np.int32(len(rows)))

    def _read_prompts(self, most: int) -> None:
        """Read prompts of the queue into the pool, for at most `most` samples, or one prompt.

        All are read in pieces of one width, which holds what is left of the first prompt if any
        width does.
        """
        pieces, first, width, size = self.decoder.pieces, self._num_kept, 0, 1
        batch, begins, rows = list[list[_Sample]](), list[int](), list[int]()
        while self._requests and len(batch) < size and sum(map(len, batch)) < most:
            prompt = self._requests[0][0].prompt
            text = _bytes(prompt[:-1])
            prefix = max(filter(text.startswith, self._kept), key=len, default=b"")
            begin = len(prefix) // prompt.itemsize
            num = len(prompt) - 1 - begin
            if not batch:
                width = next((n for n in pieces if num <= n), max(pieces))
                size = pieces[width]
            elif num > width < max(pieces):
                break
            batch.append(self._requests.popleft())
            begins.append(begin)
            rows.append(self._kept.get(prefix, 0))
            self._release(prefix)
        prompts = [group[0].prompt[:-1] for group in batch]
        self.statistics.kept_tokens += sum(begins)
        self.statistics.prompt_tokens += sum(map(len, prompts))
        at = np.zeros((2, size), np.int32)
        at[:, : len(batch)] = rows, begins
        prefixes = (at[0], at[1]) if first else None
        while True:
            tokens, lengths = np.zeros((size, width), np.int32), np.zeros(size, np.int32)
            for i, prompt in enumerate(prompts):
                piece = prompt[at[1, i] :][:width]
                tokens[i, : len(piece)], lengths[i] = piece, len(piece)
            self._pool = self.decoder.extend(self._weights, self._pool, tokens, lengths, prefixes)
            at = np.stack([first + np.arange(size, dtype=np.int32), at[1] + lengths])
            if all(len(prompt) == end for prompt, end in zip(prompts, at[1], strict=False)):
                break
            prefixes = at[0], at[1]
        for i, group in enumerate(batch):
            for sample in group:
                sample.row = first + i
                sample.response = sample.response._replace(version_min=self.version)
                self._waiting.append(sample)

    def _assign(self, slot: int, sample: _Sample | None) -> None:
        """Assign a sample to a slot, or empty the slot; from the next launch on."""
        new = Slots(number=self._slots.number[slot] + 1, stop_ids=-1)
        if sample is not None:
            prompt, settings = sample.prompt, sample.settings
            ids = self.decoder.eos_ids if settings.stop_ids is None else settings.stop_ids
            new = new._replace(
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
        self._samples[slot], self._is_changed = sample, True

    def _launch(self) -> _Chunk | None:
        """Launch a chunk; return None if there is no response to decode."""
        if not any(self._samples):
            return None
        if self._is_changed:
            # The device may read an array of the host after this call, so it gets a copy.
            slots = jax.tree.map(np.copy, self._slots)
            self._placed, self._is_changed = jax.device_put(slots, self._where), False
        drawn, self._history, self._progress = self.decoder.run_chunk(
            self._weights, self._history, self._placed, self._progress
        )
        for x in drawn:
            x.copy_to_host_async()
        return _Chunk(drawn, tuple(self._samples), self.version)

    def _collect(self) -> list[Response]:
        """Read the launched chunk, if there is one; return the responses that ended in it."""
        if self._chunk is None:
            return []
        (drawn, samples, version), self._chunk = self._chunk, None
        tokens, logprobs, nums, has_eos = (np.asarray(x) for x in drawn)
        finished, kept = list[Response](), dict[int, int]()
        for slot, sample in enumerate(samples):
            if sample is None or self._samples[slot] is not sample:
                continue  # it ended before, or was cancelled
            y, num, settings = sample.response, int(nums[slot]), sample.settings
            text = np.concatenate([y.tokens, tokens[:num, slot]])
            strings = settings.stop_strings or self.decoder.stop_strings
            if end := strings.end(text, len(y.tokens)) if strings else 0:
                text, num = text[:end], end - len(y.tokens)
            sample.response = y = y._replace(
                tokens=text,
                token_logprobs=np.concatenate([y.token_logprobs, logprobs[:num, slot]]),
                token_versions=np.append(y.token_versions, np.full(num, version, np.int32)),
                has_eos=bool(end or has_eos[slot]),
                version_max=version,
            )
            self.statistics.tokens += num
            if not y.has_eos and len(text) < settings.max_new_tokens:
                continue
            self._assign(slot, None)
            self._num_unfinished -= 1
            finished.append(y)
            # A state cannot go back to the token that completed a stop string.
            is_exact = not (end and self._has_states) and y.version_min == self.version
            if self._num_kept and is_exact:
                kept[slot] = self._row_for(_bytes(np.concatenate([sample.prompt, text[:-1]])))
        steps = int(nums.max())
        self.statistics.steps += steps
        self.statistics.slot_steps += steps * self.num_slots
        if kept:
            self._pool = self._copied(self._pool, self._history, [*kept.values()], [*kept])
        return finished


def _bytes(tokens: np.ndarray) -> bytes:
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
                key data of each sample, uint32 [p S 2] (`row_keys`).
            settings: settings of the sampling.
            num_slots: responses decoded at a time; None: all.

        Raises:
            ValueError: a prompt or a setting is invalid.
        """
        for name, value in (("number of prompts", len(prompts)), ("num_samples", num_samples)):
            if value < 1:
                raise ValueError(f"decode() got {name} = {value}; wanted at least 1")
        p, size = len(prompts), len(prompts) * num_samples
        session = self.session(params, num_slots=min(size, num_slots or size))
        keys = key if isinstance(key, np.ndarray) else row_keys(key, size)
        for prompt, own in zip(prompts, keys.reshape(p, num_samples, 2), strict=True):
            session.submit(prompt, own, settings)
        found = sorted(session.run(), key=lambda y: (y.request, y.sample))
        return [found[i : i + num_samples] for i in range(0, size, num_samples)]
