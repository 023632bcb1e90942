# SPDX-License-Identifier: Apache-2.0
"""A bad option of a benchmark is one line."""

import importlib

import pytest

OPTIONS = [
    ("decode", "--peers=hf,vllm", "unknown peer 'vllm'"),
    ("decode", "--repeats=0", "--repeats=0; wanted at least 1"),
    ("decode", "--max_new_tokens=4", "--max_new_tokens=4; wanted at least 8"),
    (
        "decode",
        "--queued=64,x",
        "--queued=64,x: each queue length must be a positive multiple of 64",
    ),
    ("decode", "--model=no_such_folder", "no config.json"),
    ("logprob", "--tokens=0", "--tokens=0; wanted at least 1"),
    ("logprob", "--repeats=-1", "--repeats=-1; wanted at least 1"),
    ("logprob", "--topology=v5e:9x9", "--topology=v5e:9x9"),
    ("rl_step", "--peers=verl", "unknown peer 'verl'"),
    ("rl_step", "--group=1", "got --group=1; wanted at least 2"),
    ("rl_step", "--micro_batch_rows=12", "does not divide the 128 rows of a step"),
    ("time_to_accuracy", "--peers=verl", "unknown peer 'verl'"),
    ("time_to_accuracy", "--seeds=0", "got --seeds=0; wanted at least 1"),
    (
        "time_to_accuracy",
        "--peer_learning_rates=fast",
        "got --peer_learning_rates=fast; wanted numbers",
    ),
    ("train_step", "--peers=tf", "unknown peer 'tf'"),
    ("train_step", "--group_size=1", "got --group_size=1; wanted at least 2"),
    ("train_step", "--steps=0", "got --steps=0; wanted at least 1"),
    ("weight_sync", "--models=huge", "got --models with 'huge'; wanted some of embedded, large"),
    ("weight_sync", "--steps=0", "got --steps=0; wanted at least 1"),
]


@pytest.mark.parametrize(("benchmark", "option", "message"), OPTIONS)
def test_bad_input_is_one_line(benchmark, option, message, capsys):
    assert importlib.import_module(f"tba_jax.bench.{benchmark}").main([option]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
