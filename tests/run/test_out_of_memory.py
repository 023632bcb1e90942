# SPDX-License-Identifier: Apache-2.0
"""Choices that exceed the device memory are made smaller once; a resumed run keeps its choices."""

import json
import pickle
import sys
import textwrap

import commands
import fake_store
import jax
import pytest

from tba_jax.commands.launch_processes import launch
from tba_jax.config.schema import make_config
from tba_jax.planning import choices
from tba_jax.run import ray_cluster
from tba_jax.run.errors import OutOfMemory, tell
from tba_jax.run.session import train
from tba_jax.run.workdir import Outcome, begun_config
from tba_jax.storage import sealed
from tba_jax.storage.bucket import Bucket
from tba_jax.train import trainer as trainers

pytestmark = pytest.mark.slow  # fifteen short runs

FIELDS = {
    "driver": "sync",
    "placement": "shared",
    "num_steps": 4,
    "task.num_eval_prompts": 8,
    "task.max_prompt_tokens": 12,
    "batch.num_prompts": 4,
    "batch.num_length_buckets": 1,
    "objective.group_size": 4,
    "search.samples_per_prompt": 4,
    "search.prompts_per_round": 4,
    "search.max_new_tokens": 16,
    "replay.recency_prob": 1.0,
    "eval.period": 0,
    "eval.max_new_tokens": 16,
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


def exhausted(calls, most):
    """A trainer's step that fails as a device without memory does, for the first calls."""
    step = trainers.Trainer.step

    def failing(self, *args):
        calls.append(self.step_index)
        if len(calls) <= most:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        return step(self, *args)

    return failing


@pytest.mark.parametrize("is_in_bucket", [False, True])
def test_choices_are_lowered_once(is_in_bucket, config, tmp_path, monkeypatch, capsys):
    calls, workdir = [], str(tmp_path)
    if is_in_bucket:
        workdir = "s3://bucket/runs/a"
        monkeypatch.setenv("FAKE_STORE", str(tmp_path / "store"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        known = sys.modules["fsspec.registry"]
        monkeypatch.setitem(known._registry, "s3", fake_store.ObjectStore)
    monkeypatch.setattr(trainers.Trainer, "step", exhausted(calls, 1))
    outcome = train(config, workdir, lower=choices.lowered)
    assert outcome.is_finished and calls[:2] == [0, 0]
    rows = config.batch.micro_batch_rows
    if is_in_bucket:
        (tmp_path / "config.json").write_bytes(Bucket(workdir).read("config.json"))
    saved = sealed.read(tmp_path / "config.json")
    assert saved["config"]["batch.micro_batch_rows"] == rows // 2
    assert "made smaller" in saved["chosen"]["batch.micro_batch_rows"]
    said = " ".join(capsys.readouterr().out.split())
    assert f"batch.micro_batch_rows={rows // 2} (was {rows})" in said


def test_a_fleet_begins_again_with_smaller_choices(tmp_path, monkeypatch):
    """Its driver receives the trainer's error from Ray, which pickles it."""
    given, tried = make_config(FIELDS | {"placement": "fleet"}), []

    def train_fleet(config, workdir, hold, **options):
        hold.check()
        tried.append(config.batch.micro_batch_rows)
        if len(tried) == 1:
            raise pickle.loads(pickle.dumps(OutOfMemory("RESOURCE_EXHAUSTED: nine bytes")))
        return Outcome(4, is_finished=True, was_finished=False, report={})

    monkeypatch.setattr(ray_cluster, "train_fleet", train_fleet)
    assert train(given, tmp_path, lower=choices.lowered).is_finished
    assert tried == [0, 8]


def test_a_pod_records_smaller_choices_for_its_next_start(cache, tmp_path, capfd):
    """A process of a pod that fails ends the others, which may wait for it in a collective."""
    program = tmp_path / "main.py"
    program.write_text(
        textwrap.dedent("""
        import sys
        import jax
        from tba_jax.commands.train import cli
        from tba_jax.train.trainer import Trainer

        step = Trainer.step

        def failing(self, *args):
            if "--fails" in sys.argv:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: nine bytes")
            return step(self, *args)

        if __name__ == "__main__":
            Trainer.step = failing
            sys.exit(cli([word for word in sys.argv if word != "--fails"]))
        """)
    )

    def run(*flags):
        more = ("batch.micro_batch_rows=0", "num_steps=2", "eval.period=0", "driver=sync")
        arguments = [*commands.arguments(tmp_path / "run", *more), *flags]
        code = launch(2, arguments, command=(sys.executable, str(program)))
        return code, *capfd.readouterr()

    code, _, err = run("--fails")
    assert code == 1
    assert "Run the same command again: it uses batch.micro_batch_rows=32 (was 0)" in err, err
    code, _, err = run()
    assert code == 0, err
    saved = sealed.read(tmp_path / "run" / "config.json")["config"]
    assert saved["batch.micro_batch_rows"] == 32


def test_the_error_is_one_line_with_the_settings(capsys):
    assert tell(OutOfMemory("RESOURCE_EXHAUSTED: nine bytes")) == 1
    assert "Lower --config.batch.micro_batch_rows or" in capsys.readouterr().err


@pytest.mark.parametrize("cause", ["again", "given", "later"])
def test_else_the_run_ends(cause, config, tmp_path, monkeypatch):
    """Memory runs out a second time, or nothing was chosen, or some steps were made."""
    calls = []
    if cause == "given":
        config = make_config(FIELDS | {"batch.micro_batch_rows": 8, "search.num_slots": 16})
    if cause == "later":
        step = trainers.Trainer.step

        def failing(self, *args):
            calls.append(0)
            if self.step_index == 2:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            return step(self, *args)

        monkeypatch.setattr(trainers.Trainer, "step", failing)
    else:
        monkeypatch.setattr(trainers.Trainer, "step", exhausted(calls, 9))
    kind = jax.errors.JaxRuntimeError if cause == "later" else OutOfMemory
    with pytest.raises(kind, match="RESOURCE_EXHAUSTED"):
        train(config, tmp_path, lower=choices.lowered)
    assert len(calls) == {"again": 2, "given": 1, "later": 3}[cause]
