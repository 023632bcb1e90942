# SPDX-License-Identifier: Apache-2.0
"""What a run says about itself while it runs."""

import pytest

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


@pytest.mark.parametrize(
    ("fields", "share", "expected"),
    [
        ({}, 0.7, "70% of the tokens in the train step are padding. Begin a run with "),
        ({"batch.packed_length": 1024}, 0.7, ""),
    ],
)
def test_rows_that_are_mostly_padding_should_be_packed(fields, share, expected):
    config = make_config({"search.max_new_tokens": 256, "task.max_prompt_tokens": 100, **fields})
    advice, lines = Advice(), []
    for step in range(1, 6):
        lines += advice.lines(config, step, {"train/padding_share": share}, Times(step, 0.0, 0.0))
    assert [line[: len(expected)] for line in lines] == [expected][: bool(expected)]
    assert not expected or "--config.batch.packed_length=768" in lines[0]


def test_waiting_is_measured_once():
    (line,) = said([(0.0, 0.0)] * 60)
    assert line.startswith("the trainer waits 90% of the time")


@pytest.mark.parametrize(
    ("trainer_s", "searchers_s", "expected"),
    [
        (
            5.0,
            0.0,
            "trainer waits 50% of the time: searching is slower. Set --config.num_searchers=4",
        ),
        (1.0, 6.0, "searchers wait 60% of the time: training is slower. Set --config.model.remat"),
        (2.0, 2.0, ""),
    ],
)
def test_the_slower_side_is_named(trainer_s, searchers_s, expected):
    line = about_waiting(CONFIG, Times(10.0, trainer_s, searchers_s))
    assert expected in line and bool(line) == bool(expected)
