# SPDX-License-Identifier: Apache-2.0
"""Win rate, perplexities and divergences against what their definitions say, row by row."""

import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config

from tba_jax.evaluation import metrics as evaluation_metrics
from tba_jax.evaluation.evaluator import Responses
from tba_jax.evaluation.metrics import ReferenceDistance, WinRate, reference_distance, win_rate
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Prompt
from tba_jax.models import transformer
from tba_jax.models.scoring import Scoring
from tba_jax.rewards.scores import Scores

VOCAB = 23
# Two float32 computations of sums over a few positions; other padding, other order of sums.
TOLERANCE = 1e-4


class FakeTokenizer:
    """One token per character; eos is 2."""

    eos_ids = (2,)

    def encode(self, text, add_bos):
        return np.array([3 + ord(c) % 20 for c in text], np.int32)


class Judge:
    """The gold reward: the number that the text is; fails on "?". Notes how often it was asked."""

    def __init__(self):
        self.asked = []

    async def score(self, completions):
        prompts, texts, columns, completion_ids, has_eos = completions
        assert [p.startswith("prompt") for p in prompts] == [True] * len(texts)
        assert len(columns["answer"]) == len(completion_ids) == len(has_eos) == len(prompts)
        self.asked.append((list(prompts), list(texts)))
        rewards = [None if text == "?" else float(text) for text in texts]
        return Scores(rewards, [None if r is not None else "odd" for r in rewards], "")


def responses(texts=(("1", "2"), ("3", "?")), lengths=((2, 3), (5, 1))):
    rng = np.random.default_rng(0)
    lengths = np.array(lengths, np.int32)
    tokens = rng.integers(3, VOCAB, (*lengths.shape, 6)).astype(np.int32)
    for at in np.ndindex(lengths.shape):
        tokens[at][lengths[at] :] = 0
    prompts = [
        Prompt(i, f"prompt {i}", rng.integers(3, VOCAB, size).astype(np.int32), {"answer": "2"})
        for i, size in enumerate((3, 4))
    ]
    rewards = [[0.0, 0.0]] * 2
    has_eos = np.ones(lengths.shape, bool)
    return Responses(prompts, tokens, lengths, has_eos, [list(row) for row in texts], rewards, {})


def distance_of(distance, params, given):
    """The means, of what is measured of each prompt by itself."""
    parts = [
        distance.measure(params, Responses(given.prompts[i : i + 1], *(x[i : i + 1] for x in
                         given[1:6]), {}))
        for i in range(len(given.prompts))
    ]  # fmt: skip
    measured = {name: [row for part in parts for row in part[name]] for name in parts[0]}
    return reference_distance(given._replace(measured=measured))


def test_win_rate_is_strict_and_references_are_scored_once():
    judge = Judge()
    judged = WinRate(judge, FakeTokenizer())
    # against 2: 1 loses, 2 is no strict win, 3 wins, and what cannot be judged loses
    given = [responses(), responses(texts=[["4", "5"], ["0", "9"]])]
    measured = [x._replace(measured=judged.measure(None, x)) for x in given]
    assert win_rate(measured[0]) == {"win_rate": 0.25, "gold_reward_mean": 2.0}
    assert win_rate(measured[1])["win_rate"] == 0.75
    assert [completions for _, completions in judge.asked] == [
        ["2", "2"],
        ["1", "2", "3", "?"],
        ["4", "5", "0", "9"],
    ]
    assert judge.asked[1][0] == ["prompt 0", "prompt 0", "prompt 1", "prompt 1"]


def distributions(config, params, row):
    """float64 [s v]: logits of one row without padding."""
    tokens = jnp.asarray(row)[None]
    positions = jnp.arange(len(row))[None]
    hidden = transformer.apply(
        params, tokens, positions, tokens >= 0, config=config, compute_dtype=jnp.float32
    )
    logits = transformer.unembed(params, hidden, config=config, compute_dtype=jnp.float32)
    return np.asarray(logits[0], np.float64)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("in_parts", [False, True])
def test_reference_distance_is_its_definition_row_by_row(in_parts, monkeypatch):
    config = tiny_config()
    policy, reference = random_params(config, 0), random_params(config, 1)
    temperature = 0.7
    if in_parts:  # one and a half calls, the second filled up with repeated rows
        monkeypatch.setattr(evaluation_metrics, "_LOGITS_BYTES", 3 * 4 * 6 * VOCAB)
    scoring, padding = Scoring(temperature=temperature), Padding((5,), (6,), 0)
    distance = ReferenceDistance(config, lambda: reference, scoring=scoring, padding=padding)
    given = responses()
    got = distance_of(distance, transformer.unstack_layers(policy, config), given)
    rows = {name: [] for name in got}
    for i, j in np.ndindex(given.lengths.shape):
        prompt = given.prompts[i].tokens
        n = given.lengths[i, j]
        response = given.tokens[i, j, :n]
        row = np.concatenate([prompt, response])
        ours, theirs = (
            distributions(config, p, row)[len(prompt) - 1 : -1] for p in (policy, reference)
        )
        nll = -log_softmax(theirs)[np.arange(n), response].sum()
        rows["perplexity"].append(np.exp(nll / n))
        rows["perplexity_diluted"].append(np.exp(nll / (n + len(prompt))))
        p, q = log_softmax(ours / temperature), log_softmax(theirs / temperature)
        rows["kl_to_reference"].append((np.exp(p) * (p - q)).sum())
        rows["kl_from_reference"].append((np.exp(q) * (q - p)).sum())
    assert got == pytest.approx({k: np.mean(v) for k, v in rows.items()}, rel=TOLERANCE)
    assert got["kl_to_reference"] > 0.1 and got["perplexity_diluted"] < got["perplexity"]
