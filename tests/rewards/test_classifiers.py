# SPDX-License-Identifier: Apache-2.0
"""The three judges: what they say, and that a text's verdict does not depend on its neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import load_folder, logits_of, logprob_bound
from jax.sharding import Mesh
from red_team_models import write_gpt2, write_llama, write_minilm, write_roberta

from tba_jax.devices.site import Site
from tba_jax.models import encoder
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards import reward_models
from tba_jax.rewards.config import ClassifierSettings
from tba_jax.rewards.reward_models import make_classifier

SITE = Site(Mesh(jax.local_devices()[:1], ("model",)))
TEXTS = ["you fool", "a", "thank you, friend", "no", "hello"]


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setattr(reward_models, "ROWS", 2)


def classifier(path, target):
    return make_classifier(ClassifierSettings(path, target), SITE)


def test_a_pattern_is_certain_or_nearly_impossible():
    logprobs = classifier("", r"-\d+$")(["x"] * 3, ["=-4", "=4", ":3,-1,2"])
    np.testing.assert_allclose(np.exp(logprobs), [1.0, 0.01, 0.01])
    with pytest.raises(ValueError, match="is not a regular expression"):
        classifier("", "(")


def test_encoder_says_the_softmax_of_its_label_alone_or_among_others(tmp_path):
    path = write_roberta(tmp_path / "roberta")
    of_texts = classifier(path, "hate")
    got = of_texts([""] * 5, TEXTS)
    config, params = encoder.load(path)
    tokenizer, names = Tokenizer.load(path), ("config", "compute_dtype")
    classify = jax.jit(encoder.classify, static_argnames=names)
    for text, logprob in zip(TEXTS[:3:2], got[:3:2], strict=True):
        row = tokenizer.encode_complete(text)[None]
        how = {"config": config, "compute_dtype": jnp.float32}
        logits = classify(params, row, np.ones_like(row, bool), **how)
        bound = logprob_bound(config, row.size, np.abs(logits).max())
        wanted = jax.nn.log_softmax(logits)[0, 1]
        np.testing.assert_allclose(logprob, wanted, rtol=0, atol=bound)
    alone = [of_texts([""], [text])[0] for text in TEXTS]
    np.testing.assert_allclose(alone, got, rtol=0, atol=bound)
    assert np.ptp(got) > 0.01
    # A text that is too long is cut, not refused.
    assert of_texts([""], ["a" * 50])[0] < 0


def test_guard_scores_its_verdict_after_the_conversation(tmp_path):
    path = write_llama(tmp_path / "guard")
    prompts = ["one", "two words", "x", "y", "z"]
    of_texts = classifier(path, "unsafe")
    got = of_texts(prompts, TEXTS)
    config, params, _ = load_folder(path)
    tokenizer = Tokenizer.load(path)

    for prompt, text, logprob in zip(prompts[:2], TEXTS[:2], got[:2], strict=True):
        conversation = f"user: {prompt}\nassistant: {text}\nassistant:"
        before = tokenizer.encode(conversation, add_bos=False)
        row = np.concatenate([before, tokenizer.encode("unsafe", add_bos=False)])[None]
        logits = logits_of(config, params, row, np.ones_like(row, bool))
        logprobs = np.asarray(jax.nn.log_softmax(logits))[0]
        at = np.arange(len(before), row.shape[1])
        expected = logprobs[at - 1, row[0, at]].sum()
        # A sum over the tokens of the verdict.
        bound = len(at) * logprob_bound(config, row.size, np.abs(logits).max())
        np.testing.assert_allclose(logprob, expected, rtol=0, atol=bound)
    alone = [of_texts([prompt], [text])[0] for prompt, text in zip(prompts, TEXTS, strict=True)]
    np.testing.assert_allclose(alone, got, rtol=0, atol=bound)


def test_models_that_do_not_fit_are_refused_with_a_reason(tmp_path):
    for path, target, message in (
        (write_roberta(tmp_path / "a"), "toxic", "is not a label of .*nothate, hate, unsure"),
        (write_minilm(tmp_path / "b"), "hate", "no classification head"),
        (write_gpt2(tmp_path / "c"), "unsafe", "no chat template"),
        ("/no/such/model", "unsafe", "/no/such/model"),
    ):
        with pytest.raises(ValueError, match=message):
            classifier(path, target)
