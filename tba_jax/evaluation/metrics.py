# SPDX-License-Identifier: Apache-2.0
"""Metric functions of evaluation that need another judge or the reference model.

The metrics are the win rate over reference responses by a gold reward, the perplexity under the
reference model, and the KL divergence between the next-token distributions of policy and reference.
Each metric has an `evaluator.Measure` of responses and an `evaluator.MetricFunction` of the
measurements. Invariant: at most `_LOGITS_BYTES` of logits per model exist at a time.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.evaluation.evaluator import Measure, Responses
from tba_jax.flow.padding import Padding, bucket_length, left_pad
from tba_jax.flow.trajectory import Prompt
from tba_jax.models import transformer
from tba_jax.models.logprobs import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import Params, TransformerConfig
from tba_jax.rewards.scores import RewardSource, responses_to

_LOGITS_BYTES = 2**28


class WinRate:
    """Scores of a gold reward for responses and for reference responses.

    A reference response is the column `answer` of a prompt; the judge scores it once.

    Args:
        gold: reward source that judges responses.
        tokenizer: tokenizer of the policy; reference responses get its end-of-sequence token.
    """

    def __init__(self, gold: RewardSource, tokenizer: Tokenizer) -> None:
        self._gold = gold
        self._tokenizer = tokenizer
        self._reference: dict[int, float] = {}  # score of the reference response by prompt ID

    def measure(self, params: Any, responses: Responses) -> dict[str, list[list[float]]]:
        """Return scores of responses and of reference responses."""
        missing = [p for p in responses.prompts if p.prompt_id not in self._reference]
        if missing:
            answers = [str(p.columns["answer"]) for p in missing]
            eos = np.array(self._tokenizer.eos_ids[:1], np.int32)
            ids = [np.concatenate([self._tokenizer.encode(a, add_bos=False), eos]) for a in answers]
            scores = self._score(missing, answers, ids, [True] * len(ids))
            for prompt, score in zip(missing, scores, strict=True):
                self._reference[prompt.prompt_id] = score
        tokens, lengths = responses.tokens, responses.lengths
        n = lengths.shape[1]
        scores = self._score(
            [p for p in responses.prompts for _ in range(n)],
            [text for row in responses.texts for text in row],
            [tokens[at][: lengths[at]] for at in np.ndindex(lengths.shape)],
            responses.has_eos.reshape(-1).tolist(),
        )
        return {
            "gold": [scores[i : i + n] for i in range(0, len(scores), n)],
            "gold_reference": [[self._reference[p.prompt_id]] for p in responses.prompts],
        }

    def _score(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        ids: Sequence[np.ndarray],
        has_eos: Sequence[bool],
    ) -> list[float]:
        """Return the gold reward of each response; nan if it fails."""
        scores = asyncio.run(self._gold.score(responses_to(prompts, texts, ids, has_eos)))
        return [float("nan") if x.reward is None else x.reward for x in scores]


def win_rate(responses: Responses) -> dict[str, float]:
    """Return the share of responses that the gold reward strictly prefers, and its mean.

    A response whose gold reward fails counts as a loss and is not part of the mean.

    References:
        TBA, arXiv:2503.18929, section 5.3: strict preference of the gold reward model.
    """
    scores = np.array(responses.measured["gold"])
    # A comparison with nan is False, so a response whose score failed does not win.
    wins = scores > np.array(responses.measured["gold_reference"])
    known = scores[np.isfinite(scores)]
    return {
        "win_rate": float(wins.mean()),
        "gold_reward_mean": float(known.mean()) if len(known) else float("nan"),
    }


class ReferenceDistance:
    """Distance of the policy from the reference model, on the policy's own responses.

    `reference_distance` returns these means over responses:

    - `perplexity`: exp(-(1/t) sum log pi_ref(y_t)) at temperature 1;
    - `perplexity_diluted`: the same with the prompt's tokens in the denominator, as in the
      official code, which makes the value smaller than the true perplexity;
    - `kl_to_reference`: sum over the response's positions of KL(pi || pi_ref) over the whole
      vocabulary, in nats per response. On responses sampled at the scoring temperature it is an
      unbiased estimate of the divergence of the policies. On greedy responses it describes only
      the positions of these responses;
    - `kl_from_reference`: the same for KL(pi_ref || pi), the direction of the official code.

    Args:
        reference_params: returns the reference weights, on the evaluating device; called once.
        scoring: its temperature divides the logits of both models in the divergences.

    References:
        TBA, arXiv:2503.18929, section 5.3 and its code (perplexity.py).
    """

    def __init__(
        self,
        config: TransformerConfig,
        reference_params: Callable[[], Params],
        *,
        scoring: Scoring,
        padding: Padding,
        site: Site = ANY_DEVICE,
    ) -> None:
        # Searchers on the same devices share the weights.
        self._reference_params, self._loading = functools.cache(reference_params), threading.Lock()
        self._padding = padding
        self._vocab_size = config.vocab_size
        self._program = site.locked(make_distance_program(config, scoring, site))

    def measure(self, params: Params, responses: Responses) -> dict[str, list[list[float]]]:
        """Return three values for each response.

        They are the negative log-likelihood under the reference, KL(pi || pi_ref) and
        KL(pi_ref || pi).
        """
        _, n, width = responses.tokens.shape
        prompts = [p.tokens for p in responses.prompts for _ in range(n)]
        lengths = responses.lengths.reshape(-1)
        prompt_lengths = np.array([len(x) for x in prompts], np.int32)
        s = bucket_length(int(prompt_lengths.max()), self._padding.prompt_buckets)
        t = bucket_length(int(lengths.max()), self._padding.response_buckets)
        padded = left_pad(prompts, s, self._padding.pad_id)
        tokens = np.concatenate([padded, responses.tokens.reshape(-1, width)[:, :t]], axis=1)
        with self._loading:
            reference = self._reference_params()
        num_rows = max(1, min(len(lengths), _LOGITS_BYTES // (4 * t * self._vocab_size)))
        found = []
        for start in range(0, len(lengths), num_rows):
            # Repeat the last rows, so that one shape is compiled.
            rows = np.minimum(np.arange(start, start + num_rows), len(lengths) - 1)
            arguments = (tokens[rows], prompt_lengths[rows], lengths[rows])
            values = np.asarray(self._program(params, reference, *arguments, t=t))
            found.append(values[:, : len(lengths) - start])
        shape = (3, *responses.lengths.shape)
        of_each: Any = np.concatenate(found, axis=1).astype(np.float64).reshape(shape).tolist()
        return dict(zip(("reference_nll", "kl", "reverse_kl"), of_each, strict=True))


def reference_distance(responses: Responses) -> dict[str, float]:
    """Return the four metrics of `ReferenceDistance`, as means over all responses."""
    names = ("reference_nll", "kl", "reverse_kl")
    nll, kl, reverse_kl = (np.array(responses.measured[name]).ravel() for name in names)
    n = responses.lengths.shape[1]
    lengths = responses.lengths.ravel()
    prompt_lengths = np.repeat([len(p.tokens) for p in responses.prompts], n)
    return {
        "perplexity": float(np.mean(np.exp(nll / lengths))),
        "perplexity_diluted": float(np.mean(np.exp(nll / (lengths + prompt_lengths)))),
        "kl_to_reference": float(kl.mean()),
        "kl_from_reference": float(reverse_kl.mean()),
    }


def make_distance_program(
    config: TransformerConfig, scoring: Scoring, site: Site = ANY_DEVICE
) -> Callable[..., Array]:
    """Return a jitted (params, reference, tokens [b s], prompt lengths, lengths, *, t) -> [3 b].

    The last t columns of `tokens` are the responses; t is static. The rows of the result are
    negative log-likelihood under the reference, KL, and reverse KL; float32.
    """
    compute_dtype = jnp.dtype(scoring.compute_dtype)
    options: Any = {"config": config, "compute_dtype": compute_dtype}
    sharding = ComputeSharding(config, site, gathers=False)

    def distances(
        params: Params,
        reference: Params,
        tokens: Array,
        prompt_lengths: Array,
        response_lengths: Array,
        *,
        t: int,
    ) -> Array:
        s = tokens.shape[1] - t
        index = jnp.arange(tokens.shape[1])[None]
        first = (s - prompt_lengths)[:, None]
        mask = (index >= first) & (index < s + response_lengths[:, None])
        rows = tokens, jnp.maximum(index - first, 0), mask

        def logits(weights: Params) -> Array:
            hidden = transformer.apply(weights, *rows, sharding=sharding, **options)
            # The state at position i predicts token i + 1.
            hidden = jax.lax.slice_in_dim(hidden, s - 1, s + t - 1, axis=1)
            return transformer.unembed(weights, hidden, **options).astype(jnp.float32)

        ours, theirs = logits(params), logits(reference)
        known = jnp.take_along_axis(jax.nn.log_softmax(theirs), tokens[:, s:, None], axis=-1)
        log_p, log_q = (jax.nn.log_softmax(x / scoring.temperature) for x in (ours, theirs))
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        reverse_kl = jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
        in_response = jnp.arange(t)[None] < response_lengths[:, None]
        values = (-known[..., 0], kl, reverse_kl)
        return jnp.stack([jnp.sum(x * in_response, axis=1) for x in values])

    return jax.jit(distances, static_argnames="t")


def make_measures(
    config: TransformerConfig,
    tokenizer: Tokenizer,
    sites: Sequence[Site],
    gold: RewardSource | None,
    reference: Callable[[Site], Params] | None,
    scoring: Scoring,
    padding: Padding,
) -> dict[Site, tuple[Measure, ...]]:
    """Return, for each site, functions that measure responses beyond rewards.

    Args:
        gold: judge of the win rate; None: it is not measured.
        reference: returns the reference weights on a site; None: no distance is measured.
    """
    of_gold: tuple[Measure, ...] = () if gold is None else (WinRate(gold, tokenizer).measure,)
    found: dict[Site, tuple[Measure, ...]] = dict.fromkeys(sites, of_gold)
    if reference is None:
        return found
    for site in found:
        params = functools.partial(reference, site)
        distance = ReferenceDistance(config, params, scoring=scoring, padding=padding, site=site)
        found[site] += (distance.measure,)
    return found
