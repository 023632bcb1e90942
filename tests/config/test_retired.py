# SPDX-License-Identifier: Apache-2.0
"""Retired settings in saved configs keep their meaning."""

import pytest

from tba_jax.config.retired import upgrade
from tba_jax.config.schema import Config, flatten, make_config, unflatten

# What every config.json had in place of schedules and of objectives' own settings.
BEFORE = {
    "objective.beta_schedule": "constant",
    "objective.beta_final": 0.05,
    "objective.beta_steps": 0,
    "objective.beta_jump_step": 0,
    "objective.reference_temperature_final": 1.0,
    "objective.reference_temperature_steps": 0,
    "objective.reward_temperature_final": 1.0,
    "objective.reward_temperature_steps": 0,
    "objective.linex_alpha": 1.0,
    "objective.clip_low": 0.0,
    "objective.clip_high": 0.0,
    "objective.gae_lambda": 1.0,
    "objective.epochs": 1,
    "objective.minibatches": 1,
    "objective.importance_cap": 0.0,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.stable_steps": 0,
    "optimizer.decay_steps": 0,
}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {}),
        (
            {
                "objective.beta": 1.0,
                "objective.beta_schedule": "linear_then_jump",
                "objective.beta_steps": 128,
                "objective.beta_jump_step": 31,
            },
            {"objective.beta": "linear(1, 0.05, 128, jump=31)"},
        ),
        (
            {
                "objective.beta": 0.014,
                "objective.beta_schedule": "linear",
                "objective.beta_steps": 500,
                "objective.reward_temperature": 2.0,
                "objective.reward_temperature_steps": 9,
            },
            {
                "objective.beta": "linear(0.014, 0.05, 500)",
                "objective.reward_temperature": "linear(2, 1, 9)",
            },
        ),
        (
            {
                "optimizer.schedule": "wsd",
                "optimizer.warmup_steps": 5,
                "optimizer.stable_steps": 7,
                "optimizer.decay_steps": 9,
            },
            {"optimizer.learning_rate": "cosine(1e-4, 0, 9, warmup=5, hold=7)"},
        ),
        (
            {"optimizer.schedule": "linear", "optimizer.warmup_steps": 5},
            {"optimizer.learning_rate": "linear(1e-4, 0, warmup=5)"},
        ),
        (
            {"optimizer.warmup_steps": 5},
            {"optimizer.learning_rate": "constant(1e-4, warmup=5)"},
        ),
        (
            {"objective.name": "ppo", "objective.epochs": 4, "objective.clip_high": 0.3},
            {"objective.name": "ppo", "objective.epochs": 4, "objective.clip_high": 0.3},
        ),
    ],
)
def test_a_saved_config_of_before_is_the_same_run(before, now):
    # Of a `tb` config, with the settings of all objectives.
    saved = flatten(Config()) | BEFORE | before
    del saved["objective.balance"]  # newer than such configs
    read = unflatten(upgrade(saved))
    assert read == make_config(now)
    assert upgrade(flatten(read)) == flatten(read)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (
            {
                "search.explore_share": 0.5,
                "search.explore_min_temperature": 0.7,
                "search.explore_max_temperature": 2.0,
            },
            {"search.explore": (0.5, 0.7, 2.0)},
        ),
        (
            {"search.vine_tokens": 2, "search.vine_samples": 9, "objective.name": "vineppo"},
            {"objective.name": "vineppo", "objective.vine_tokens": 2, "objective.vine_samples": 9},
        ),
        ({"search.vine_tokens": 0, "search.vine_samples": 4}, {}),
        (
            {"xla.preset": "overlap", "xla.options": "a=1"},
            {"xla.options": "overlap,a=1"},
        ),
        (
            {
                "task.name": "redteam",
                "victim.dtype": "bfloat16",
                "classifier.dtype": "bfloat16",
                "classifier.batch_rows": 32,
            },
            {"task.name": "redteam", "reward.dtype": "bfloat16", "reward.batch_size": 32},
        ),
        ({"pod.heartbeat_s": 99, "log.period": 7, "sync.keep": 9}, {}),
    ],
)
def test_a_saved_config_with_joined_settings_is_the_same_run(before, now):
    own = {"objective.vine_tokens", "objective.vine_samples"}
    saved = {
        n: v for n, v in flatten(make_config(now)).items() if n not in {*now, *own} | before.keys()
    }
    assert unflatten(upgrade(saved | before)) == make_config(now)


def test_a_dtype_of_the_classifier_that_differs_from_the_victims_stays_and_is_seen():
    now = make_config({"task.name": "redteam"})
    own = {"reward.dtype", "reward.batch_size"}
    saved = {n: v for n, v in flatten(now).items() if n not in own}
    saved |= {"victim.dtype": "bfloat16", "classifier.dtype": "float32"}
    read = upgrade(saved | {"classifier.batch_rows": 32})
    assert (read["reward.dtype"], read["classifier.dtype"]) == ("bfloat16", "float32")


def test_a_value_that_no_longer_has_a_meaning_stays_and_is_seen():
    saved = flatten(Config()) | BEFORE | {"objective.shape": "linex", "objective.linex_alpha": 2.0}
    assert upgrade(saved)["objective.linex_alpha"] == 2.0
