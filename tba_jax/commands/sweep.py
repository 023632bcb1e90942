# SPDX-License-Identifier: Apache-2.0
"""Command: train every combination of some settings and seeds, and compare the runs.

Each run is the main command in a process of its own, with its work directory in OUT, one after the
other. Invariant: a finished run is not started again, and a killed sweep continues where it
stopped.
"""

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tba_jax.commands import compare
from tba_jax.commands.entry_point import end_with_parent
from tba_jax.commands.interruption import not_ignored
from tba_jax.config.command_line import local_folder, override
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config
from tba_jax.report.files import load_run
from tba_jax.report.page import headline
from tba_jax.run.workdir import is_finished
from tba_jax.settings import ConfigError

MAIN = (sys.executable, "-m", "tba_jax.main")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Point(NamedTuple):
    """One run of a sweep.

    Attributes:
        name: name of the run's folder.
        arguments: arguments of the main command, without the work directory.
    """

    name: str
    arguments: tuple[str, ...]


def parse_grid(text: str) -> dict[str, list[str]]:
    """Parse --grid into the values of each field.

    Args:
        text: "FIELD=VALUE,VALUE;FIELD=VALUE". A comma in brackets is part of a value.

    Raises:
        ConfigError: a part does not read FIELD=VALUE,..., or a field occurs twice.
    """
    grid: dict[str, list[str]] = {}
    for part in filter(str.strip, text.split(";")):
        field, equals, values = part.strip().partition("=")
        found = [value.strip() for value in re.split(r",(?![^(\[]*[)\]])", values)]
        if not equals or not all(found) or field in grid:
            raise ConfigError(
                f"--grid: {part.strip()!r}, wanted each field once as FIELD=VALUE,VALUE; e.g. "
                '--grid="optimizer.learning_rate=1e-5,3e-5;objective.preset=tba,grpo"'
            )
        grid[field] = found
    return grid


def points(
    common: Sequence[str], grid: dict[str, list[str]], seeds: Sequence[int]
) -> dict[Point, Config | ConfigError]:
    """Return the config of each run, or the error if it is invalid; seeds vary slowest.

    Args:
        common: arguments of all runs, including `--config=`.

    Raises:
        ConfigError: no run has a valid config, or two runs would have the same folder.
    """
    found: dict[Point, Config | ConfigError] = {}
    for seed, *values in itertools.product(seeds, *grid.values()):
        pairs = [f"{field}={value}" for field, value in zip(grid, values, strict=True)]
        arguments = (*common, *(f"--config.{x}" for x in (*pairs, f"seed={seed}")))
        plain = [re.sub(r"[^\w.=+-]+", "_", pair.rpartition(".")[2][-60:]) for pair in pairs]
        point = Point("-".join([*plain, f"seed{seed}"]), arguments)
        try:
            found[point] = config = override(None, arguments)
            validate(config)
        except ConfigError as error:
            found[point] = error
    if len({point.name for point in found}) < len(found):
        raise ConfigError("--grid: two runs would have the same folder; give each value once")
    problems = [x for x in found.values() if isinstance(x, ConfigError)]
    if len(problems) == len(found):
        raise problems[0]
    return found


class _Stopped(Exception):
    """An interrupt of the sweep."""


def _run(argv: Sequence[str], log: Path) -> str:
    """Train one run; return the reason of its failure, or "".

    Raises:
        _Stopped: SIGINT or SIGTERM arrived; the run has saved its state and ended.
    """
    stopped: list[int] = []
    with open(log, "ab") as output:
        process = subprocess.Popen(
            argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )

        def stop(number: int, frame: object) -> None:
            del frame
            stopped.append(number)
            process.terminate()

        previous = {x: signal.signal(x, stop) for x in not_ignored(_SIGNALS)}
        try:
            code = process.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    if stopped:
        raise _Stopped
    if code == 0:
        return ""
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return f"exit status {code}: {last[0] if last else 'no output'}"


def _train(argv: Sequence[str], num_steps: int, folder: Path) -> str:
    """Train one run unless it is finished; return the reason of its failure, or ""."""
    if is_finished(folder, num_steps):
        return ""
    log = folder.with_name(f"{folder.name}.log")
    failure = _run([*argv, f"--workdir={folder}"], log)
    return failure and f"{failure} ({log})"


def main(argv: Sequence[str] | None = None) -> int:
    """Train every run and write OUT/compare.html; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.sweep",
        description="Train every combination of settings and seeds, and compare the runs. "
        "The same command continues a sweep that was stopped. Other arguments, such as "
        "--config.num_steps=50, are those of tba_jax.main and hold for all runs.",
    )
    parser.add_argument("--config", required=True, help="a preset, or FILE.py:PRESET")
    parser.add_argument(
        "--grid",
        default="",
        help='e.g. "optimizer.learning_rate=1e-5,3e-5;objective.preset=tba,grpo"',
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of each combination")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--out", default="", help="folder; default runs/sweep-CONFIG")
    options, others = parser.parse_known_args(argv)
    if min(options.seeds - 1, options.first_seed) < 0:
        raise ConfigError("--seeds must be at least 1, and --first_seed at least 0")
    name = re.sub(r"\W+", "-", Path(options.config).name)
    out = local_folder(options.out or f"runs/sweep-{name}", "--out").resolve()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    common = [f"--config={options.config}", *others]
    found = points(common, parse_grid(options.grid), seeds)
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    runs: dict[Point, tuple[int, Path]] = {}
    for point, config in found.items():
        if isinstance(config, ConfigError):
            print(f"{point.name}: failed, {config}", flush=True)
            failed += 1
        else:
            runs[point] = config.num_steps, out / point.name
    try:
        for point, (num_steps, folder) in runs.items():
            failure = _train([*MAIN, *point.arguments], num_steps, folder)
            text = f"failed, {failure}" if failure else headline(load_run(folder))
            print(f"{point.name}: {text}", flush=True)
            failed += bool(failure)
    except _Stopped:
        print("stopped; the same command continues", file=sys.stderr)
        return 128 + signal.SIGINT
    folders = [out / x.name for x in found if os.path.exists(out / x.name / "metrics.jsonl")]
    if folders:
        compare.main([*map(str, folders), f"--out={out / 'compare.html'}"])
    if failed:
        print(f"{failed} of {len(found)} runs failed; see above", file=sys.stderr)
    return 1 if failed else 0
