# SPDX-License-Identifier: Apache-2.0
"""A bad option of a benchmark is one line."""

import importlib

import pytest

OPTIONS = [
    ("rl_step", "--peers=verl", "unknown peer 'verl'"),
    ("rl_step", "--group=1", "got --group=1; wanted at least 2"),
    ("rl_step", "--micro_batch_rows=12", "does not divide the 128 rows of a step"),
    ("time_to_accuracy", "--seeds=0", "got --seeds=0; wanted at least 1"),
    (
        "time_to_accuracy",
        "--peer_learning_rates=fast",
        "got --peer_learning_rates=fast; wanted numbers",
    ),
    ("train_step", "--group_size=1", "got --group_size=1; wanted at least 2"),
]


@pytest.mark.parametrize(("benchmark", "option", "message"), OPTIONS)
def test_bad_input_is_one_line(benchmark, option, message, capsys):
    assert importlib.import_module(f"tba_jax.bench.{benchmark}").main([option]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_a_missing_package_and_an_interpreter_that_does_not_run(capsys, monkeypatch):
    rl_step = importlib.import_module("tba_jax.bench.rl_step")
    assert rl_step.main(["--peers=trl", "--peer_python=/no/python"]) == 1
    assert "--peer_python=/no/python does not run" in capsys.readouterr().err
    monkeypatch.setitem(rl_step._PACKAGES, "trl", ("json", "no_such_package"))
    assert rl_step.main(["--peers=trl"]) == 1
    error = capsys.readouterr().err
    assert "trl needs no_such_package" in error and len(error.splitlines()) == 1
