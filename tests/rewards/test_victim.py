# SPDX-License-Identifier: Apache-2.0
"""The victim answers attacks, and rewards are a function of the call alone."""

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from red_team_models import write_gpt2, write_llama

from tba_jax.devices.site import Site
from tba_jax.rewards.config import ATTACK, ClassifierSettings, VictimSettings
from tba_jax.rewards.reward_models import VictimReward
from tba_jax.rewards.scores import Completion

SITES = [Site(Mesh([device], ("model",))) for device in jax.local_devices()[:2]]
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
