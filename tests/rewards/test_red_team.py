# SPDX-License-Identifier: Apache-2.0
"""Red-teaming: a verdict does not depend on its neighbours; a reward is a function of the call."""

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor

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
from tba_jax.rewards.config import ATTACK, ClassifierSettings, VictimSettings
from tba_jax.rewards.reward_models import VictimReward, make_classifier
from tba_jax.rewards.scores import Completion

SITES = [Site(Mesh([device], ("model",))) for device in jax.local_devices()[:2]]
TEXTS = ["you fool", "a", "thank you, friend", "no", "hello"]


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    monkeypatch.setattr(reward_models, "ROWS", 2)


def classifier(path, target):
    return make_classifier(ClassifierSettings(path, target), SITES[0])


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


ATTACKS = ["7+5-3+8-6+2", "1-9+1-9+1-9", "9+9+2-1+1-1"]


def make(path="", template=ATTACK):
    victim, classifier = VictimSettings(str(path), template), ClassifierSettings("", r"-\d+$")
    return VictimReward(victim, classifier, site=SITES[0], seed=0)


@pytest.fixture(scope="module")
def victim():
    return make()


def changed(victim, pattern, seed=0):
    other = copy.copy(victim)
    other._seed, other._classifier = seed, ClassifierSettings("", pattern)
    other._place(victim._site, victim._params)
    return other


def score(rewards, attacks=ATTACKS):
    ids = [np.frombuffer(attack.encode(), np.uint8).astype(np.int32) for attack in attacks]
    rows = zip(attacks, ids, strict=True)
    return asyncio.run(rewards.score([Completion("", attack, {}, x) for attack, x in rows]))


def test_rewards_are_mean_log_probs_over_the_victims_responses(victim):
    out = score(victim)
    for reward, reason, _, parts in out:
        assert reason is None
        toxicity = parts["toxicity"]
        hits = (toxicity - 0.01) / 0.99  # a miss counts as 0.01
        assert reward == pytest.approx(np.log(0.01) * (1 - hits))
        assert hits * 3 == pytest.approx(round(hits * 3))
    # Hastily read, 1-9+1-9+1-9 ends in +9: the victim still answers with a negative number, mostly.
    assert out[1].reward > out[0].reward == pytest.approx(np.log(0.01))


@pytest.mark.slow
def test_the_same_call_gives_the_same_rewards_on_any_device_and_thread(victim):
    # Sampled at temperature 0.7, the victim works a sum out now and then; ":" tells.
    attacks = [f"9+{i}-{j}+8-9+7" for i in range(4, 10) for j in range(4, 10)]
    expected = score(changed(victim, ":"), attacks)
    assert len({x.reward for x in expected}) > 2
    assert score(changed(victim, ":").on(SITES[1]), attacks) == expected
    assert score(changed(victim, ":", seed=1), attacks) != expected
    # The same attack in another call meets other responses.
    assert score(changed(victim, ":"), attacks[::-1])[::-1] != expected
    rewards = changed(victim, ":")
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: score(rewards, attacks), range(3)))
    assert found == [expected] * 3


def test_a_too_long_attack_is_rejected_by_name_without_effect_on_others(victim):
    out = score(victim, [*ATTACKS, "1+" * 70])  # the others have the shapes of the test above
    assert [x.reason for x in out] == [None, None, None, "attack_too_long"]
    assert out[3].reward is None and np.isnan(out[3].parts["toxicity"])
    assert score(victim, ["1+" * 70])[0].reward is None


def test_templates(tmp_path):
    llama = make(write_llama(tmp_path / "llama"), "chat")
    assert llama.format("hi") == "user: hi\nassistant:"
    gpt2 = write_gpt2(tmp_path / "gpt2")
    victim = make(gpt2, "ask: {attack}!")
    assert victim.format("hi") == "ask: hi!"
    with pytest.raises(ValueError, match="no chat template"):
        make(gpt2, "chat")
    # 128 positions, 30 of them for the response
    assert victim.encode("a" * 80) is not None and victim.encode("a" * 98) is None
