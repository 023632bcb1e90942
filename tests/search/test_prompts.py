# SPDX-License-Identifier: Apache-2.0
"""Prompts of tickets and start data: order, limits and bad rows."""

import json

import numpy as np
import pytest

from tba_jax.models.tokenizer import Tokenizer
from tba_jax.run.model_parts import START_MODEL
from tba_jax.search.config import SearchSettings
from tba_jax.search.prompts import PromptReader, Prompts
from tba_jax.search.start_data import load_start_tickets
from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.config import TaskSettings
from tba_jax.tasks.task import Task


class LetterTokenizer:
    """One id per character after a begin-of-sequence id; it does not know capitals."""

    longest_token = 3

    def encode(self, text, add_bos):
        assert len(text) < 10**6  # texts of megabytes would take minutes
        return np.array([1] * add_bos + [ord(c) for c in text], np.int32)

    def knows(self, character):
        return not character.isupper()


class CountingTask(Task):
    """Problem i of n is the text "problem i"; those in `long` are longer than the others."""

    name = "counting"
    reward = "no:reward"
    response_kinds = ("any",)

    def __init__(self, num, long=()):
        self.num = num
        self.long = long

    def size(self, split):
        return self.num

    def problem(self, split, index):
        text = f"problem {index}" + "!" * 50 * (index in self.long)
        return text if split == "train" else f"held-out {text}", {"answer": str(index)}


def make_reader(task, limit=40):
    return PromptReader(task, LetterTokenizer(), limit)


def ids_of(task, numbers, seed=0):
    """Prompt ids of the tickets that follow these numbers."""
    prompts = Prompts(make_reader(task), seed)
    return [prompts.from_number(number)[1].prompt_id for number in numbers]


def test_prompts_carry_text_tokens_and_columns():
    number, prompt = Prompts(make_reader(CountingTask(1)), 0).from_number(3)
    assert (number, prompt.prompt_id, prompt.text) == (3, 0, "problem 0")
    assert prompt.columns == {"answer": "0"}
    assert prompt.tokens.dtype == np.int32
    assert prompt.tokens.tolist() == [1, *map(ord, "problem 0")]


def test_each_pass_is_a_new_shuffle_that_the_seed_and_the_number_determine():
    task = CountingTask(50)
    first, second = ids_of(task, range(50)), ids_of(task, range(50, 100))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50)) != first
    order = np.random.default_rng(0).permutation(100).tolist()
    assert ids_of(task, order) == [(first + second)[number] for number in order]
    assert ids_of(task, range(50), seed=1) != first


def test_too_long_prompts_are_left_out_in_the_order_of_the_others():
    task = CountingTask(8, long=[1, 6])
    everything = ids_of(CountingTask(8), range(24))
    prompts, number, found = Prompts(make_reader(task), 0), 0, []
    while number < 24:
        number, prompt = prompts.from_number(number)
        found.append((number, prompt.prompt_id))
        number += 1
    assert [i for _, i in found if _ < 24] == [i for i in everything if i not in task.long]
    assert all(everything[n] == i for n, i in found if n < 24)


def test_a_task_with_nothing_that_fits_is_an_error_and_one_with_little_is_not():
    # The last of one pass and the first of the next may both be long; only a whole pass counts.
    task = CountingTask(8, long=range(7))
    for seed in range(4):
        assert ids_of(task, range(20), seed=seed) == [7] * 20
    reader = make_reader(CountingTask(4, long=range(4)))
    for read in (Prompts(reader, 0).from_number, lambda _: reader.check_all()):
        with pytest.raises(ValueError, match="all 4 train prompts of task counting have more than"):
            read(0)
    with pytest.raises(ValueError, match="all 4 eval prompts of .*max_prompt_tokens = 40 tokens"):
        reader.held_out(3)


def test_prompts_that_are_left_out_or_lose_characters_are_named_before_the_run():
    task = CountingTask(5, long=[1, 3])
    texts = ["ok", "ok" + "!" * 50, "XbYX", "ok" + "!" * 50, "ok"]
    task.problem = lambda split, index: (texts[index], {})
    assert make_reader(task).check_all() == [
        "2 of 5 training prompts of task counting have more tokens than task.max_prompt_tokens = "
        "40 and are left out",
        "the tokenizer does not know 2 of the characters in training prompts, and loses them: "
        "'X' (2 times), 'Y' (1 times)",
    ]
    assert make_reader(CountingTask(5)).check_all() == []


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(3, ([0, 2, 3], 1)), (0, ([0, 2, 3, 4, 6], 3)), (9, ([0, 2, 3, 4, 6], 3))],
)
def test_held_out_prompts_are_the_first_that_fit(limit, expected):
    prompts, num_skipped = make_reader(CountingTask(8, long=[1, 5, 7])).held_out(limit)
    assert ([prompt.prompt_id for prompt in prompts], num_skipped) == expected
    assert prompts[1].text == "held-out problem 2"


def test_a_prompt_of_megabytes_is_too_long_without_being_tokenised():
    task = CountingTask(2)
    task.problem = lambda split, index: ("x" * 20_000_000 if index else "y", {})
    prompts, num_skipped = make_reader(task, 30_000).held_out(0)
    assert (len(prompts), num_skipped) == (1, 1)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(str(START_MODEL))


def write(tmp_path, *rows):
    path = tmp_path / "start.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_prompt_with_a_token_that_the_model_lacks_is_named_with_its_line(tmp_path):
    path = write(tmp_path, *({"prompt": text} for text in ("1", "2", "2+9")))
    tokenizer = Tokenizer.load(str(START_MODEL))
    tokenizer._num_rows = int(tokenizer.encode("9", add_bos=False)[0])
    reader = PromptReader(TaskSettings("custom", path, num_eval_prompts=1).open(), tokenizer, 40)
    with pytest.raises(ValueError, match=r"start.jsonl, line 3: .* token '9' has id"):
        reader.check_all()


def load(path, tokenizer, **changes):
    most = changes.pop("max_prompt_tokens", 12)
    reader = PromptReader(Arithmetic(), tokenizer, most)
    limits = {"min_new_tokens": 0, "max_new_tokens": 6, "samples_per_prompt": 2, **changes}
    return load_start_tickets(path, reader, tokenizer, SearchSettings(**limits))


def test_rows_become_groups_of_at_most_s_responses_that_end(tmp_path, tokenizer):
    rows = [(7, "1"), (3, "22"), (7, "3"), (7, "4"), (3, "22222")]
    path = write(tmp_path, *({"prompt_id": i, "response": text} for i, text in rows))
    groups = load(path, tokenizer)
    assert [(g.prompt.prompt_id, [tokenizer.decode(r) for r in g.responses]) for g in groups] == [
        (7, ["1", "3"]),
        (7, ["4"]),
        (3, ["22", "22222"]),
    ]
    assert [g.number for g in groups] == [0, 1, 2]
    assert all(r[-1] == tokenizer.eos_ids[0] for g in groups for r in g.responses)
    assert groups[0].prompt.text == Arithmetic().problem("train", 7)[0]
    assert groups[0].prompt.columns == Arithmetic().problem("train", 7)[1]


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"prompt_id": 0, "text": "1"}, {}, "want an object with text under 'response'"),
        ({"response": "1"}, {}, "prompt_id = None, want the index of a training problem"),
        ({"prompt_id": -1, "response": "1"}, {}, "prompt_id = -1, want the index"),
        ({"prompt_id": True, "response": "1"}, {}, "prompt_id = True, want the index"),
        ({"prompt_id": 0, "response": "1<eos>"}, {}, "contains an end-of-sequence token"),
        ({"prompt_id": 0, "response": "123456"}, {}, "6 tokens; wanted .* to 5 "),
        ({"prompt_id": 0, "response": "1"}, {"min_new_tokens": 2}, "1 tokens; .*min_new_tokens"),
        ({"prompt_id": 0, "response": "1"}, {"max_prompt_tokens": 1}, "max_prompt_tokens = 1"),
    ],
)
def test_a_bad_row_is_named(tmp_path, tokenizer, row, changes, message):
    path = write(tmp_path, {"prompt_id": 0, "response": "12"}, row)
    line = 1 if "max_prompt_tokens" in changes else 2
    with pytest.raises(ValueError, match=f"start.jsonl, line {line}: .*{message}"):
        load(path, tokenizer, **changes)
