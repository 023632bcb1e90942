# SPDX-License-Identifier: Apache-2.0
"""The command that serves a model: flags that are refused, and one run from start to SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from tba_jax.commands import serve
from tba_jax.commands.entry_point import run_command
from tests.integration import commands

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


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_is_served_until_sigterm(tmp_path):
    name = str(tmp_path / "run")
    done = commands.run(name, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "tba_jax.serve", f"--workdir={name}", "--port=0"]
    env, pipe = {**os.environ, "JAX_PLATFORMS": "cpu"}, subprocess.PIPE
    process = subprocess.Popen(
        [*command, "--num_slots=2"], stdout=pipe, stderr=pipe, text=True, env=env
    )

    def ask(url, body=None):
        headers = {"content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    try:
        url = process.stdout.readline().split()[-1]
        assert ask(f"{url}/models")["data"][0]["id"] == name
        assert ask(f"{url.removesuffix('/v1')}/server_info")["weight_version"] == 8
        found = ask(f"{url}/completions", {"prompt": "7+5-3=", "max_tokens": 3})
        assert found["choices"][0]["text"]
    finally:
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
