# SPDX-License-Identifier: Apache-2.0
"""The prompt stream: ownership, passes over the data, exact resume, prompts that are too long."""

import json

import numpy as np
import pytest

from tba_jax.search.prompts import PromptStream, eval_prompts


class LetterTokenizer:
    """One id per character after a begin-of-sequence id."""

    def encode(self, text, add_bos):
        return np.array([1] * add_bos + [ord(c) for c in text], np.int32)


class SlowTokenizer(LetterTokenizer):
    """Must not be asked about texts of megabytes; its longest token has three letters."""

    longest_token = 3

    def encode(self, text, add_bos):
        assert len(text) < 10**6
        return super().encode(text, add_bos)


class CountingTask:
    """Problem i of n is the text "problem i"; those in `long` are longer than the others."""

    name = "counting"
    reward = "no:reward"
    response_kinds = ("any",)

    def __init__(self, size, long=()):
        self.size = size
        self.long = long

    def train_size(self):
        return self.size

    def eval_size(self):
        return self.size

    def train_problem(self, index):
        return f"problem {index}" + "!" * 50 * (index in self.long), {"answer": str(index)}

    def eval_problem(self, index):
        text, columns = self.train_problem(index)
        return f"held-out {text}", columns

    def response_kind(self, text):
        return "any"


def make_stream(
    task, searcher=0, num_searchers=1, ownership="by_prompt", seed=0, long_prompts="refuse"
):
    return PromptStream(
        task,
        LetterTokenizer(),
        searcher=searcher,
        num_searchers=num_searchers,
        ownership=ownership,
        seed=seed,
        max_prompt_tokens=40,
        long_prompts=long_prompts,
    )


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


def test_prompts_carry_text_tokens_and_columns():
    (prompt,) = make_stream(CountingTask(1)).take(1)
    assert (prompt.prompt_id, prompt.text) == (0, "problem 0")
    assert prompt.columns == {"answer": "0"}
    assert prompt.tokens.dtype == np.int32
    assert prompt.tokens.tolist() == [1, *map(ord, "problem 0")]


def test_owners_share_the_prompts_and_each_pass_is_a_new_shuffle():
    task, n = CountingTask(50), 3
    passes = []
    for searcher in range(n):
        owned = list(range(searcher, 50, n))
        stream = make_stream(task, searcher, n)
        first, second = ids(stream.take(len(owned))), ids(stream.take(len(owned)))
        assert sorted(first) == sorted(second) == owned
        assert first != second != owned != first
        passes += first
    assert sorted(passes) == list(range(50))


def test_any_gives_each_searcher_its_own_order_of_all_prompts():
    orders = [ids(make_stream(CountingTask(50), s, 3, "any").take(50)) for s in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(map(tuple, orders))) == 3


def test_order_depends_on_the_seed_alone():
    orders = [ids(make_stream(CountingTask(50), seed=seed).take(50)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("taken", [0, 1, 7, 49, 50, 51, 130])
def test_resume_continues_exactly(taken):
    task = CountingTask(50)
    stream = make_stream(task, seed=3)
    stream.take(taken)
    state = stream.state()
    text = json.dumps(state)
    coming = ids(stream.take(120))
    assert json.dumps(state) == text  # a snapshot, not a view
    resumed = make_stream(task, seed=3)
    resumed.take(5)
    resumed.restore(json.loads(text))
    assert resumed.state() == state
    assert ids(resumed.take(120)) == coming
    stream.restore(state)  # an unfinished round is redone on the same stream
    assert ids(stream.take(120)) == coming


def test_too_long_prompt_is_refused_with_its_row():
    message = (
        "train problem 6 of task counting has 60 tokens, more than task.max_prompt_tokens = 40; "
        "set --config.task.max_prompt_tokens to 60 or more, or leave such prompts out with "
        "--config.task.long_prompts=skip.*It begins: 'problem 6!!!"
    )
    with pytest.raises(ValueError, match=message):
        make_stream(CountingTask(8, long=[6])).take(8)
    with pytest.raises(ValueError, match="eval problem 6 of task counting has 69 tokens"):
        eval_prompts(CountingTask(8, long=[6]), LetterTokenizer(), 0, 40, "refuse")


def test_too_long_prompts_are_skipped_and_counted():
    task = CountingTask(8, long=[1, 6])
    stream = make_stream(task, long_prompts="skip")
    # Two prompts beyond three passes, so that a pass ends in the middle of a take.
    for _ in range(4):
        taken = ids(stream.take(5))
        assert not {1, 6} & set(taken)
    everything = make_stream(CountingTask(8))
    position = stream.state()["position"]["next_index"]
    drawn = ids(everything.take(position))
    assert stream.num_skipped == sum(i in task.long for i in drawn) == position - 20
    # The prompts that fit come in the order they would have without the long ones.
    again = make_stream(task, long_prompts="skip")
    assert ids(again.take(20)) == [i for i in drawn if i not in task.long]


@pytest.mark.parametrize("taken", [0, 1, 7, 30, 31, 32, 75])
def test_resume_with_skipped_prompts_continues_exactly(taken):
    task = CountingTask(50, long=range(0, 50, 3))
    stream = make_stream(task, seed=3, long_prompts="skip")
    stream.take(taken)
    state = json.loads(json.dumps(stream.state()))
    coming = ids(stream.take(80))
    resumed = make_stream(task, seed=3, long_prompts="skip")
    resumed.take(5)
    resumed.restore(state)
    assert resumed.state() == state
    assert ids(resumed.take(80)) == coming
    assert resumed.num_skipped == stream.num_skipped > state["num_skipped"]


def test_a_task_with_nothing_that_fits_is_an_error_and_one_with_little_is_not():
    # The last of one pass and the first of the next may both be long; only a whole pass counts.
    for seed in range(20):
        stream = make_stream(CountingTask(8, long=range(7)), seed=seed, long_prompts="skip")
        assert ids(stream.take(6)) == [7] * 6
    stream = make_stream(CountingTask(9, long=range(1, 9, 2)), 1, 2, long_prompts="skip")
    with pytest.raises(ValueError, match="all 4 train prompts of task counting have more than"):
        stream.take(1)
    with pytest.raises(ValueError, match="all 8 eval prompts of .*max_prompt_tokens = 40 tokens"):
        eval_prompts(CountingTask(8, long=range(8)), LetterTokenizer(), 3, 40, "skip")


def test_searcher_without_prompts_is_refused():
    with pytest.raises(ValueError, match="searcher 2 owns no prompt.*2 training problems"):
        make_stream(CountingTask(2), 2, 3)
    assert ids(make_stream(CountingTask(1), 2, 3, "any").take(3)) == [0, 0, 0]


def test_eval_prompts_are_the_first_of_the_split():
    task = CountingTask(8)
    prompts, num_skipped = eval_prompts(task, LetterTokenizer(), 3, 40, "refuse")
    assert (ids(prompts), num_skipped) == ([0, 1, 2], 0)
    assert [prompt.text for prompt in prompts] == [f"held-out problem {i}" for i in range(3)]
    for limit in (0, 8, 100):
        assert ids(eval_prompts(task, LetterTokenizer(), limit, 40, "refuse")[0]) == list(range(8))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(3, ([0, 2, 3], 1)), (0, ([0, 2, 3, 4, 6], 3)), (9, ([0, 2, 3, 4, 6], 3))],
)
def test_eval_prompts_that_are_too_long_are_skipped_and_counted(limit, expected):
    task = CountingTask(8, long=[1, 5, 7])
    prompts, num_skipped = eval_prompts(task, LetterTokenizer(), limit, 40, "skip")
    assert (ids(prompts), num_skipped) == expected


@pytest.mark.parametrize("long_prompts", ["refuse", "skip"])
def test_a_prompt_of_megabytes_is_too_long_without_being_tokenised(long_prompts):
    task = CountingTask(2)
    task.eval_problem = lambda index: ("x" * 20_000_000 if index else "y", {})
    if long_prompts == "skip":
        prompts, num_skipped = eval_prompts(task, SlowTokenizer(), 0, 30_000, "skip")
        assert (len(prompts), num_skipped) == (1, 1)
        return
    message = r"eval problem 1 of task counting has 20,000,000 characters, more than .* = 30000"
    with pytest.raises(ValueError, match=message):
        eval_prompts(task, SlowTokenizer(), 0, 30_000, "refuse")
