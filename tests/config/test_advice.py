# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself while it runs."""

from tba_jax.config.advice import Advice, Times, about_waiting, notes
from tba_jax.config.command_line import override
from tba_jax.config.schema import Config, make_config

CONFIG = make_config({"search.max_new_tokens": 256, "num_searchers": 2, "replay.pace": "trainer"})


def said(shares):
    """All sentences of a run whose steps have these (cut, equal) shares."""
    advice, lines = Advice(), []
    for step, (cut, equal) in enumerate(shares, 1):
        values = {"search/cut_share": cut, "search/equal_rewards_share": equal}
        lines += advice.lines(CONFIG, step, values, Times(step, 0.9 * step, 0.0))
    return lines


def test_a_sentence_is_said_once_and_names_the_setting():
    (line,) = said([(0.3, 0.0)] * 10)
    assert line.startswith("30% of responses are cut by search.max_new_tokens=256. Set ")
    assert "--config.search.max_new_tokens=512" in line
    (line,) = said([(0.0, 0.9)] * 10)
    assert line.startswith("all responses have the same reward in 90% of the groups")
    assert said([(0.15, 0.7)] * 10) == [] and said([(0.9, 0.9)] * 2) == []


def test_the_slower_side_is_named_once():
    (line,) = said([(0.0, 0.0)] * 60)
    assert line.startswith("the trainer waits 90% of the time")
    line = about_waiting(CONFIG, Times(10.0, 5.0, 0.0))
    assert "trainer waits 50% of the time" in line and "--config.num_searchers=4" in line
    line = about_waiting(CONFIG, Times(10.0, 1.0, 6.0))
    assert "searchers wait 60% of the time" in line and "--config.model.remat" in line
    assert about_waiting(CONFIG, Times(10.0, 2.0, 2.0)) == ""


def test_miniatures_and_the_default_have_nothing_to_say():
    miniatures = [override(None, [f"--config={name}"]) for name in ("math", "tldr", "redteam")]
    assert not any(map(notes, [*miniatures, Config()]))


def test_a_shortened_run_says_what_it_does_not_reach():
    at, rate = (
        "the schedule at 1000",
        "optimizer.learning_rate=cosine(1e-5, 0, 600, warmup=50, hold=350)",
    )
    beta = "objective.beta=linear(0.014, 0.004, 500)"

    def noted(num_steps):
        return notes(override(None, ["--config=math:gsm8k", f"--config.num_steps={num_steps}"]))

    ends = "the run ends at step"
    assert noted(20) == [f"{beta}: {ends} 20, the schedule at 500", f"{rate}: {ends} 20, {at}"]
    assert noted(500) == [f"{rate}: {ends} 500, {at}"] and noted(1000) == []
