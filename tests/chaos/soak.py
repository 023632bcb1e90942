# SPDX-License-Identifier: Apache-2.0
"""The soak: a long run of the main command, and what grows in it.

    python -m tests.chaos.soak --budget_min=20 [--out=DIR] [--json]

Every few seconds it reads the memory, threads, descriptors and processes of the run: of the command
itself and of the processes that score, and takes from the memory what the replay buffer says that
it holds. The first part is warm-up (programs are compiled, the buffer fills); through the rest a
line is fitted. What grows is said per hour, with its standard error; the exit code is 1 when
something grows by more than three of them and more than it may. Of threads, descriptors and
processes the least of each minute counts: a save has several for a moment, and how often a look
meets one depends on the speed of the run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.commands import ROOT, children, command, environment

# Per hour. Memory: what an allocator that settles may still take.
ALLOWED = {"rss_mib": 64.0, "threads": 0.5, "descriptors": 0.5, "processes": 0.5}
# A save, which has threads and descriptors of its own, is shorter.
MINUTE_S = 60.0
OVERRIDES = (
    "num_steps=1000000",
    "num_searchers=2",
    "search.num_slots=24",
    "checkpoint.period=200",
    "eval.period=500",
    "sync.transport=checkpoint",
    "replay.max_bytes=4194304",
)


def look(pid: int) -> dict[str, float]:
    """What a process has: MiB, threads, descriptors."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
        "threads": float(status["Threads"]),
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
    }


def sample(pid: int, workdir: Path) -> dict[str, dict[str, float]]:
    """By part: the command, its scoring processes together."""
    newest: dict[str, Any] = next(
        (line for line in reversed(tail(workdir)) if "buffer/num_bytes" in line), {}
    )
    main = look(pid)
    main["rss_mib"] -= newest.get("buffer/num_bytes", 0) / 2**20
    rewards = {"rss_mib": 0.0, "threads": 0.0, "descriptors": 0.0, "processes": 0.0}
    for child in children(pid):
        try:
            found = look(child)
        except (OSError, KeyError):  # it has ended
            continue
        for name, value in found.items():
            rewards[name] += value
        rewards["processes"] += 1
    return {"main": main, "rewards": rewards, "run": {"step": float(newest.get("step", 0))}}


def tail(workdir: Path) -> list[dict[str, Any]]:
    """The last lines of metrics."""
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        whole = file.read().split(b"\n")[1:-1]
    return [json.loads(line) for line in whole]


def slope(times_s: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Growth per hour by least squares, and its standard error from the residuals."""
    hours = (times_s - times_s.mean()) / 3600
    grows = float(hours @ values / (hours @ hours))
    rest = values - values.mean() - grows * hours
    error = float(np.sqrt(rest @ rest / max(1, len(values) - 2) / (hours @ hours)))
    return grows, error


def fit(samples: list[tuple[float, dict[str, dict[str, float]]]]) -> dict[str, Any]:
    """Slopes of every quantity of every part, and those that grow more than they may."""
    times_s = np.array([when for when, _ in samples])
    slopes: dict[str, dict[str, float]] = {}
    grown = []
    for part in ("main", "rewards"):
        for name in samples[0][1][part]:
            values = np.array([found[part][name] for _, found in samples])
            when_s = times_s
            if name != "rss_mib":
                minutes = ((times_s - times_s[0]) // MINUTE_S).astype(int)
                each = [minutes == minute for minute in np.unique(minutes)]
                when_s = np.array([times_s[chosen].mean() for chosen in each])
                values = np.array([values[chosen].min() for chosen in each])
            per_hour, error = slope(when_s, values)
            slopes[f"{part} {name}"] = {
                "first": float(values[0]),
                "last": float(values[-1]),
                "per_hour": per_hour,
                "error": error,
            }
            if per_hour > max(ALLOWED[name], 3 * error):
                grown.append(f"{part} {name}")
    return {"slopes": slopes, "grown": grown}


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(description="a long run, and what grows in it")
    parser.add_argument("--budget_min", type=float, default=20.0)
    parser.add_argument("--warm_share", type=float, default=0.35, help="of it, not looked at")
    parser.add_argument("--period_s", type=float, default=5.0, help="between two looks")
    parser.add_argument("--out", default="", help="folder to work in")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    out = Path(args.out or tempfile.mkdtemp(prefix="soak-")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(out / "compiled"))
    # Into a file: a pipe that nobody empties would stop the run.
    with open(out / "printed.txt", "w") as printed:
        process = subprocess.Popen(
            command(out / "run", *OVERRIDES),
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment(Path(cache)),
            cwd=ROOT,
        )
    samples = []
    began = time.monotonic()
    try:
        while (now := time.monotonic() - began) < 60 * args.budget_min:
            if process.poll() is not None:
                print((out / "printed.txt").read_text()[-2000:], file=sys.stderr)
                return 1
            if now > 60 * args.budget_min * args.warm_share:
                samples.append((now, sample(process.pid, out / "run")))
            time.sleep(args.period_s)
    finally:
        process.kill()
        process.wait()
    result = fit(samples)
    steps = [found["run"]["step"] for _, found in samples]
    result |= {"samples": len(samples), "steps": steps[-1] - steps[0], "last_step": steps[-1]}
    if not args.json:
        for name, each in result["slopes"].items():
            print(
                f"{name:22} {each['first']:10.1f} -> {each['last']:10.1f}   "
                f"{each['per_hour']:+9.2f} ± {each['error']:.2f} an hour"
            )
    print(json.dumps(result))
    return 1 if result["grown"] else 0


if __name__ == "__main__":
    sys.exit(main())
