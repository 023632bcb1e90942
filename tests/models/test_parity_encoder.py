# SPDX-License-Identifier: Apache-2.0
"""The encoders beside transformers' own, live; needs torch (the extra `parity`)."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="parity with transformers needs torch (the extra parity)")

from tba_jax.models import encoder

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import make_golden_roberta as golden

# Relative to the largest value: the bound. Measured: 2e-7.
BOUND = 1e-4


@pytest.fixture(scope="module", params=["roberta", "bert"])
def models(request, tmp_path_factory):
    """(transformers' model, ours after its own save)."""
    theirs = golden.make(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, encoder.load(folder)


def ours(function, model, tokens, mask):
    config, params = model
    jitted = jax.jit(function, static_argnames=("config", "compute_dtype"))
    return jitted(params, tokens, mask, config=config, compute_dtype=jnp.float32)


def assert_close(got, want):
    assert np.abs(want).max() > 0.1
    assert np.abs(got - want).max() <= BOUND * np.abs(want).max()


def answer_of(theirs):
    if hasattr(theirs, "classifier"):
        return encoder.classify, "logits"
    return encoder.embed_sentences, "embeddings"


def test_right_padded_rows(models):
    theirs, model = models
    tokens, mask = golden.padded(theirs.config.pad_token_id)
    want = golden.answers(theirs, tokens, mask)
    function, key = answer_of(theirs)
    assert_close(ours(function, model, tokens, mask), want[key])
    assert_close(ours(encoder.encode, model, tokens, mask)[mask], want["hidden"][mask])


def test_left_padded_rows(models):
    """Ours equal transformers' answers for each row alone.

    For left-padded rows transformers' RoBERTa pools a padding token and its BERT numbers the
    padding; its hidden states of RoBERTa's valid tokens are right, and equal ours.
    """
    theirs, model = models
    tokens, mask = golden.padded(theirs.config.pad_token_id, "left")
    function, key = answer_of(theirs)
    got = ours(function, model, tokens, mask)
    for row, n in enumerate(golden.LENGTHS):
        alone = golden.answers(theirs, tokens[row : row + 1, -n:], mask[row : row + 1, -n:])
        assert_close(got[row : row + 1], alone[key])
    if key == "logits":
        hidden = golden.answers(theirs, tokens, mask)["hidden"]
        assert_close(ours(encoder.encode, model, tokens, mask)[mask], hidden[mask])
