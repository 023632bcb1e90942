# SPDX-License-Identifier: Apache-2.0
"""What a run writes to samples.jsonl."""

import contextlib
import dataclasses

import numpy as np

from tba_jax.config.schema import Config
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.models.tokenizer import TokenTexts
from tba_jax.report.jsonl import JsonlWriter, read_jsonl
from tba_jax.run.records import MOST_STEPS, Samples
from tba_jax.train.trainer import Shown


class Bytes:
    """A tokenizer of UTF-8 bytes that drops the space before the first token."""

    def encode(self, text, add_bos):
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids, skip_special):
        return bytes(ids).decode(errors="replace").removeprefix(" ")


def test_token_texts_keep_spaces_and_put_characters_together():
    texts = TokenTexts(Bytes())
    ids = list(" é a→".encode())
    assert texts(ids) == [" ", "é", "", " ", "a", "→", "", ""]


def shown(num_tokens, policy=-1.0, reference=-3.0):
    y = Trajectory(
        prompt_id=5,
        response_tokens=np.full(num_tokens, ord("a"), np.int32),
        reward=0.5,
        reward_parts={"format": 1.0},
        behavior_token_logprobs=np.full(num_tokens, -1.5, np.float32),
        version_min=2,
        version_max=2,
        searcher=1,
        ticket=0,
        sampling_temperature=1.0,
        finish_reason="eos",
    )
    prompt = Prompt(5, "why", np.zeros(1, np.int32), {"answer": "b"})
    draw = Draw(prompt, (y,), True, (0,))
    shape = 2, num_tokens + 3
    return Shown(draw, np.full(shape, policy, np.float32), np.full(shape, reference, np.float32))


@contextlib.contextmanager
def samples(folder, num_steps):
    with contextlib.closing(JsonlWriter(folder / "samples.jsonl")) as log:
        yield Samples(log, Bytes(), dataclasses.replace(Config(), num_steps=num_steps))


def test_responses_of_a_whole_run_are_written_with_their_ratios(tmp_path):
    with samples(tmp_path, 1000) as writer:
        for step in range(1, 1001):
            writer.add_step(step, shown(3))
        writer.add_step(1, None)  # of a process without a batch
    records = read_jsonl(tmp_path / "samples.jsonl")
    assert len(records) == MOST_STEPS and records[1]["step"] == 6
    record = records[1]
    assert record["staleness"] == 3 and record["behavior"] == [50, 50, 50]
    assert record["reference_sum"] == 6.0 and record["parts"] == {"format": 1.0}
    assert record["answer"] == "b" and record["tokens"] == ["a", "a", "a"]


def test_evaluations_are_written_at_even_distances_and_at_the_end(tmp_path):
    class Evaluation:
        texts, rewards = ("x", "y"), (1.0, None)

    prompts = [Prompt(i, f"p{i}", np.zeros(1, np.int32), {}) for i in range(2)]
    with samples(tmp_path, 2000) as writer:
        for step in (0, 3, 11, 19, 25, 1999, 2000):
            writer.add_evaluation(step, Evaluation, prompts)
    records = read_jsonl(tmp_path / "samples.jsonl")
    assert [r["step"] for r in records[::2]] == [0, 11, 25, 1999, 2000]
    assert records[1]["tokens"] == ["y"] and records[1]["reward"] is None
