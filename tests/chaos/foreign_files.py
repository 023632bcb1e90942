# SPDX-License-Identifier: Apache-2.0
"""Random work directories with files of other programs: no foreign byte may change.

    python -m tests.chaos.foreign_files [--number=200] [--seed=0] [--real=10]

Each directory gets a random mixture of foreign files, symbolic links, parts of other runs and
checkpoints of other programs. Then it is given to every command that writes: train, resume, export,
report and fleet. In most of the directories that a run accepts, the files of a run are written by
the run's own writers; `--real` of them are given to the main command in a process of its own.
"""

import argparse
import contextlib
import io
import os
import random
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

from tba_jax.commands import export, report
from tba_jax.config.schema import make_config
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.run.errors import UserError
from tba_jax.run.workdir import begin_run, claim
from tba_jax.weights.versions import PublicationError, Versions

FIELDS = {"task.name": "arithmetic", "num_steps": 3}
CONFIG = make_config(FIELDS)
FLEET = make_config({**FIELDS, "placement": "fleet"})
NAMES = [
    "config.json", "metrics.jsonl", "schedule.jsonl", "schedule.1.jsonl", "report.html",
    "report.json", "versions.json", "plots", "weights", "checkpoints", "lock", "run.log",
    "lost+found", "notes", "metrics.jsonl.kept", "config.json.unfinished", "damaged_checkpoints",
]  # fmt: skip


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


def litter(workdir: Path, outside: Path, draws: random.Random) -> None:
    """Put a few foreign things into a directory."""
    for name in draws.sample(NAMES, draws.randrange(0, 4)):
        path = workdir / name
        if path.exists() or path.is_symlink():
            continue
        kind = draws.choice(["file", "empty", "folder", "link", "broken link", "steps"])
        if kind == "file":
            path.write_text(f"theirs {draws.random()}\n")
        elif kind == "empty":
            path.touch()
        elif kind == "link":
            target = outside / f"{name}-{draws.randrange(10**9)}"
            if draws.random() < 0.5:
                target.write_text("theirs\n")
            else:
                target.mkdir()
                (target / "model.bin").write_text("theirs")
            path.symlink_to(target)
        elif kind == "broken link":
            path.symlink_to(outside / "nothing")
        else:
            path.mkdir()
            for step in draws.sample(range(12), 3) if kind == "steps" else ["a.txt"]:
                inner = path / str(step)
                if kind == "steps":
                    inner.mkdir()
                    inner = inner / "model.bin"
                inner.write_text(f"theirs {draws.random()}")


def write_as_a_run_does(workdir: Path) -> None:
    """Use the writers of a run."""
    for name in ("metrics.jsonl", "schedule.jsonl"):
        log = JsonlWriter(workdir / name)
        log.append({"event": "step", "step": 1})
        log.keep(lambda record: record["step"] > 1)
        log.close()
    versions = Versions(workdir)
    versions.clear()
    for version in (1, 2, 3):
        versions.begin(version)
        versions.path(version).mkdir()
        (versions.path(version) / "array").write_text("ours")
        versions.add(version)


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
        with hold, contextlib.suppress(PublicationError):
            write_as_a_run_does(workdir)
    return "accepted"


def one(folder: Path, draws: random.Random, real: bool = False) -> Counter[str]:
    """Make one directory, give it to every command, and compare.

    Raises:
        AssertionError: a foreign byte changed.
    """
    workdir, outside, out = folder / "run", folder / "outside", folder / "out"
    for path in (workdir, outside, out):
        path.mkdir(parents=True)
    is_run = draws.random() < 0.4 and not real
    if is_run:
        begin_run(workdir, CONFIG)
        write_as_a_run_does(workdir)
    ours = set(digest(folder))
    litter(workdir, outside, draws)
    if draws.random() < 0.3:
        (out / "README.md").write_text("theirs")
    if draws.random() < 0.2 and is_run:
        (workdir / "config.json").unlink()
    foreign = {path: what for path, what in digest(folder).items() if path not in ours}
    # Empty folders and empty files are nobody's: a run may use them.
    foreign = {
        path: what
        for path, what in foreign.items()
        if not (what == 0 or (what == "folder" and not any(Path(path).iterdir())))
    }
    seen: Counter[str] = Counter()
    quiet = io.StringIO()
    for name in ("train", "resume", "export", "report", "fleet"):
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            if name == "export":
                exported = export.main([f"--workdir={workdir}", f"--out={out}"])
                became = "refused" if exported else "wrote"
            elif name == "report":
                became = "refused" if report.main([str(workdir)]) else "wrote"
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
