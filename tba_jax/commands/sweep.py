# SPDX-License-Identifier: Apache-2.0
"""Command: train every combination of some settings and seeds, and compare the runs.

Each run is the main command in a process of its own, with its work directory in OUT: one after the
other on this machine, or as tasks of a Ray cluster. Invariant: a finished run is not started again,
and a killed sweep continues where it stopped.
"""

import argparse
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
_LOOK_S, _SAVE_S = 1.0, 600.0


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


# Point -> steps and work directory.
Runs = Mapping[Point, tuple[int, Path]]


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
        except BaseException:  # Ray cancels a task by an exception
            process.terminate()
            process.wait()
            raise
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


def _here(runs: Runs) -> Iterator[tuple[str, str]]:
    """Train the runs one after the other; yield (name, reason of its failure or "")."""
    for point, (num_steps, folder) in runs.items():
        yield point.name, _train([*MAIN, *point.arguments], num_steps, folder)


def _on_ray(runs: Runs, address: str, gpus: float, resources: str) -> Iterator[tuple[str, str]]:
    """Train the runs as tasks of a cluster, as many at once as its resources allow.

    Args:
        runs: the runs, with work directories on a file system that all machines share.
        address: argument of `ray.init`: "auto", "HOST:PORT", or "local" for this machine alone.
        gpus: number of GPUs of each run.
        resources: custom resources of each run, "NAME=NUMBER,...".

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    from tba_jax.run.ray_cluster import refuses_connections, set_variables

    set_variables(address)
    try:
        import ray.exceptions

        if ":" in address and refuses_connections(address):
            raise ConnectionError("no process listens there")
        options: dict[str, Any] = {} if address != "local" else {"include_dashboard": False}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ImportError, ConnectionError, RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"--ray={address}: {first:.200}. Install Ray with pip install 'tba_jax[fleet]', and "
            "start a cluster with `ray start --head`, or give --ray=local"
        ) from error
    own = {name: float(n) for name, _, n in (x.partition("=") for x in resources.split(",") if x)}
    task = ray.remote(num_cpus=1, num_gpus=gpus, resources=own, max_retries=0)(_train)
    tasks = {task.remote([*MAIN, *x.arguments], *run): x.name for x, run in runs.items()}
    stopped: list[int] = []
    previous = {x: signal.signal(x, lambda n, _: stopped.append(n)) for x in not_ignored(_SIGNALS)}
    try:
        while tasks and not stopped:
            done, _ = ray.wait(list(tasks), timeout=_LOOK_S)
            for each in done:
                try:
                    failure = ray.get(each)
                except ray.exceptions.RayError as error:
                    failure = f"{(str(error).strip().splitlines() or ['no message'])[-1]:.200}"
                yield tasks.pop(each), failure
        if stopped:
            for each in tasks:
                ray.cancel(each)
            ray.wait(list(tasks), num_returns=len(tasks), timeout=_SAVE_S)
            raise _Stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        ray.shutdown()


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
    parser.add_argument(
        "--ray",
        default="",
        metavar="ADDRESS",
        help="run on a Ray cluster: auto, HOST:PORT, or local for this machine; --out must be on a "
        "file system that all machines share",
    )
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each run on Ray")
    parser.add_argument(
        "--resources", default="", help="other resources of each run on Ray, e.g. TPU=4"
    )
    options, others = parser.parse_known_args(argv)
    try:
        if min(options.seeds - 1, options.first_seed) < 0:
            raise ConfigError("--seeds must be at least 1, and --first_seed at least 0")
        name = re.sub(r"\W+", "-", Path(options.config).name)
        out = local_folder(options.out or f"runs/sweep-{name}", "--out").resolve()
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        common = [f"--config={options.config}", *others]
        found = points(common, parse_grid(options.grid), seeds)
        out.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = 0
    runs: dict[Point, tuple[int, Path]] = {}
    for point, config in found.items():
        if isinstance(config, ConfigError):
            print(f"{point.name}: failed, {config}", flush=True)
            failed += 1
        else:
            runs[point] = config.num_steps, out / point.name
    results = _here(runs)
    if options.ray:
        results = _on_ray(runs, options.ray, options.gpus, options.resources)
    try:
        for name, failure in results:
            text = f"failed, {failure}" if failure else headline(load_run(out / name))
            print(f"{name}: {text}", flush=True)
            failed += bool(failure)
    except _Stopped:
        print("stopped; the same command continues", file=sys.stderr)
        return 128 + signal.SIGINT
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folders = [out / x.name for x in found if os.path.exists(out / x.name / "metrics.jsonl")]
    if folders:
        compare.main([*map(str, folders), f"--out={out / 'compare.html'}"])
    if failed:
        print(f"{failed} of {len(found)} runs failed; see above", file=sys.stderr)
    return 1 if failed else 0
