# SPDX-License-Identifier: Apache-2.0
"""A run looks through its prompts once, and again only where something has changed."""

import types

import numpy as np
import pytest

from tba_jax.run.build import check_prompts

NAMES = {"data": "d", "tokenizer": "t"}


class Tokenizer:
    longest_token = 1

    def __init__(self):
        self.num_texts = 0

    def encode(self, text, add_bos):
        self.num_texts += 1
        return np.zeros(len(text), np.int32)

    def knows(self, character):
        return character != "?"


class Task:
    name = "custom"

    def train_size(self):
        return 3

    def train_problem(self, index):
        return "?" * (index + 1), {}


def shared(workdir, tokenizer, *, task="custom", is_primary=True, long_prompts="skip"):
    config = types.SimpleNamespace(
        name=task, chat=False, max_prompt_tokens=2, num_eval_prompts=4, long_prompts=long_prompts
    )
    return types.SimpleNamespace(
        config=types.SimpleNamespace(task=config),
        cluster=types.SimpleNamespace(is_primary=is_primary),
        workdir=workdir,
        task=Task(),
        tokenizer=tokenizer,
    )


def test_prompts_are_tokenized_once_for_each_data_and_tokenizer(tmp_path):
    tokenizer, said = Tokenizer(), []

    def check(names=NAMES, **changes):
        said.clear()
        before = tokenizer.num_texts
        check_prompts(shared(tmp_path, tokenizer, **changes), names, said.append, said.append)
        return tokenizer.num_texts - before

    told = [
        "1 of 3 training prompts of task custom have more tokens than task.max_prompt_tokens = 2 "
        "and are left out",
        "the tokenizer does not know 1 of the characters in training prompts, and loses them: "
        "'?' (6 times)",
    ]
    assert check(is_primary=False) == check(task="arithmetic") == 0 and said == []
    assert check() == 3 and said == ["checking 3 prompts", *told]
    assert check() == 0 and said == told
    with pytest.raises(ValueError, match="The first is train problem 2"):
        check(long_prompts="refuse")
    assert tokenizer.num_texts == 3
    assert check({**NAMES, "data": "other"}) == 3
    assert check({**NAMES, "data": "other", "tokenizer": "other"}) == 3
    (tmp_path / "prompts.json").write_bytes(b"\xff{")
    assert check() == 3 and check() == 0
