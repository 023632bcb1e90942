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
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from tba_jax.decoding import programs
from tba_jax.decoding.compiled import Compiled
from tba_jax.decoding.prefixes import Kept, PrefixRows
from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.flow.padding import bucket_length
from tba_jax.models.kv_cache import LayerCache
from tba_jax.models.transformer import Params

# Maximum tokens of a call that reads prompts: enough to be limited by arithmetic on every device,
# few enough that attention scores fit in memory with the cache. After kept prefixes, scores of
# every column of the cache are in memory.
PREFILL_TOKENS, EXTEND_TOKENS = 8192, 2048
# Calls up to this many tokens, padding included, are not compiled for fewer prompts: on an
# accelerator, such calls spend most of their time on reading the weights.
SMALL_PREFILL_TOKENS = 128
# Compiled numbers of tokens after a kept prefix; a cache's length is one, too.
ADDED_TOKENS = (8, 32, 128, 512)


class _Request(NamedTuple):
    index: int
    prompt: np.ndarray
    keys: np.ndarray
    settings: SamplingSettings
    temperatures: np.ndarray


class _Waiting(NamedTuple):
    """Samples of prefilled prompts that wait for a slot; the prefill used weights `version`."""

    version: int
    caches: tuple[LayerCache, ...]
    samples: collections.deque[tuple[int, _Request, int]]  # (row in caches, request, sample)


class _Occupant(NamedTuple):
    """Contents of a live slot."""

    request: _Request
    sample: int
    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    versions: list[int]  # weight version of each part of `tokens`
    version_min: int


class Session:
    """Queue and slots on one set of devices; one thread calls it. `Decoder.session` makes it."""

    def __init__(
        self,
        decoder: Compiled,
        params: Params,
        num_slots: int,
        prefill_prompts: int,
        num_stop_ids: int | None,
        version: int,
        keeps_caches: bool,
    ):
        if num_slots < 1:
            raise ValueError(f"decoding got num_slots = {num_slots}; wanted at least 1")
        self.decoder = decoder
        self.num_slots = num_slots
        self.version = version
        self.statistics = Statistics()
        self._weights = decoder.weights(params)
        self._prefill_prompts = prefill_prompts
        num_stop_ids = max(1, len(decoder.eos_ids) if num_stop_ids is None else num_stop_ids)
        self._requests: collections.deque[_Request] = collections.deque()
        self._waiting: _Waiting | None = None
        self._occupants: list[_Occupant | None] = [None] * num_slots
        self._num_submitted = self._num_queued = 0  # prompts; samples without a slot
        self._started: float | None = None
        self._slots = programs.empty_slots(num_slots, num_stop_ids)
        where = jax.tree.leaves(self._weights)[0].sharding
        self._history = decoder.new_cache(num_slots, where)
        self._prefixes = PrefixRows(num_slots if keeps_caches else 0)
        self._kept = decoder.new_cache(num_slots, where) if keeps_caches else ()
        self._has_states = "delta" in decoder.config.layer_kinds

    @property
    def is_idle(self) -> bool:
        """Whether the queue is empty and no response is unfinished."""
        return not (self._requests or self._waiting or any(self._occupants))

    @property
    def is_waiting(self) -> bool:
        """Return False: a plain session never waits for an environment."""
        return False

    @property
    def room(self) -> int:
        """Free slots minus queued responses; negative if more are queued.

        Other threads may read the property while the session's thread decodes.
        """
        return self.num_slots - int(self._slots.is_live.sum()) - self._num_queued

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
        index = self._num_submitted
        decoder, prompt = self.decoder, np.asarray(prompt)
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
        size = decoder.config.vocab_size
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
        if temperatures is None:
            temperatures = np.full(len(keys), settings.temperature, np.float32)
        self._requests.append(
            _Request(index, prompt.astype(np.int32), np.asarray(keys), settings, temperatures)
        )
        self._num_submitted += 1
        self._num_queued += len(keys)
        if self._started is None:
            self._started = time.perf_counter()
        return index

    def cancel(self, request: int) -> None:
        """Drop the unfinished samples of a request; other requests get its slots."""
        self._requests = collections.deque(r for r in self._requests if r.index != request)
        if self._waiting is not None:
            kept = collections.deque(x for x in self._waiting.samples if x[1].index != request)
            self._waiting = self._waiting._replace(samples=kept) if kept else None
        num_waiting = 0 if self._waiting is None else len(self._waiting.samples)
        self._num_queued = num_waiting + sum(len(r.keys) for r in self._requests)
        for slot, occupant in enumerate(self._occupants):
            if occupant is not None and occupant.request.index == request:
                self._occupants[slot] = None
                self._slots.is_live[slot] = False

    def unfinished(self, request: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return sample -> (tokens, log-probs) so far, for samples of a request that have slots."""
        return {
            each.sample: (np.concatenate(each.tokens), np.concatenate(each.logprobs))
            for each in self._occupants
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
        live = self._slots.is_live
        if not live.any():
            return []
        start = time.perf_counter()
        settings = self._slots.settings
        tokens, logprobs, self._history = self.decoder.run_chunk(
            self._weights,
            self._history,
            self._slots,
            is_truncated=bool(((settings.top_p < 1) | (settings.top_k > 0))[live].any()),
        )
        finished = self._collect(np.asarray(tokens), np.asarray(logprobs))
        end = time.perf_counter()
        self.statistics.chunk_s += end - start
        if not self.statistics.first_token_s and self._started is not None:
            self.statistics.first_token_s = end - self._started
        return finished

    def _admit(self) -> None:
        """Assign samples to free slots."""
        free = [i for i, occupant in enumerate(self._occupants) if occupant is None]
        while free:
            if self._waiting is None:
                self._waiting = self._read_prompts()
            if self._waiting is None:
                return
            version, caches, samples = self._waiting
            rows = []
            slots = free[: len(samples)]
            for slot in slots:
                row, request, sample = samples.popleft()
                rows.append(row)
                self._occupy(slot, request, sample, version)
            self._num_queued -= len(slots)
            self._history = self._copied(self._history, caches, slots, rows)
            free = free[len(slots) :]
            if not samples:
                self._waiting = None

    def _copied(
        self,
        into: tuple[LayerCache, ...],
        source: tuple[LayerCache, ...],
        slots: list[int],
        rows: list[int],
    ) -> tuple[LayerCache, ...]:
        """Return `into` with rows of `source` copied to `slots`."""
        # Few shapes: powers of 4. Unused entries have a slot that does not exist.
        wanted = 4 ** max(1, (len(slots) - 1).bit_length() + 1 >> 1)
        rest = min(self.num_slots, wanted) - len(slots)
        return self.decoder.copy(
            into,
            source,
            np.array(slots + [self.num_slots] * rest, np.int32),
            np.array(rows + [0] * rest, np.int32),
        )

    def _read_prompts(self) -> _Waiting | None:
        """Compute the caches of the next prompts of the queue; free the rows of their prefixes.

        A call has only prompts with kept prefixes, or only prompts without. Their number and length
        are padded to one of a few compiled shapes.
        """
        if not self._requests:
            return None
        start_s, decoder = time.perf_counter(), self.decoder
        has_prefix = self._prefixes.find(self._requests[0].prompt) is not None
        widths, limit = decoder.prompt_buckets, PREFILL_TOKENS
        if has_prefix:
            longest = decoder.cache_length
            widths, limit = (*(n for n in ADDED_TOKENS if n < longest), longest), EXTEND_TOKENS
        batch, found, width = list[_Request](), list[Kept](), 0
        while self._requests and len(batch) < self._prefill_prompts:
            prompt = self._requests[0].prompt
            kept = self._prefixes.find(prompt)
            own = Kept(0, 0) if kept is None else kept
            wider = max(width, bucket_length(len(prompt) - 1 - own.length, widths))
            is_full = bool(batch) and (len(batch) + 1) * wider > limit
            if is_full or (kept is not None) != has_prefix:
                break
            self._prefixes.drop(prompt[: own.length])
            batch.append(self._requests.popleft())
            found.append(own)
            width = wider
        size = max(1, min(self._prefill_prompts, limit // width))
        if size * width > SMALL_PREFILL_TOKENS:
            # Few prompts may wait, and a row of padding costs as much as a prompt.
            size = min(size, 1 << (len(batch) - 1).bit_length())
        tokens = np.zeros((size, width), np.int32)
        rows, before, lengths = np.zeros((3, size), np.int32)
        for i, (request, kept) in enumerate(zip(batch, found, strict=True)):
            added = request.prompt[kept.length : -1]
            rows[i], before[i], lengths[i] = *kept, len(added)
            tokens[i, : len(added)] = added
        prefixes = programs.Prefixes(self._kept, rows, before) if has_prefix else None
        caches = decoder.extend(self._weights, tokens, lengths, prefixes)
        jax.block_until_ready(caches)  # for separate timing; the chunk would wait for it anyway
        self.statistics.kept_tokens += sum(kept.length for kept in found)
        self.statistics.prompt_tokens += sum(len(request.prompt) - 1 for request in batch)
        self.statistics.prefill_s += time.perf_counter() - start_s
        samples = ((i, x, sample) for i, x in enumerate(batch) for sample in range(len(x.keys)))
        return _Waiting(self.version, caches, collections.deque(samples))

    def _occupy(self, slot: int, request: _Request, sample: int, version: int) -> None:
        slots, settings = self._slots, request.settings
        slots.last[slot] = request.prompt[-1]
        slots.length[slot] = len(request.prompt) - 1
        slots.count[slot] = 0
        slots.is_live[slot] = True
        slots.keys[slot] = request.keys[sample]
        slots.settings.temperature[slot] = request.temperatures[sample]
        slots.settings.top_p[slot] = settings.top_p
        slots.settings.top_k[slot] = settings.top_k
        slots.min_new_tokens[slot] = settings.min_new_tokens
        slots.max_new_tokens[slot] = settings.max_new_tokens
        stop_ids = self.decoder.eos_ids if settings.stop_ids is None else settings.stop_ids
        slots.stop_ids[slot] = -1
        slots.stop_ids[slot, : len(stop_ids)] = stop_ids
        self._occupants[slot] = _Occupant(request, sample, [], [], [], version)

    def _collect(self, tokens: np.ndarray, logprobs: np.ndarray) -> list[Response]:
        """Append the chunk's tokens to their responses and free the slots of finished ones."""
        slots = self._slots
        is_stop = (tokens[:, :, None] == slots.stop_ids).any(axis=2)
        stops = is_stop.any(axis=0)
        # Tokens of each slot up to its first stop token, inclusive.
        ends = np.where(stops, is_stop.argmax(axis=0) + 1, len(tokens)).tolist()
        finished, longest, kept = [], 0, dict[int, int]()
        for slot, occupant in enumerate(self._occupants):
            if occupant is None:
                continue
            drawn = tokens[:, slot]
            limit = int(slots.max_new_tokens[slot] - slots.count[slot])
            num = decoded = min(ends[slot], limit)
            longest = max(longest, num)
            has_ended = bool(stops[slot]) and ends[slot] <= limit
            stop_strings = occupant.request.settings.stop_strings or self.decoder.stop_strings
            if stop_strings is not None:
                count = int(slots.count[slot])
                so_far = np.concatenate([*occupant.tokens, drawn[:num]])
                if end := stop_strings.end(so_far, count):
                    num, has_ended = end - count, True
            occupant.tokens.append(drawn[:num])
            occupant.logprobs.append(logprobs[:num, slot])
            occupant.versions.append(self.version)
            slots.count[slot] += num
            slots.length[slot] += num
            slots.last[slot] = drawn[num - 1]
            self.statistics.tokens += num
            if has_ended or slots.count[slot] == slots.max_new_tokens[slot]:
                slots.is_live[slot] = False
                self._occupants[slot] = None
                # A state cannot go back to the token that completed a stop string.
                is_exact = num == decoded or not self._has_states
                if self._prefixes.num_rows and is_exact and occupant.version_min == self.version:
                    parts = (occupant.request.prompt, *occupant.tokens)
                    kept[slot] = self._prefixes.put(np.concatenate(parts)[:-1])
                finished.append(
                    Response(
                        request=occupant.request.index,
                        sample=occupant.sample,
                        tokens=np.concatenate(occupant.tokens),
                        token_logprobs=np.concatenate(occupant.logprobs),
                        has_eos=has_ended,
                        version_min=occupant.version_min,
                        version_max=self.version,
                        temperature=float(occupant.request.temperatures[occupant.sample]),
                        token_versions=np.repeat(
                            np.array(occupant.versions, np.int32), list(map(len, occupant.tokens))
                        ),
                    )
                )
        self.statistics.steps += longest
        self.statistics.slot_steps += longest * self.num_slots
        if kept:
            self._kept = self._copied(self._kept, self._history, [*kept.values()], [*kept])
        return finished
