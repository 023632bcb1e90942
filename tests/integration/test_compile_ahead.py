# SPDX-License-Identifier: Apache-2.0
"""What is compiled while a run loads and its searchers fill the buffer is what is called."""

import json
import subprocess
import sys

import pytest
from commands import SMALL, environment

PROGRAM = """
import json, sys, threading
import jax
from tba_jax.config.command_line import override
from tba_jax.run.session import train
from pathlib import Path

found, publications = [], []

def listen(name, seconds, **about):
    lists = {"jit(train_step)": found, "jit(publish)": publications}
    if name.endswith("backend_compile_duration") and about["fun_name"] in lists:
        lists[about["fun_name"]].append(threading.current_thread().name)

if __name__ == "__main__":  # reward processes import this file
    jax.monitoring.register_event_duration_secs_listener(listen)
    train(override(None, ["--config=math", *sys.argv[1:]]), Path("run"))
    print(json.dumps([found, publications]))
"""


@pytest.mark.slow
def test_no_shape_is_compiled_twice(cache, tmp_path):
    (tmp_path / "train_here.py").write_text(PROGRAM)
    done = subprocess.run(
        [
            sys.executable,
            "train_here.py",
            *(f"--config.{x}" for x in (*SMALL, "num_steps=2")),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(cache),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    threads, publications = json.loads(done.stdout.splitlines()[-1])
    assert threads.count("compiler") == 1
    # The reference is a copy made by the same function, in another layout.
    assert sorted(publications) == ["MainThread", "compiler"]
    # The first batch may be of another shape than was foreseen, and the second of a third one.
    assert len(threads) <= 3
