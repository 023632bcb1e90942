# SPDX-License-Identifier: Apache-2.0
"""Command: time of a step with some settings relative to the same run without them.

    python -m tba_jax.bench.overrides --config=math --changed="--config.report.live=True"

Both sides are the main command with the same seed; the changed side has the settings of --changed
in addition. The two runs of a seed follow each other, in alternating order, and the ratio of a seed
compares them. The time of a step is measured from the end of step `--skip` to the end of the last
step, so start and compilation are not in it. A live page that a side announces is followed as an
open browser follows it, with one request every two seconds. Needs an idle machine.
"""

import argparse
import contextlib
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import processes, reporting
from tba_jax.bench.async_speedup import Figures, read

_REQUEST_S = 2.0  # period of the requests of an open live page
_ADDRESS = re.compile(r"live page: (http://\S+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.bench.overrides",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", default="math", help="preset of both sides")
    parser.add_argument("--changed", required=True, help="settings of the changed side alone")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--num_steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--skip", type=int, default=20, help="steps before the clock starts")
    parser.add_argument("overrides", nargs="*", help="after --: --config.NAME=VALUE for both sides")
    with tempfile.TemporaryDirectory(prefix="bench_overrides_") as folder:
        return reporting.run_command(parser, argv, lambda args: measure(args, Path(folder)), table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures by name.

    Args:
        args: arguments of the command line.
        folder: empty folder for the runs.

    Raises:
        ValueError: an option cannot be measured, or a run failed.
    """
    if args.seeds < 1 or not 0 < args.skip < args.num_steps:
        raise ValueError(
            f"got --seeds={args.seeds} --skip={args.skip} --num_steps={args.num_steps}; wanted at "
            "least one seed, and steps after those that are skipped"
        )
    sides = {"unchanged": [], "changed": shlex.split(args.changed)}
    found: dict[str, list[Figures]] = {side: [] for side in sides}
    for side, changed in sides.items():  # fills the compilation cache
        _run(side, args, changed, args.skip, 0, folder / f"{side}-first")
    for seed in range(args.seeds):
        for side in list(sides)[:: -1 if seed % 2 else 1]:
            workdir = folder / f"{side}-{seed}"
            _run(side, args, sides[side], args.num_steps, seed, workdir)
            found[side].append(read(workdir, args.skip))
            print(f"seed {seed}, {side}: {found[side][-1].step_s:.4f} s a step", file=sys.stderr)
    pairs = zip(found["unchanged"], found["changed"], strict=True)
    ratios = [changed.step_s / unchanged.step_s for unchanged, changed in pairs]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        **{
            side: {
                name: statistics.median(getattr(x, name) for x in found[side])
                for name in ("step_s", "train_s")
            }
            for side in sides
        },
        "steps": args.num_steps - args.skip,
        "hardware": processes.hardware({"platform": "cpu", "device": "cpu"}),
    }


def _run(
    side: str,
    args: argparse.Namespace,
    changed: Sequence[str],
    num_steps: int,
    seed: int,
    workdir: Path,
) -> None:
    """Run one side from start to end, and follow its live page if it has one."""
    command = [sys.executable, "-m", "tba_jax.main", f"--config={args.config}"]
    command += [f"--workdir={workdir}", f"--config.seed={seed}", f"--config.num_steps={num_steps}"]
    log = workdir.with_suffix(".txt")
    with log.open("w") as out:
        child = subprocess.Popen([*command, *args.overrides, *changed], stdout=out, stderr=out)
    address, version, deadline = "", 0, time.monotonic() + processes.TIMEOUT_S
    try:
        while child.poll() is None and time.monotonic() < deadline:
            if not address and (match := _ADDRESS.search(log.read_text())):
                address = match[1]
            if address:
                # The page closes with the run, perhaps during a request.
                with contextlib.suppress(OSError):
                    body = urllib.request.urlopen(f"{address}body?{version}", timeout=60).read()
                    version = json.loads(body)["version"] if body else version
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_REQUEST_S)
    finally:
        child.kill()
        child.wait()
    if child.returncode:
        lines = log.read_text().strip().splitlines() or ["(no output)"]
        sys.stderr.write("\n".join(lines[-30:]) + "\n")
        raise ValueError(f"{side}, seed {seed}: exit code {child.returncode}: {lines[-1]}")


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "side       s a step  s of training"
    for side in ("unchanged", "changed"):
        yield f"{side:9s} {result[side]['step_s']:9.4f} {result[side]['train_s']:14.4f}"
    listed = ", ".join(f"{x:.3f}" for x in result["ratios"])
    yield f"changed / unchanged: {result['ratio']:.3f} (seeds: {listed})"


if __name__ == "__main__":
    sys.exit(main())
