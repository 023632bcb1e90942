# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself while it runs."""

from tba_jax.config.advice import Advice, Times, about_waiting
from tba_jax.config.schema import make_config

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


def test_rows_that_are_mostly_padding_should_be_packed():
    config = make_config({"search.max_new_tokens": 256, "task.max_prompt_tokens": 100})
    advice, lines = Advice(), []
    for step in range(1, 6):
        lines += advice.lines(config, step, {"train/padding_share": 0.7}, Times(step, 0.0, 0.0))
    (line,) = lines
    assert line.startswith("70% of the tokens in the train step are padding. Begin a run with ")
    assert "--config.batch.packed_length=768" in line


def test_waiting_is_measured_once():
    (line,) = said([(0.0, 0.0)] * 60)
    assert line.startswith("the trainer waits 90% of the time")


def test_the_slower_side_is_named():
    line = about_waiting(CONFIG, Times(10.0, 5.0, 0.0))
    assert "trainer waits 50% of the time" in line and "--config.num_searchers=4" in line
    line = about_waiting(CONFIG, Times(10.0, 1.0, 6.0))
    assert "searchers wait 60% of the time" in line and "--config.model.remat" in line
    assert about_waiting(CONFIG, Times(10.0, 2.0, 2.0)) == ""
