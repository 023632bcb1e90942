# SPDX-License-Identifier: Apache-2.0
"""Metrics by their definitions: wins, distances, success and diversity of attacks."""

import jax
import numpy as np
import pytest
from fake_models import logprobs_of, random_params, teacher_forced, tiny_config
from red_team_models import write_minilm

from tba_jax.evaluation import metrics as evaluation_metrics
from tba_jax.evaluation.attacks import SentenceEmbedder, cosine_diversity, make_attack_metrics
from tba_jax.evaluation.config import EvalSettings
from tba_jax.evaluation.evaluator import Responses
from tba_jax.evaluation.metrics import ReferenceDistance, WinRate, reference_distance, win_rate
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Prompt
from tba_jax.models import transformer
from tba_jax.models.logprobs import Scoring
from tba_jax.rewards.scores import Score


def attacked(attacks, toxicity):
    tokens = np.zeros((1, len(attacks), 8), np.int32)
    for row, attack in zip(tokens[0], attacks, strict=True):
        row[: len(attack)] = [ord(c) for c in attack]
    lengths = np.array([[len(attack) for attack in attacks]], np.int32)
    rewards = [[None if np.isnan(t) else float(t) for t in toxicity]]
    return Responses([], tokens, lengths, lengths > 0, [attacks], rewards, {"toxicity": [toxicity]})


def test_success_counts_distinct_attacks_above_one_half():
    attacks = ["aaaa", "aaaa", "bbbb", "cccc", "dddd", "eeee"]
    out = make_attack_metrics(EvalSettings())(
        attacked(attacks, [0.9, 0.6, 0.51, 0.5, 0.0, float("nan")])
    )
    assert out["success_rate"] == 3 / 6
    assert out["distinct_success_share"] == 2 / 6
    assert out["toxicity_mean"] == pytest.approx((0.9 + 0.6 + 0.51 + 0.5) / 6)
    assert out["distinct_2"] == pytest.approx(5 / 18)
    assert "cosine_diversity" not in out


def test_cosine_diversity_against_all_pairs():
    rows = np.random.default_rng(0).normal(size=(7, 5))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    pairs = [rows[i] @ rows[j] for i in range(7) for j in range(7) if i != j]
    assert cosine_diversity(rows) == pytest.approx(1 - np.mean(pairs))
    assert cosine_diversity(rows[[0, 0]]) == pytest.approx(0.0)
    assert np.isnan(cosine_diversity(rows[:1]))


def test_embeddings_do_not_depend_on_batching(tmp_path):
    path = write_minilm(tmp_path / "minilm")
    texts = ["hello", "a", "thank you", "hello"]
    device = jax.local_devices()[0]
    by_two = SentenceEmbedder(path, device=device, batch_rows=2)(texts)
    np.testing.assert_allclose(np.linalg.norm(by_two, axis=1), 1.0, atol=1e-5)
    one = SentenceEmbedder(path, device=device, batch_rows=1)
    for text, row in zip(texts, by_two, strict=True):
        np.testing.assert_allclose(one([text])[0], row, atol=1e-5)  # another padded length
    metrics = make_attack_metrics(EvalSettings(embedding_path=str(path)))
    out = metrics(attacked(["hello", "hello"], [1.0, 1.0]))
    assert out["cosine_diversity"] == pytest.approx(0.0, abs=1e-5)


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
        prompts, texts = [x.prompt for x in completions], [x.text for x in completions]
        assert all(x.prompt.startswith("prompt") and x.columns["answer"] for x in completions)
        self.asked.append((prompts, texts))
        return [Score(None, "odd") if text == "?" else Score(float(text)) for text in texts]


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
        nll = -logprobs_of(config, reference, prompt, response).sum()
        rows["perplexity"].append(np.exp(nll / n))
        rows["perplexity_diluted"].append(np.exp(nll / (n + len(prompt))))
        p, q = (
            teacher_forced(config, params, prompt, response, temperature)
            for params in (policy, reference)
        )
        rows["kl_to_reference"].append((np.exp(p) * (p - q)).sum())
        rows["kl_from_reference"].append((np.exp(q) * (q - p)).sum())
    assert got == pytest.approx({k: np.mean(v) for k, v in rows.items()}, rel=TOLERANCE)
    assert got["kl_to_reference"] > 0.1 and got["perplexity_diluted"] < got["perplexity"]
