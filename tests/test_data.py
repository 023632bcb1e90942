# SPDX-License-Identifier: Apache-2.0
"""The prompt stream: ownership, passes over the data, exact resume, refusal of long prompts."""

import json

import numpy as np
import pytest

from tba_jax.data import PromptStream, eval_prompts


class LetterTokenizer:
    """One id per character after a begin-of-sequence id."""

    def encode(self, text, add_bos):
        return np.array([1] * add_bos + [ord(c) for c in text], np.int32)


class CountingTask:
    """Problem i of n is the text "problem i"; problem `long` is longer than the others."""

    name = "counting"
    reward = "no:reward"
    response_kinds = ("any",)

    def __init__(self, size, long=-1):
        self.size = size
        self.long = long

    def train_size(self):
        return self.size

    def eval_size(self):
        return self.size

    def train_problem(self, index):
        return f"problem {index}" + "!" * 50 * (index == self.long), {"answer": str(index)}

    def eval_problem(self, index):
        text, columns = self.train_problem(index)
        return f"held-out {text}", columns

    def response_kind(self, text):
        return "any"


def make_stream(task, searcher=0, num_searchers=1, ownership="by_prompt", seed=0):
    return PromptStream(
        task,
        LetterTokenizer(),
        searcher=searcher,
        num_searchers=num_searchers,
        ownership=ownership,
        seed=seed,
        max_prompt_tokens=40,
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
    resumed.set_state(json.loads(text))
    assert resumed.state() == state
    assert ids(resumed.take(120)) == coming
    stream.set_state(state)  # an unfinished round is redone on the same stream
    assert ids(stream.take(120)) == coming


def test_too_long_prompt_is_refused_with_its_row():
    message = (
        "train problem 6 of task counting has 60 tokens, more than task.max_prompt_tokens = 40; "
        ".*It begins: 'problem 6!!!"
    )
    with pytest.raises(ValueError, match=message):
        make_stream(CountingTask(8, long=6)).take(8)
    with pytest.raises(ValueError, match="eval problem 6 of task counting has 69 tokens"):
        eval_prompts(CountingTask(8, long=6), LetterTokenizer(), 0, 40)


def test_searcher_without_prompts_is_refused():
    with pytest.raises(ValueError, match="searcher 2 owns no prompt.*2 training problems"):
        make_stream(CountingTask(2), 2, 3)
    assert ids(make_stream(CountingTask(1), 2, 3, "any").take(3)) == [0, 0, 0]


def test_eval_prompts_are_the_first_of_the_split():
    task = CountingTask(8)
    prompts = eval_prompts(task, LetterTokenizer(), 3, 40)
    assert ids(prompts) == [0, 1, 2]
    assert [prompt.text for prompt in prompts] == [f"held-out problem {i}" for i in range(3)]
    assert ids(eval_prompts(task, LetterTokenizer(), 0, 40)) == list(range(8))
    assert ids(eval_prompts(task, LetterTokenizer(), 100, 40)) == list(range(8))
