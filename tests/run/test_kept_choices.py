# SPDX-License-Identifier: Apache-2.0
"""A resumed run keeps its choices; device memory that runs out is one line."""

import json

import jax
import pytest

from tba_jax.config.schema import make_config
from tba_jax.planning import choices
from tba_jax.run.errors import OutOfMemory, tell
from tba_jax.run.session import train
from tba_jax.run.workdir import begun_config
from tba_jax.train import trainer as trainers

pytestmark = pytest.mark.slow  # several short runs

FIELDS = {
    "driver": "sync",
    "placement": "shared",
    "num_steps": 4,
    "task.num_eval_prompts": 8,
    "task.max_prompt_tokens": 12,
    "batch.num_prompts": 4,
    "objective.group_size": 4,
    "search.samples_per_prompt": 4,
    "search.prompts_per_round": 4,
    "search.max_new_tokens": 16,
    "replay.recency_prob": 1.0,
    "eval.period": 0,
    "checkpoint.period": 1,
    "reward.timeout_s": 300.0,  # on a busy machine a reward that is late would be another reward
}
MEMORY = 13.5e6
"""In which eight of sixteen rows fit at a time."""


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setattr(choices, "_memory_bytes", lambda devices: MEMORY)
    return choices.choose(make_config(FIELDS), {})


def losses(workdir):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def test_a_resumed_run_keeps_its_choices_and_is_bit_equal(config, tmp_path, monkeypatch):
    assert 0 < config.batch.micro_batch_rows < 16
    train(config, tmp_path / "whole")
    stops = iter([False] * 6)
    stopped = train(config, tmp_path / "cut", interrupted=lambda: next(stops, True))
    assert 0 < stopped.step < 4
    # The machine has other memory now.
    monkeypatch.setattr(choices, "_memory_bytes", lambda devices: 1e12)
    again = choices.choose(make_config(FIELDS), begun_config(tmp_path / "cut"))
    assert train(again, tmp_path / "cut").is_finished
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_memory_that_runs_out_before_the_first_update_is_one_line(
    config, tmp_path, monkeypatch, capsys
):
    def failing(self, *args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(trainers.Trainer, "step", failing)
    with pytest.raises(OutOfMemory) as caught:
        train(config, tmp_path)
    assert tell(caught.value) == 1
    assert "Lower --config.batch.micro_batch_rows or" in capsys.readouterr().err
