# SPDX-License-Identifier: Apache-2.0
"""Random work directories with files of other programs: no foreign byte may change.

    python -m tests.chaos.foreign_files [--number=200] [--seed=0] [--real=10]

Each directory gets a random mixture of foreign files and folders. Then it is given to every command
that writes: train, resume, export, report and fleet. In the directories that a run accepts, the
files of a run are written by the run's own writers; `--real` of them are given to the main command
in a process of its own.
"""

import argparse
import contextlib
import functools
import io
import os
import random
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
from etils import epath

from tba_jax.commands import export, report
from tba_jax.commands.entry_point import run_command
from tba_jax.config.schema import make_config
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.errors import UserError
from tba_jax.run.workdir import begin_run, claim, run_id_of
from tba_jax.storage.steps import delete_own
from tba_jax.weights.folder import WeightFolder

FIELDS = {"task.name": "arithmetic", "num_steps": 3}
CONFIG = make_config(FIELDS)
FLEET = make_config({**FIELDS, "placement": "fleet"})
NAMES = [
    "config.json", "metrics.jsonl", "report.html", "report.json", "versions.json", "plots",
    "weights", "checkpoints", "lock", "run.log", "lost+found", "notes",
]  # fmt: skip
# Names that a run does not make, in the directory of a run.
BESIDE = [
    "run.log",
    "lost+found",
    "notes",
    "checkpoints/5",
    "weights/11",
    "weights/notes",
    "a.html",
]


def digest(folder: Path) -> dict[str, object]:
    """Every path below a folder with its kind and content; links are not followed."""
    found: dict[str, object] = {}
    for where, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(where, name)
            if path.is_symlink():
                found[str(path)] = ("link", os.readlink(path))
            elif path.is_dir():
                found[str(path)] = "folder"
            else:
                found[str(path)] = zlib.crc32(path.read_bytes())
    return found


def litter(workdir: Path, names: list[str], draws: random.Random) -> None:
    """Put a few foreign files and folders into a directory."""
    for name in draws.sample(names, draws.randrange(0, 4)):
        path = workdir / name
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        if draws.random() < 0.5 and "/" not in name:
            path.write_text(f"theirs {draws.random()}\n")
        else:
            path.mkdir()
            (path / "model.bin").write_text(f"theirs {draws.random()}")


def write_as_a_run_does(workdir: Path) -> None:
    """Use the writers of a run."""
    log = JsonlWriter(workdir / "metrics.jsonl")
    log.append({"step": 1})
    log.keep(lambda record: record["step"] > 1)
    log.close()
    checkpoints = Checkpoints(workdir, run_id=run_id_of(workdir))
    for step in (6, 7, 8):
        checkpoints.save(step, {"w": np.zeros(2)}, {})
    checkpoints.close()
    delete_own(epath.Path(workdir / "weights"), run_id_of(workdir))
    folder = WeightFolder(workdir, lambda params: params, run_id=run_id_of(workdir))
    for version in (6, 7, 8):
        folder.publish(version, {"w": np.zeros(2)})
    folder.close()


def train(workdir: Path, config, real: bool) -> str:
    """Give a directory to a run; what became of it."""
    if real:
        command = [sys.executable, "-m", "tba_jax.main", "--config=math", f"--workdir={workdir}"]
        command += ["--config.num_steps=2", "--config.checkpoint.period=1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        return "ran" if done.returncode == 0 else "refused"
    try:
        hold = claim(workdir, config)
    except UserError:
        return "refused"
    if hold is not None:
        with hold:
            write_as_a_run_does(workdir)
    return "accepted"


def one(folder: Path, draws: random.Random, real: bool = False) -> Counter[str]:
    """Make one directory, give it to every command, and compare.

    Raises:
        AssertionError: a foreign byte changed.
    """
    workdir, out = folder / "run", folder / "out"
    for path in (workdir, out):
        path.mkdir(parents=True)
    is_run = draws.random() < 0.4 and not real
    if is_run:
        begin_run(workdir, CONFIG)
        write_as_a_run_does(workdir)
    ours = set(digest(folder))
    litter(workdir, BESIDE if is_run else NAMES, draws)
    if draws.random() < 0.3:
        (out / "README.md").write_text("theirs")
    foreign = {path: what for path, what in digest(folder).items() if path not in ours}
    seen: Counter[str] = Counter()
    quiet = io.StringIO()
    for name in ("train", "resume", "export", "report", "fleet"):
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            if name == "export":
                argv = [f"--workdir={workdir}", f"--out={out}"]
                exported = run_command(functools.partial(export.main, argv))
                became = "refused" if exported else "wrote"
            elif name == "report":
                code = run_command(functools.partial(report.main, [str(workdir)]))
                became = "refused" if code else "wrote"
            else:
                became = train(workdir, FLEET if name == "fleet" else CONFIG, real)
        seen[f"{name} {became}"] += 1
        now = digest(folder)
        for path, what in foreign.items():
            assert now.get(path) == what, f"{name} ({became}) changed {path}; left in {folder}"
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", type=int, default=10)
    args = parser.parse_args()
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.number):
            draws = random.Random(args.seed * 10**6 + number)
            total += one(Path(scratch, str(number)), draws, real=number < args.real)
    print(f"{args.number} directories: no foreign byte changed")
    for name, count in sorted(total.items()):
        print(f"  {name}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
