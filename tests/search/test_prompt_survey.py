# SPDX-License-Identifier: Apache-2.0
"""All training prompts are looked through before a run begins."""

import numpy as np
import pytest

from tba_jax.search.prompt_survey import Survey, judge, survey


class Letters:
    """An id per character; it does not know capitals, and its longest token has three letters."""

    longest_token = 3

    def encode(self, text, add_bos):
        assert len(text) < 10**5, "texts of megabytes take minutes"
        return np.array([1] * add_bos + [ord(c) for c in text], np.int32)

    def knows(self, character):
        return not character.isupper()


class Texts:
    name = "texts"

    def __init__(self, *texts):
        self._texts = texts

    def train_size(self):
        return len(self._texts)

    def train_problem(self, index):
        return self._texts[index], {}


def test_what_is_too_long_or_unknown_is_counted():
    found = survey(Texts("ab", "aXbYX", "a" * 10, "b" * 12, "c" * 10**6), Letters(), 10)
    assert found == Survey(
        num_prompts=5,
        num_long=3,
        longest_tokens=13,
        first_long=2,
        longest=3,
        num_huge=1,
        unknown={"X": 2, "Y": 1},
    )
    assert judge(found, "texts", 10, "skip") == [
        "3 of 5 training prompts of task texts have more tokens than task.max_prompt_tokens = 10 "
        "and are left out",
        "the tokenizer does not know 2 of the characters in training prompts, and loses them: "
        "'X' (2 times), 'Y' (1 times)",
    ]
    with pytest.raises(ValueError, match="The first is train problem 2; 1 of them are too lon"):
        judge(found, "texts", 10, "refuse")


def test_the_limit_that_would_do_is_named():
    found = survey(Texts("a" * 9, "a" * 10, "a" * 14), Letters(), 10)
    with pytest.raises(ValueError, match=r"2 of 3 .* the longest has 15 .*max_prompt_tokens to 15"):
        judge(found, "texts", 10, "refuse")
    found = survey(Texts("a" * 9, "a" * 10, "a" * 14), Letters(), 15)
    assert judge(found, "texts", 15, "refuse") == []
