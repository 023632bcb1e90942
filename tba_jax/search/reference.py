# SPDX-License-Identifier: Apache-2.0
"""Reference log-probs on a searcher's devices: a jitted program, its weights, and its calls.

Invariant: with the same weights, a response has the same log-prob here as in the trainer.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.environments.episode import Episode
from tba_jax.flow.padding import Padding
from tba_jax.models.logprobs import response_mask, row_token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import TransformerConfig
from tba_jax.search.sampler import SampledGroup


class Reference:
    """The reference on one searcher's devices.

    Args:
        program: return value of `make_reference_program` for these devices.
    """

    def __init__(self, program: Callable[..., Array], params: Any) -> None:
        self._program = program
        self.params = params

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
        is_sampled: np.ndarray | None = None,
    ) -> Array:
        """Return summed log pi_ref of padded responses, float32 [b c], without waiting.

        Args:
            tokens: int32 [b s], as `Batch.tokens`.
            prompt_lengths: int32 [b].
            response_lengths: int32 [b c].
            response_bucket: padded length of the responses, t.
            is_sampled: bool [b c t], tokens that count; None: all tokens count.
        """
        return self._program(
            self.params,
            tokens,
            prompt_lengths,
            response_lengths,
            is_sampled,
            response_bucket=response_bucket,
        )


def make_reference_program(
    config: TransformerConfig,
    scoring: Scoring,
    site: Site = ANY_DEVICE,
) -> Callable[..., Array]:
    """Return a jitted function: (params, arguments of `Reference`) -> float32 [b c].

    Args:
        scoring: scoring settings of the policy in the trainer.
    """
    sharding = ComputeSharding(config, site)
    program = jax.jit(
        functools.partial(_score, config=config, scoring=scoring, sharding=sharding),
        static_argnames=("response_bucket",),
    )
    return site.locked(program)


def _score(
    params: Any,
    tokens: Array,
    prompt_lengths: Array,
    response_lengths: Array,
    is_sampled: Array | None = None,
    *,
    response_bucket: int,
    config: TransformerConfig,
    scoring: Scoring,
    sharding: ComputeSharding,
) -> Array:
    token_values = row_token_logprobs(
        params,
        tokens,
        prompt_lengths,
        response_lengths,
        response_bucket=response_bucket,
        config=config,
        scoring=scoring,
        sharding=sharding,
    )
    b, c = response_lengths.shape
    responses = tokens[:, -c * response_bucket :].reshape(b, c, response_bucket)
    mask = response_mask(responses, response_lengths, scoring, is_sampled)
    return jnp.sum(token_values * mask, axis=-1)


class ReferenceScorer(Protocol):
    """Function that returns the summed reference log-probs of padded responses."""

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
        is_sampled: np.ndarray | None = None,
    ) -> jax.Array:
        """Return the log-prob of each response, without waiting for the device.

        Shapes: tokens [b s], prompt_lengths [b], response_lengths [b c], is_sampled [b c t] with
        t = response_bucket; result [b c].
        """
        ...


class Scored(NamedTuple):
    """Dispatched calls of the reference, and the positions of their results.

    Attributes:
        calls: results, float32 [b c] each.
        places: for each group and response, (call, row, column) of each path of the response.
    """

    calls: list[jax.Array]
    places: list[list[list[tuple[int, int, int]]]]

    def sums(self) -> list[np.ndarray]:
        """Wait for the device; return log pi_ref of every response summed over its paths.

        Returns:
            An array [S] for each group.
        """
        values = [np.asarray(call) for call in self.calls]

        def total(paths: list[tuple[int, int, int]]) -> np.float32:
            return np.float32(sum(values[c][b, j] for c, b, j in paths))

        return [np.array([total(paths) for paths in places]) for places in self.places]


class _Bucket(NamedTuple):
    """Shape of a call to the reference.

    Attributes:
        prompt, response: padded lengths.
        is_single_turn: whether the policy sampled all tokens of the responses.
        width: responses per row.
    """

    prompt: int
    response: int
    is_single_turn: bool
    width: int


class _Path(NamedTuple):
    """Tokens of one path of an episode; `is_sampled` marks the policy's tokens, None: all."""

    tokens: np.ndarray
    is_sampled: np.ndarray | None

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Return a key: paths after the same prompt with the same key have equal log-probs."""
        return self.tokens.tobytes(), b"" if self.is_sampled is None else self.is_sampled.tobytes()


class _Row(NamedTuple):
    prompt: np.ndarray
    paths: Sequence[_Path]


def dispatch_reference(
    reference: ReferenceScorer,
    groups: Sequence[SampledGroup],
    num_responses: int,
    padding: Padding,
    *,
    shares_prompts: bool = False,
) -> Scored:
    """Score every distinct path of the responses, without waiting.

    Every call has room for `num_responses`, and its padded lengths are those that the response
    needs. So the bits of a log-prob do not depend on other prompts, nor (without shared prompts) on
    other responses.

    Args:
        num_responses: number of responses per call.
        shares_prompts: whether a row holds a prompt and several responses to it. A row has room
            for `num_responses` responses if there are more than three quarters of that number,
            else for a quarter of it.
    """
    rows: dict[_Bucket, list[_Row]] = {}
    paths = [[_paths(y) for y in group.episodes] for group in groups]
    found: list[dict[tuple[bytes, bytes], tuple[_Bucket, int, int]]] = []
    for group, of_episodes in zip(groups, paths, strict=True):
        prompt = group.prompt.tokens
        found.append({})
        distinct = {path.key: path for own in of_episodes for path in own}.values()
        for (s, t, is_single), own in _by_bucket(prompt, distinct, padding).items():
            width = _width(len(own), num_responses) if shares_prompts else 1
            bucket = _Bucket(s, t, is_single, width)
            same = rows.setdefault(bucket, [])
            for start in range(0, len(own), width):
                part = own[start : start + width]
                found[-1] |= {y.key: (bucket, len(same), j) for j, y in enumerate(part)}
                same.append(_Row(prompt, part))
    calls: list[jax.Array] = []
    first_call = {}
    for bucket, same in rows.items():
        first_call[bucket] = len(calls)
        num_rows = num_responses // bucket.width
        for start in range(0, len(same), num_rows):
            part = same[start : start + num_rows]
            calls.append(_dispatch(reference, part, bucket, num_rows, padding.pad_id))

    def place(i: int, key: tuple[bytes, bytes]) -> tuple[int, int, int]:
        bucket, row, j = found[i][key]
        num_rows = num_responses // bucket.width
        return first_call[bucket] + row // num_rows, row % num_rows, j

    return Scored(
        calls,
        [
            [[place(i, path.key) for path in own] for own in of_episodes]
            for i, of_episodes in enumerate(paths)
        ],
    )


def _paths(y: Episode) -> list[_Path]:
    return [
        _Path(y.tokens[part], None if y.is_sampled is None else y.is_sampled[part])
        for part in y.paths
    ]


def _by_bucket(
    prompt: np.ndarray, paths: Iterable[_Path], padding: Padding
) -> dict[tuple[int, int, bool], list[_Path]]:
    """Group the paths of a prompt by the padded lengths that they need."""
    found: dict[tuple[int, int, bool], list[_Path]] = {}
    for y in paths:
        lengths = padding.lengths(len(prompt), len(y.tokens))
        found.setdefault((*lengths, y.is_sampled is None), []).append(y)
    return found


def _width(num: int, most: int) -> int:
    """Return the number of responses per row, one of the compiled numbers, for `num` responses."""
    return most if 4 * num > 3 * most else max(1, most // 4)


def _dispatch(
    reference: ReferenceScorer,
    rows: Sequence[_Row],
    bucket: _Bucket,
    num_rows: int,
    pad_id: int,
) -> jax.Array:
    """Dispatch one call; missing rows repeat the first row, missing responses have no tokens."""
    s, t, is_single_turn, c = bucket
    rows = [*rows, *[rows[0]] * (num_rows - len(rows))]
    responses = np.full((num_rows, c, t), pad_id, np.int32)
    is_sampled = np.zeros(responses.shape, bool)
    lengths = np.zeros((num_rows, c), np.int32)
    for i, row in enumerate(rows):
        for j, y in enumerate(row.paths):
            lengths[i, j] = n = len(y.tokens)
            responses[i, j, :n] = y.tokens
            is_sampled[i, j, :n] = True if y.is_sampled is None else y.is_sampled
    padded = Padding((s,), (t,), pad_id).rows([row.prompt for row in rows], responses, lengths)
    return reference(*padded, None if is_single_turn else is_sampled)
