# SPDX-License-Identifier: Apache-2.0
"""A session of the decoding engine: a queue of prompts, and slots for unfinished responses.

The host repeats: admit prompts to free slots (one prefill per prompt, whose keys and values are
copied to each of its samples), run a jitted chunk of steps, and collect finished responses. A long
response therefore does not delay others, and weights can be swapped between chunks. The host keeps
the slots' state; the device only has the cache.

With `keeps_caches`, the caches of ended responses stay on the device until a prompt continues them,
another response needs the row, or the weights change. Invariant: a kept cache is used with the
weights that computed all of it.
"""

import collections
import dataclasses
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from tba_jax.decoding import programs
from tba_jax.decoding.compiled import ADDED_TOKENS, EXTEND_TOKENS, PREFILL_TOKENS, Compiled
from tba_jax.decoding.prefixes import PrefixRows
from tba_jax.decoding.programs import Caches
from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.flow.padding import bucket_length
from tba_jax.models.transformer import Params

# Calls up to this many tokens, padding included, are not compiled for fewer prompts: on an
# accelerator, such calls spend most of their time on reading the weights.
_SMALL_PREFILL_TOKENS = 128


class _Request(NamedTuple):
    index: int
    prompt: np.ndarray
    keys: np.ndarray
    settings: SamplingSettings
    temperatures: np.ndarray


@dataclasses.dataclass(eq=False)
class _Sample:
    """An unfinished response to a prompt that has been read: it waits for a slot, or has one."""

    request: _Request
    index: int
    row: int  # of the prompt in the caches that were read with it
    version_min: int
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[np.ndarray] = dataclasses.field(default_factory=list)

    def response(self, has_eos: bool, version: int) -> Response:
        return Response(
            request=self.request.index,
            sample=self.index,
            tokens=np.concatenate(self.tokens),
            token_logprobs=np.concatenate(self.logprobs),
            has_eos=has_eos,
            version_min=self.version_min,
            version_max=version,
            temperature=float(self.request.temperatures[self.index]),
            token_versions=np.concatenate(self.versions),
        )


class Session:
    """Queue and slots on one set of devices; one thread calls it. `Decoder.session` makes it.

    Args:
        params: weights, stacked or in the decoder's layout.
        num_slots: responses decoded at a time.
        prefill_prompts: prompts per prefill call; long prompts are prefilled in smaller calls.
        num_stop_ids: maximum number of stop ids of a request; None: the number of eos_ids.
        version: version of the weights.
        keeps_caches: whether to keep caches of ended responses, as many as slots, for prompts that
            continue them. Such prompts depend on other requests by the rounding of their cache.
    """

    def __init__(
        self,
        decoder: Compiled,
        params: Params,
        *,
        num_slots: int,
        prefill_prompts: int = 1,
        num_stop_ids: int | None = None,
        version: int = 0,
        keeps_caches: bool = False,
    ):
        if num_slots < 1:
            raise ValueError(f"decoding got num_slots = {num_slots}; wanted at least 1")
        self.decoder, self.num_slots, self.version = decoder, num_slots, version
        self.statistics = Statistics()
        self._weights = decoder.weights(params)
        self._prefill_prompts = prefill_prompts
        self._requests = collections.deque[_Request]()
        self._waiting = collections.deque[_Sample]()  # their prompts are in `_read`
        self._read: Caches = ()
        self._samples: list[_Sample | None] = [None] * num_slots  # of each slot
        self._num_submitted = self._num_unfinished = 0  # requests; samples
        num_stop_ids = max(1, len(decoder.eos_ids) if num_stop_ids is None else num_stop_ids)
        self._slots = programs.empty_slots(num_slots, num_stop_ids)
        where = jax.tree.leaves(self._weights)[0].sharding
        self._history = decoder.new_cache(num_slots, where)
        self._prefixes = PrefixRows(num_slots if keeps_caches else 0)
        self._kept = decoder.new_cache(num_slots, where) if keeps_caches else ()
        self._has_states = "delta" in decoder.config.layer_kinds

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
        if temperatures is None:
            temperatures = np.full(len(keys), settings.temperature, np.float32)
        prompt, keys = prompt.astype(np.int32), np.asarray(keys)
        self._requests.append(_Request(index, prompt, keys, settings, temperatures))
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
        bucket_length(len(prompt), decoder.prompt_buckets)  # raises if no bucket is large enough
        if prompt.min() < 0 or prompt.max() >= size:
            bad = int(prompt[(prompt < 0) | (prompt >= size)][0])
            raise ValueError(
                f"decode() got token id {bad} in the prompt of row {index}; the model has ids 0 "
                f"to {size - 1}. Use the tokenizer that belongs to the model"
            )
        room = self._slots.stop_ids.shape[1]
        if settings.stop_ids is not None and len(settings.stop_ids) > room:
            raise ValueError(
                f"decode() got {len(settings.stop_ids)} stop ids (row {index}); this session was "
                f"made for {room}. Make it with a larger num_stop_ids"
            )

    def cancel(self, request: int) -> None:
        """Drop the unfinished samples of a request; other requests get its slots."""
        self._requests = collections.deque(r for r in self._requests if r.index != request)
        self._waiting = collections.deque(s for s in self._waiting if s.request.index != request)
        for slot, sample in enumerate(self._samples):
            if sample is not None and sample.request.index == request:
                self._samples[slot] = None
                self._slots.is_live[slot] = False
        queued = sum(len(r.keys) for r in self._requests) + len(self._waiting)
        self._num_unfinished = queued + sum(s is not None for s in self._samples)

    def unfinished(self, request: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return sample -> (tokens, log-probs) so far, for samples of a request that have slots."""
        return {
            each.index: (np.concatenate(each.tokens), np.concatenate(each.logprobs))
            for each in self._samples
            if each is not None and each.request.index == request and each.tokens
        }

    def swap(self, params: Params, version: int) -> None:
        """Replace the weights by a later version; unfinished responses keep their cache."""
        self._weights, self.version = self.decoder.weights(params), version
        self._prefixes.clear()

    def forget(self, conversation: np.ndarray) -> None:
        """Free the kept cache of a conversation that has ended.

        Args:
            conversation: prompt and response of its last turn.
        """
        self._prefixes.drop(conversation[:-1])

    def run(self) -> Iterator[Response]:
        """Yield responses as they finish, until the session is idle."""
        while not self.is_idle:
            yield from self.step()

    def step(self) -> list[Response]:
        """Fill the free slots, run one chunk, and return the responses that ended in it."""
        self._admit()
        live, settings = self._slots.is_live, self._slots.settings
        if not live.any():
            return []
        start_s = time.perf_counter()
        is_truncated = ((settings.top_p < 1) | (settings.top_k > 0))[live].any()
        tokens, logprobs, self._history = self.decoder.run_chunk(
            self._weights, self._history, self._slots, is_truncated=bool(is_truncated)
        )
        finished = self._collect(np.asarray(tokens), np.asarray(logprobs))
        self.statistics.chunk_s += time.perf_counter() - start_s
        return finished

    def _admit(self) -> None:
        """Assign samples to free slots."""
        free = [slot for slot, sample in enumerate(self._samples) if sample is None]
        while free and (self._waiting or self._requests):
            if not self._waiting:
                self._read_prompts()
            slots, rows = free[: len(self._waiting)], []
            for slot in slots:
                sample = self._waiting.popleft()
                rows.append(sample.row)
                self._occupy(slot, sample)
            self._history = self._copied(self._history, self._read, slots, rows)
            free = free[len(slots) :]
            if not self._waiting:
                self._read = ()

    def _copied(self, into: Caches, source: Caches, slots: list[int], rows: list[int]) -> Caches:
        """Return `into` with rows of `source` copied to `slots`."""
        # Few shapes: powers of 4. Unused entries have a slot that does not exist.
        wanted = 4 ** max(1, (len(slots) - 1).bit_length() + 1 >> 1)
        rest = min(self.num_slots, wanted) - len(slots)
        slots, rows = slots + [self.num_slots] * rest, rows + [0] * rest
        return self.decoder.copy(into, source, np.array(slots, np.int32), np.array(rows, np.int32))

    def _read_prompts(self) -> None:
        """Compute the caches of the next prompts of the queue; free the rows of their prefixes.

        A call has only prompts with kept prefixes, or only prompts without. Their number and length
        are padded to one of a few compiled shapes.
        """
        start_s, decoder = time.perf_counter(), self.decoder
        has_prefix = self._prefixes.find(self._requests[0].prompt)[1] > 0
        widths, limit = decoder.prompt_buckets, PREFILL_TOKENS
        if has_prefix:
            longest = decoder.cache_length
            widths, limit = (*(n for n in ADDED_TOKENS if n < longest), longest), EXTEND_TOKENS
        batch, found, width = list[_Request](), list[tuple[int, int]](), 0
        while self._requests and len(batch) < self._prefill_prompts:
            prompt = self._requests[0].prompt
            row, before = self._prefixes.find(prompt)
            wider = max(width, bucket_length(len(prompt) - 1 - before, widths))
            is_full = bool(batch) and (len(batch) + 1) * wider > limit
            if is_full or (before > 0) != has_prefix:
                break
            self._prefixes.drop(prompt[:before])
            batch.append(self._requests.popleft())
            found.append((row, before))
            width = wider
        size = max(1, min(self._prefill_prompts, limit // width))
        if size * width > _SMALL_PREFILL_TOKENS:
            # Few prompts may wait, and a row of padding costs as much as a prompt.
            size = min(size, 1 << (len(batch) - 1).bit_length())
        tokens = np.zeros((size, width), np.int32)
        rows, befores, lengths = np.zeros((3, size), np.int32)
        for i, (request, (row, before)) in enumerate(zip(batch, found, strict=True)):
            added = request.prompt[before:-1]
            rows[i], befores[i], lengths[i] = row, before, len(added)
            tokens[i, : len(added)] = added
        prefixes = programs.Prefixes(self._kept, rows, befores) if has_prefix else None
        self._read = decoder.extend(self._weights, tokens, lengths, prefixes)
        jax.block_until_ready(self._read)  # for separate timing; the chunk would wait anyway
        self._waiting.extend(
            _Sample(request, j, row, self.version)
            for row, request in enumerate(batch)
            for j in range(len(request.keys))
        )
        self.statistics.kept_tokens += int(befores.sum())
        self.statistics.prompt_tokens += sum(len(request.prompt) - 1 for request in batch)
        self.statistics.prefill_s += time.perf_counter() - start_s

    def _occupy(self, slot: int, sample: _Sample) -> None:
        slots, request, settings = self._slots, sample.request, sample.request.settings
        slots.last[slot] = request.prompt[-1]
        slots.length[slot] = len(request.prompt) - 1
        slots.count[slot] = 0
        slots.is_live[slot] = True
        slots.keys[slot] = request.keys[sample.index]
        slots.settings.temperature[slot] = request.temperatures[sample.index]
        slots.settings.top_p[slot] = settings.top_p
        slots.settings.top_k[slot] = settings.top_k
        slots.min_new_tokens[slot] = settings.min_new_tokens
        slots.max_new_tokens[slot] = settings.max_new_tokens
        stop_ids = self.decoder.eos_ids if settings.stop_ids is None else settings.stop_ids
        slots.stop_ids[slot] = -1
        slots.stop_ids[slot, : len(stop_ids)] = stop_ids
        self._samples[slot] = sample

    def _collect(self, tokens: np.ndarray, logprobs: np.ndarray) -> list[Response]:
        """Append the chunk's tokens to their responses and free the slots of finished ones."""
        slots, finished, longest, kept = self._slots, list[Response](), 0, dict[int, int]()
        is_stop = (tokens[:, :, None] == slots.stop_ids).any(axis=2)
        # Tokens of each slot up to its first stop token, inclusive, or up to the length limit.
        ends = np.where(is_stop.any(axis=0), is_stop.argmax(axis=0) + 1, len(tokens))
        ends = np.minimum(ends, slots.max_new_tokens - slots.count)
        for slot, sample in enumerate(self._samples):
            if sample is None:
                continue
            count, drawn = int(slots.count[slot]), tokens[: ends[slot], slot]
            num, has_eos = len(drawn), bool(is_stop[len(drawn) - 1, slot])
            longest = max(longest, num)
            stop_strings = sample.request.settings.stop_strings or self.decoder.stop_strings
            end = stop_strings and stop_strings.end(np.concatenate([*sample.tokens, drawn]), count)
            if end:
                num, has_eos = end - count, True
            sample.tokens.append(drawn[:num])
            sample.logprobs.append(logprobs[:num, slot])
            sample.versions.append(np.full(num, self.version, np.int32))
            slots.count[slot] += num
            slots.length[slot] += num
            slots.last[slot] = drawn[num - 1]
            self.statistics.tokens += num
            if not has_eos and slots.count[slot] < slots.max_new_tokens[slot]:
                continue
            slots.is_live[slot] = False
            self._samples[slot] = None
            self._num_unfinished -= 1
            # A state cannot go back to the token that completed a stop string.
            is_exact = num == len(drawn) or not self._has_states
            if self._prefixes.num_rows and is_exact and sample.version_min == self.version:
                text = np.concatenate([sample.request.prompt, *sample.tokens])
                kept[slot] = self._prefixes.put(text[:-1])
            finished.append(sample.response(has_eos, self.version))
        self.statistics.steps += longest
        self.statistics.slot_steps += longest * self.num_slots
        if kept:
            self._kept = self._copied(self._kept, self._history, [*kept.values()], [*kept])
        return finished
