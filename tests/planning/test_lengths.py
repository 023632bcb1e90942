# SPDX-License-Identifier: Apache-2.0
"""Lengths that a config leaves to the data and the model."""

import json

import pytest

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.planning.lengths import with_lengths


def custom(tmp_path, num_rows, words, *overrides):
    path = tmp_path / "train.jsonl"
    rows = [{"prompt": f"{i} " + "12 + 3 " * words} for i in range(num_rows)]
    path.write_text("\n".join(map(json.dumps, rows)))
    given = (f"task.data_path={path}", "task.reward=math:floor", *overrides)
    config = override(None, ["--config=custom", *(f"--config.{text}" for text in given)])
    validate(config)
    return config


@pytest.mark.parametrize("words", [2, 2000])
def test_lengths_fit_the_data_and_the_context(tmp_path, words):
    config, reason = with_lengths(custom(tmp_path, 40, words))
    prompt, response = config.task.max_prompt_tokens, config.search.max_new_tokens
    assert prompt > 0 and prompt % 32 == 0 and response > 0
    if words == 2:
        assert prompt == 32  # the longest of the data, rounded up
    assert config.task.num_eval_prompts == 8  # a fifth of 40 rows
    assert reason.startswith("prompts of up to ") and "a context of " in reason
    validate(config)


def test_a_given_length_stays(tmp_path):
    config = custom(tmp_path, 40, 2, "task.max_prompt_tokens=64")
    assert with_lengths(config) == (config, "")
