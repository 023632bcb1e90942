# SPDX-License-Identifier: Apache-2.0
"""Responses that a run writes to samples.jsonl."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from fake_groups import make_trajectory

from tba_jax.flow.trajectory import Draw, Prompt
from tba_jax.report.jsonl import read_jsonl
from tba_jax.run.conduct import _statistics
from tba_jax.run.records import MOST_STEPS, Logs
from tba_jax.train.trainer import Shown


class Bytes:
    """A tokenizer of ASCII."""

    def token_texts(self, ids):
        return [chr(i) for i in ids]


def opened(folder, num_steps=6):
    display = SimpleNamespace(write=lambda step, values: None, close=lambda: None)
    return contextlib.closing(Logs(folder, True, display, Bytes(), num_steps))


def shown(num_tokens):
    tokens = np.full(num_tokens, ord("a"), np.int32)
    y = make_trajectory(5, tokens, reward=0.5, parts={"format": 1.0}, version=2)
    y = replace(y, behavior_token_logprobs=np.full(num_tokens, -1.5, np.float32))
    prompt = Prompt(5, "why", np.zeros(1, np.int32), {"answer": "b"})
    ones = np.ones((2, num_tokens + 3), np.float32)
    return Shown(Draw(prompt, (y,), True, (0,)), -ones, -3 * ones)


def test_responses_of_a_whole_run_are_written_with_their_ratios(tmp_path):
    with opened(tmp_path, 1000) as logs:
        for step in range(1, 1001):
            logs.add_step(step, shown(3))
        logs.add_step(1, None)  # of a process without a batch
    records = read_jsonl(tmp_path / "samples.jsonl")
    assert len(records) == MOST_STEPS and records[1]["step"] == 6
    record = records[1]
    assert record["staleness"] == 3 and record["behavior"] == [50, 50, 50]
    assert record["reference_sum"] == 6.0 and record["parts"] == {"format": 1.0}
    assert record["answer"] == "b" and record["tokens"] == ["a", "a", "a"]


def test_staleness_is_that_of_each_use_of_a_response():
    assert _statistics({}) == {}
    assert _statistics({0: 1, 3: 2}) == {"mean": 2.0, "p50": 3, "p95": 3, "max": 3}


def test_evaluations_are_written_at_even_distances_and_at_the_end(tmp_path):
    evaluation = SimpleNamespace(texts=("x", "y"), rewards=(1.0, None))
    prompts = [Prompt(i, f"p{i}", np.zeros(1, np.int32), {}) for i in range(2)]
    with opened(tmp_path, 2000) as logs:
        for step in (0, 3, 11, 19, 25, 1999, 2000):
            logs.add_evaluation(step, evaluation, prompts)
    records = read_jsonl(tmp_path / "samples.jsonl")
    assert [r["step"] for r in records[::2]] == [0, 11, 25, 1999, 2000]
    assert records[1]["tokens"] == ["y"] and records[1]["reward"] is None
