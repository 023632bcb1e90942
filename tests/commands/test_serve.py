# SPDX-License-Identifier: Apache-2.0
"""Flags of the command that serves a model. serving/ has the server."""

import pytest

from tba_jax.commands import serve
from tba_jax.commands.entry_point import run_command

MODEL = "embedded:start_model"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --model=FOLDER or --workdir=RUN"),
        ([f"--model={MODEL}", "--workdir=runs/a"], "and not both"),
        ([f"--model={MODEL}", "--host=0.0.0.0"], "Add --token=SECRET"),
        ([f"--model={MODEL}", "--num_slots=0"], "--num_slots"),
        (["--model=no/such/folder", "--port=0"], "no/such/folder"),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_in_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_command(lambda: serve.main(flags)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
