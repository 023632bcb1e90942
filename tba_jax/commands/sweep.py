# SPDX-License-Identifier: Apache-2.0
"""Command: train every combination of some settings and seeds, and compare the runs.

Each run is the main command in a process of its own, with its work directory in OUT, one after the
other. A finished run is not started again: the same command continues a sweep that was stopped.
Other arguments, such as --config.num_steps=50, are those of tba_jax.main and hold for all runs.
"""

import argparse
import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tba_jax.commands import compare
from tba_jax.commands.entry_point import end_with_parent, make_parser
from tba_jax.commands.interruption import handling
from tba_jax.config.command_line import local_folder, override
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config
from tba_jax.report.files import load_run
from tba_jax.report.page import headline
from tba_jax.run.workdir import finished_report
from tba_jax.settings import ConfigError

MAIN = (sys.executable, "-m", "tba_jax.main")
_GRID = '"optimizer.learning_rate=1e-5,3e-5;objective.preset=tba,grpo"'


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
                f"--grid={_GRID}"
            )
        grid[field] = found
    return grid


def points(
    common: Sequence[str], grid: dict[str, list[str]], seeds: Sequence[int]
) -> dict[str, tuple[list[str], Config | ConfigError]]:
    """Return folder name -> (arguments, config) of each run; seeds vary slowest.

    The error replaces an invalid config. Arguments are those of tba_jax.main, except --workdir.

    Args:
        common: arguments of all runs, including `--config=`.

    Raises:
        ConfigError: no run has a valid config, or two runs would have the same folder.
    """
    found: dict[str, tuple[list[str], Config | ConfigError]] = {}
    for seed, *values in itertools.product(seeds, *grid.values()):
        pairs = [f"{field}={value}" for field, value in zip(grid, values, strict=True)]
        arguments = [*common, *(f"--config.{x}" for x in (*pairs, f"seed={seed}"))]
        plain = [re.sub(r"[^\w.=+-]+", "_", pair.rpartition(".")[2][-60:]) for pair in pairs]
        if (name := "-".join([*plain, f"seed{seed}"])) in found:
            raise ConfigError("--grid: two runs would have the same folder; give each value once")
        try:
            config = override(None, arguments)
            validate(config)
            found[name] = arguments, config
        except ConfigError as error:
            found[name] = arguments, error
    problems = [config for _, config in found.values() if isinstance(config, ConfigError)]
    if len(problems) == len(found):
        raise problems[0]
    return found


def _train(argv: Sequence[str], folder: Path) -> str:
    """Train one run; return the reason of its failure, or "".

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM arrived; the run has saved its state and ended.
    """
    stopped: list[int] = []
    log = folder.with_name(f"{folder.name}.log")
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*argv, f"--workdir={folder}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )

        def stop(number: int, frame: object) -> None:
            del frame
            stopped.append(number)
            process.terminate()

        with handling(stop, (signal.SIGINT, signal.SIGTERM)):
            code = process.wait()
    if stopped:
        raise KeyboardInterrupt
    if code == 0:
        return ""
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    return f"exit status {code}: {last or 'no output'} ({log})"


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = make_parser("sweep", __doc__)
    parser.add_argument("--config", required=True, help="a preset, or FILE.py:PRESET")
    parser.add_argument("--grid", default="", help=f"e.g. {_GRID}")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each combination")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--out", default="", help="folder; default runs/sweep-CONFIG")
    options, others = parser.parse_known_args(argv)
    if min(options.seeds - 1, options.first_seed) < 0:
        raise ConfigError("--seeds must be at least 1, and --first_seed at least 0")
    return options, others


def main(argv: Sequence[str] | None = None) -> int:
    """Train every run and write OUT/compare.html; return the exit status."""
    options, others = _arguments(argv)
    name = re.sub(r"\W+", "-", Path(options.config).name)
    out = local_folder(options.out or f"runs/sweep-{name}", "--out").resolve()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    found = points([f"--config={options.config}", *others], parse_grid(options.grid), seeds)
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    # Wrong settings are reported before the first run.
    for name, (arguments, config) in sorted(
        found.items(), key=lambda x: isinstance(x[1][1], Config)
    ):
        folder = out / name
        try:
            if isinstance(config, ConfigError):
                failure = str(config)
            elif finished_report(folder, config.num_steps):
                failure = ""
            else:
                failure = _train([*MAIN, *arguments], folder)
        except KeyboardInterrupt:
            print("stopped; the same command continues", file=sys.stderr)
            return 128 + signal.SIGINT
        failed += bool(failure)
        text = f"failed, {failure}" if failure else headline(load_run(folder))
        print(f"{name}: {text}", flush=True)
    folders = [str(out / name) for name in found if (out / name / "metrics.jsonl").exists()]
    if folders:
        compare.main([*folders, f"--out={out / 'compare.html'}"])
    if failed:
        print(f"{failed} of {len(found)} runs failed; see above", file=sys.stderr)
    return 1 if failed else 0
