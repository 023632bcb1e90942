# SPDX-License-Identifier: Apache-2.0
"""Harness of the benchmarks: their command line, fresh processes, model shapes and table.

A benchmark is one module. Its `measure` starts sides, the parts to be timed, in fresh processes:
the same module with a job file, whose side is a function that maps the job to its figures.

Invariant: a side that fails, hangs or lacks a package raises one ValueError with the reason.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from tba_jax.devices.platform import prepare_process
from tba_jax.models import transformer
from tba_jax.models.hf import config_json, hf_weights
from tba_jax.models.transformer import TransformerConfig

Figures: TypeAlias = dict[str, Any]
"""JSON values by name; the end of a name is the unit: _s, _bytes."""

TIMEOUT_S = 3600
_POLL_S = 0.05
_JOB = "--job"

_39M = TransformerConfig(
    vocab_size=32_000,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=1408,
    family="qwen2",
    qkv_bias=True,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
)
_1_5B = {"vocab_size": 151_936, "hidden_size": 1536, "num_layers": 28, "num_heads": 12}
_TINY = {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "head_dim": 8}
SHAPES = {
    "39m": _39M,
    "1.5b": dataclasses.replace(_39M, **_1_5B, head_dim=128, mlp_size=8960),
    "tiny": dataclasses.replace(_39M, **_TINY, mlp_size=64),
}
"""Qwen2 with a tied output matrix: 38,943,232 parameters; Qwen2.5-1.5B; one for tests."""


# --- command line ------------------------------------------------------------


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m tba_jax.bench.NAME`."""
    return argparse.ArgumentParser(
        prog=f"python -m tba_jax.bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of a flag: an integer of at least `least`."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text}; wanted at least {least}")
        return int(text)

    return integer


def add_integers(
    parser: argparse.ArgumentParser, defaults: Mapping[str, int | None], **least: int
) -> None:
    """Define flags for integers by name and default, of at least 1 or of `least`."""
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=at_least(least.get(name, 1)), default=value)


def add_peer_flags(parser: argparse.ArgumentParser) -> None:
    """Define --peers and --peer_python of a benchmark that compares with TRL."""
    parser.add_argument("--peers", default="", choices=("", "trl"), help="empty: no peer")
    parser.add_argument("--peer_python", default=sys.executable, help="interpreter with the peer")


def run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace, Path], Figures],
    *,
    columns: Sequence[str],
    rows: Callable[[Figures], Mapping[str, Figures]] = lambda result: {"tba_jax": result},
    sides: Mapping[str, Callable[[Figures], Figures]] | None = None,
) -> int:
    """Run a benchmark, or one side of it in its own process; return the exit code.

    Args:
        parser: parser whose `prog` is the command as a user types it. It gets the flag --json,
            which prints the result as a JSON object in the last line of output.
        argv: command-line arguments; None: those of this process.
        measure: (flags, empty folder) -> result; a ValueError is printed as one line.
        columns: figures in the table.
        rows: result -> figures of each side, for the table.
        sides: side -> function of a job, for `run_side`.
    """
    argv = sys.argv[1:] if argv is None else argv
    prepare_process()
    if sides and argv[:1] == [_JOB]:
        job = json.loads(Path(argv[1]).read_text())
        Path(job["result"]).write_text(json.dumps(sides[job["side"]](job)))
        return 0
    parser.add_argument("--json", action="store_true", help="last line of output: a JSON object")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="bench_") as folder:
            result = measure(args, Path(folder))
    except ValueError as error:
        print(f"{parser.prog.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 1
    result["command"] = shlex.join([*parser.prog.split(), *argv])
    result["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    print("\n".join(table(result, rows(result), columns)))
    if args.json:
        print(json.dumps(result))
    return 0


# --- table -------------------------------------------------------------------


def flat(figures: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names of nested figures, joined by dots, and their values."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def table(result: Figures, rows: Mapping[str, Figures], columns: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table of sides, below what was measured on which machine."""
    about = {name: x for name, x in result.items() if isinstance(x, str | int)}
    for name in ("workload", "hardware"):
        about |= dict(flat(result.get(name, {}), f"{name}."))
    yield from (f"{name}: {value}" for name, value in about.items() if name not in columns)
    yield ""
    found = {side: dict(flat(figures)) for side, figures in rows.items()}
    shown = [name for name in columns if any(name in x for x in found.values())]
    lines = [["", *shown]]
    lines += [[side, *(_cell(name, x.get(name)) for name in shown)] for side, x in found.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(x.rjust(n) for x, n in zip(line, widths, strict=True)).rstrip()


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if name.endswith("_bytes"):
        return f"{value / 2**20:.0f} MiB"
    return f"{value:.4g}"


# --- processes ---------------------------------------------------------------


def repeated(
    sides: Mapping[str, Callable[[int], Figures]], repeats: int, main: str
) -> dict[str, Figures]:
    """Run sides alternately; return the figures of each side over all repeats.

    A float is the median of the repeats, an integer their maximum, all else that of the first.

    Args:
        sides: side -> function of the number of the repeat.
        repeats: number of runs of each side.
        main: figure that is printed after each run, and returned as a list, too, "..._of_repeats".
    """
    reports: dict[str, list[Figures]] = {side: [] for side in sides}
    for repeat, (side, measure) in itertools.product(range(repeats), sides.items()):
        reports[side].append(measure(repeat))
        print(f"{side}: {main} {reports[side][-1][main]:.4g}", file=sys.stderr)

    def over_repeats(name: str, found: Sequence[Figures]) -> Any:
        values = [x[name] for x in found]
        if isinstance(values[0], float):
            return statistics.median(values)
        return max(values) if isinstance(values[0], int) else values[0]

    return {
        side: {name: over_repeats(name, found) for name in found[0]}
        | {f"{main}_of_repeats": [x[main] for x in found]}
        for side, found in reports.items()
    }


def own_command(name: str) -> list[str]:
    """Return the command of the sides of `tba_jax.bench.NAME`."""
    return [sys.executable, "-m", f"tba_jax.bench.{name}", _JOB]


def run_side(
    side: str,
    job: Mapping[str, Any],
    folder: Path,
    *,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
) -> Figures:
    """Run one side in a fresh process and return its figures.

    Args:
        side: name of the side, for the job and for errors.
        job: JSON values; the process also finds `side`, and `result`, the path of its result.
        folder: folder for files between the processes.
        command: command that receives the path of the job as its last argument.
        env: environment; None: the environment of this process.

    Raises:
        ValueError: the process failed or took too long; its last lines go to stderr.
    """
    path, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    for old in (result, log):
        old.unlink(missing_ok=True)
    path.write_text(json.dumps({**job, "side": side, "result": str(result)}))
    with started([*command, str(path)], log, env) as process:
        wait(side, [process], log)
    if not result.exists():
        raise failure(side, process.returncode, log)
    return json.loads(result.read_text())


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process whose output goes to a file; on exit, kill it and its children."""
    with log.open("ab") as out:
        # The process gets its own session, so that its children end with it.
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait(side: str, processes: Sequence["subprocess.Popen[bytes]"], log: Path) -> None:
    """Wait until all processes of a side have ended.

    Raises:
        ValueError: a process failed or took too long; its last lines go to stderr.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            break
        if time.monotonic() > deadline:
            raise ValueError(f"{side} took more than {TIMEOUT_S} s. Give a smaller workload")
        time.sleep(_POLL_S)
    if codes := [process.returncode for process in processes if process.returncode]:
        raise failure(side, codes[0], log)


def failure(side: str, code: int | None, log: Path) -> ValueError:
    """Return the error of a failed process; the end of its output goes to stderr."""
    lines = log.read_text(errors="replace").strip().splitlines() or ["(no output)"]
    sys.stderr.write("\n".join(lines[:-1][-30:]) + "\n" if lines[1:] else "")
    return ValueError(f"{side} failed with exit code {code}: {lines[-1]}")


def peer_env() -> dict[str, str]:
    """Return the environment of a peer: its own packages, and no downloads."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}


def peer_versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of packages in another interpreter.

    Raises:
        ValueError: the interpreter does not run, or a package is missing.
    """
    code = (
        "import importlib.metadata as m, json, platform; print(json.dumps({'python': "
        f"platform.python_version(), **{{n: m.version(n) for n in {tuple(packages)}}}}}))"
    )
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True, env=peer_env()
        )
    except OSError as error:
        raise ValueError(
            f"--peer_python={python} does not run: {error}. Give a Python interpreter"
        ) from error
    except subprocess.CalledProcessError as error:
        raise ValueError(
            f"--peer_python={python} lacks a package: {error.stderr.strip().splitlines()[-1]}. "
            f"Install {', '.join(packages)} there, or give another --peer_python"
        ) from error
    return json.loads(done.stdout)


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def here() -> Figures:
    """Return figures about the device and the number of threads of this process."""
    return {
        "num_threads": len(os.sched_getaffinity(0)),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the memory of a compiled program as its compiler reports it."""
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not report the memory of compiled programs"
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def hardware(report: Mapping[str, Any]) -> Figures:
    """Describe this machine, with the platform and device that a side reported."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "platform": report["platform"],
        "device": report["device"],
    }


def write_checkpoint(folder: str | Path, config: TransformerConfig) -> None:
    """Write a model folder of random weights in float32, without a tokenizer."""
    params = transformer.init_params(config, jax.random.key(0), np.dtype("float32"))
    hf_weights.save(folder, config, params, config_json.hf_config(config, dtype="float32"))
