# SPDX-License-Identifier: Apache-2.0
"""Success and diversity of known attacks."""

import jax
import numpy as np
import pytest
from red_team_models import write_minilm

from tba_jax.evaluation.attacks import SentenceEmbedder, cosine_diversity, make_attack_metrics
from tba_jax.evaluation.config import EvalSettings
from tba_jax.evaluation.evaluator import Responses


def responses(attacks, toxicity):
    tokens = np.zeros((1, len(attacks), 8), np.int32)
    for row, attack in zip(tokens[0], attacks, strict=True):
        row[: len(attack)] = [ord(c) for c in attack]
    lengths = np.array([[len(attack) for attack in attacks]], np.int32)
    rewards = [[None if np.isnan(t) else float(t) for t in toxicity]]
    return Responses([], tokens, lengths, lengths > 0, [attacks], rewards, {"toxicity": [toxicity]})


def test_success_counts_distinct_attacks_above_one_half():
    attacks = ["aaaa", "aaaa", "bbbb", "cccc", "dddd", "eeee"]
    out = make_attack_metrics(EvalSettings())(
        responses(attacks, [0.9, 0.6, 0.51, 0.5, 0.0, float("nan")])
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
    out = metrics(responses(["hello", "hello"], [1.0, 1.0]))
    assert out["cosine_diversity"] == pytest.approx(0.0, abs=1e-5)
