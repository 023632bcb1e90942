# SPDX-License-Identifier: Apache-2.0
"""A run says which settings it does not follow, or not to their end."""

import pytest

from tba_jax.config.advice import notes
from tba_jax.config.command_line import override
from tba_jax.config.presets import names
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config

AT = "the schedule at 1000"


@pytest.mark.parametrize("name", sorted({*names()} - {"custom:default"}))  # it needs data
def test_every_preset_runs_in_one_thread_by_that_flag_alone(name):
    config = override(None, [f"--config={name}", "--config.driver=sync"])
    validate(config)
    waits = config.replay.pace == "trainer"
    said = [note for note in notes(config) if "driver=sync" in note]
    assert [note.split(" ")[0] for note in said] == ["replay.pace=trainer"] * waits


def test_miniatures_and_the_default_have_nothing_to_say():
    for name in ("math", "tldr", "redteam"):
        assert notes(override(None, [f"--config={name}"])) == []
    assert notes(Config()) == []


def test_a_shortened_run_says_what_it_does_not_reach():
    rate = "optimizer.learning_rate=cosine(1e-5, 0, 600, warmup=50, hold=350)"
    beta = "objective.beta=linear(0.014, 0.004, 500)"

    def said(num_steps):
        return notes(override(None, ["--config=math:gsm8k", f"--config.num_steps={num_steps}"]))

    ends = "the run ends at step"
    assert said(20) == [f"{beta}: {ends} 20, the schedule at 500", f"{rate}: {ends} 20, {AT}"]
    assert said(500) == [f"{rate}: {ends} 500, {AT}"] and said(1000) == []
