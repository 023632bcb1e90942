# SPDX-License-Identifier: Apache-2.0
"""Random work directories with files of other programs: no foreign byte may change.

Each directory gets a random mixture of foreign files and folders. Then it is given to every command
that writes. In the directories that a run accepts, the run's own writers write.
FOREIGN_EXAMPLES=200 tries more directories.
"""

import contextlib
import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from tba_jax.commands import export, report
from tba_jax.commands.entry_point import run_command
from tba_jax.config.schema import make_config
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.errors import UserError
from tba_jax.run.run import claim
from tba_jax.run.workdir import begin_run, run_id_of
from tba_jax.storage.steps import delete_own
from tba_jax.weights.folder import WeightFolder

CONFIG = make_config({"task.name": "arithmetic", "num_steps": 3})
NAMES = [
    "config.json", "metrics.jsonl", "report.html", "report.json", "versions.json", "plots",
    "weights", "checkpoints", "lock", "heartbeat", "run.log", "lost+found", "notes",
]  # fmt: skip
# Names that a run does not make, in the directory of a run.
BESIDE = ["run.log", "lost+found", "notes", "checkpoints/5", "weights/11", "weights/notes"]


def contents(folder):
    """Every path below a folder with its kind or digest."""
    return {
        str(path): zlib.crc32(path.read_bytes()) if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def litter(workdir, names, draws):
    """Put a few foreign files and folders into a directory."""
    for name in draws.sample(names, draws.randrange(0, 4)):
        path = workdir / name
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            continue
        if draws.random() < 0.5 and "/" not in name:
            path.write_text(f"theirs {draws.random()}\n")
        else:
            path.mkdir()
            (path / "model.bin").write_text(f"theirs {draws.random()}")


def write_as_a_run_does(workdir):
    run_id = run_id_of(workdir)
    log = JsonlWriter(workdir / "metrics.jsonl")
    log.append({"step": 1})
    log.keep(lambda record: record["step"] > 1)
    log.close()
    delete_own(epath.Path(workdir / "weights"), run_id)
    checkpoints = Checkpoints(workdir, run_id=run_id)
    folder = WeightFolder(workdir, lambda params: params, run_id=run_id)
    for step in (6, 7, 8):
        checkpoints.save(step, {"w": np.zeros(2)}, {})
        folder.publish(step, {"w": np.zeros(2)})
    checkpoints.close()
    folder.close()


def train(workdir):
    """Give a directory to a run; return whether it was refused."""
    with contextlib.ExitStack() as held:
        try:
            claim(workdir, CONFIG, held)
        except UserError:
            return True
        write_as_a_run_does(workdir)
    return False


COMMANDS = {
    "train": train,
    "resume": train,
    "export": lambda workdir: run_command(
        lambda: export.main([f"--workdir={workdir}", f"--out={workdir.with_name('out')}"])
    ),
    "report": lambda workdir: run_command(lambda: report.main([str(workdir)])),
}


@pytest.mark.parametrize("seed", range(int(os.environ.get("FOREIGN_EXAMPLES", "8"))))
def test_commands_change_no_file_of_another_program(tmp_path: Path, seed, capsys):
    draws = random.Random(seed)
    workdir = tmp_path / "run"
    for folder in (workdir, tmp_path / "out"):
        folder.mkdir()
    is_run = seed % 3 == 0
    if is_run:
        begin_run(workdir, CONFIG)
        write_as_a_run_does(workdir)
    ours = contents(tmp_path)
    litter(workdir, BESIDE if is_run else NAMES, draws)
    if draws.random() < 0.3:
        (tmp_path / "out" / "README.md").write_text("theirs")
    foreign = contents(tmp_path).items() - ours.items()
    for name, command in COMMANDS.items():
        refused = command(workdir)
        assert foreign <= contents(tmp_path).items(), (name, refused)
        assert not is_run or name not in ("train", "resume") or not refused
