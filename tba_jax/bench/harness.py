# SPDX-License-Identifier: Apache-2.0
"""Harness of the benchmarks: command line, fresh processes, repeats, table and model shapes.

A benchmark is one module. Its `measure` starts sides, the parts to be timed, in fresh processes:
the same module with a job file, whose side is a function that maps the job to its figures.

Invariant: a side that fails, hangs or lacks a package raises one ValueError with the reason.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import re
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

from tba_jax.bench import trl_peer
from tba_jax.devices.platform import prepare_process
from tba_jax.models import transformer
from tba_jax.models.hf import families, hf_weights
from tba_jax.report.files import flat
from tba_jax.report.jsonl import read_jsonl
from tba_jax.run.model_parts import START_MODEL

Figures: TypeAlias = dict[str, Any]
"""JSON values by name; the end of a name is the unit: _s, _bytes."""

TIMEOUT_S = 3600
_POLL_S = 0.02
_JOB = "--job"

_39M = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_1_5B = {"vocab_size": 151_936, "num_hidden_layers": 28, "num_attention_heads": 12}
_TINY = {"vocab_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "39m": _39M,
    "1.5b": _39M | _1_5B | {"hidden_size": 1536, "intermediate_size": 8960},
    "tiny": _39M | _TINY | {"hidden_size": 32, "intermediate_size": 64},
}
SHAPES = {name: families.transformer_config(settings) for name, settings in MODELS.items()}
"""Qwen2 with a tied output matrix: 38,943,232 parameters; Qwen2.5-1.5B; one for tests."""


# --- command line ------------------------------------------------------------


def add_integers(
    parser: argparse.ArgumentParser, defaults: Mapping[str, int | None], **least: int
) -> None:
    """Define flags for integers by name and default, of at least 1 or of `least`."""

    for name, value in defaults.items():

        def integer(text: str, bound: int = least.get(name, 1)) -> int:
            if int(text) < bound:
                raise argparse.ArgumentTypeError(f"got {text}; wanted at least {bound}")
            return int(text)

        parser.add_argument(f"--{name}", type=integer, default=value)


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
        parser: parser of `python -m tba_jax.bench.NAME`; it gets the flag --json.
        argv: command-line arguments; None: those of this process.
        measure: (flags, empty folder) -> result; a ValueError is printed as one line.
        columns, rows: figures in the table; result -> figures of each side.
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


def table(result: Figures, rows: Mapping[str, Figures], columns: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table of sides, below what was measured on which machine."""
    about = {name: x for name, x in result.items() if isinstance(x, str | int)}
    for name in ("workload", "hardware"):
        about |= flat(result.get(name, {}), f"{name}.")
    yield from (f"{name}: {value}" for name, value in about.items() if name not in columns)
    yield ""
    found = {side: flat(figures) for side, figures in rows.items()}
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
    sides: Mapping[str, Callable[..., Figures]], repeats: int, main: str
) -> dict[str, Figures]:
    """Run sides alternately; return the figures of each side over all repeats.

    A float is the median of the repeats, an integer their maximum, all else that of the first.

    Args:
        sides: side -> function of `repeat`, the number of the repeat.
        repeats: number of runs of each side.
        main: figure that is printed after each run, and returned as a list, "..._of_repeats".
    """
    reports: dict[str, list[Figures]] = {side: [] for side in sides}
    for repeat, (side, measure) in itertools.product(range(repeats), sides.items()):
        reports[side].append(measure(repeat=repeat))
        print(f"{side}: {main} {reports[side][-1][main]:.4g}", file=sys.stderr)

    def over_repeats(values: Sequence[Any]) -> Any:
        if isinstance(values[0], float):
            return statistics.median(values)
        return max(values) if isinstance(values[0], int) else values[0]

    return {
        side: {name: over_repeats([x[name] for x in found]) for name in found[0]}
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
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    repeat: int = 0,
) -> Figures:
    """Run one side in a fresh process and return its figures; see `run_processes`.

    Args:
        side, repeat: name of the side and number of the repeat, for the job.
        job: JSON values; the process also gets `result`, the path where it writes its figures.
        folder: folder for files between the processes.
        command, env: command that gets the path of the job as its last argument; its environment.
    """
    path, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    for old in (result, log):
        old.unlink(missing_ok=True)
    path.write_text(json.dumps({**job, "side": side, "repeat": repeat, "result": str(result)}))
    run_processes(side, [[*command, str(path)]], log, env)
    return json.loads(result.read_text())


def run_processes(
    side: str,
    commands: Sequence[Sequence[str]],
    log: Path,
    env: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    is_done: Callable[[], bool] = lambda: False,
) -> None:
    """Run processes of a side together until all have ended; then kill their children.

    Args:
        side: name of the side in errors.
        commands, env: command line of each process; their environment, None: that of this process.
        log: file that gets their output.
        limit_s: time limit in seconds; None: an hour.
        is_done: polled, and called once after the end; if it is true, the processes are killed.

    Raises:
        ValueError: a process failed or took too long; its last lines go to stderr.
    """
    deadline = time.monotonic() + (limit_s := limit_s or TIMEOUT_S)
    with log.open("ab") as out, contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            # The process gets its own session, so that its children end with it.
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=env, start_new_session=True
            )
            stack.callback(_kill, process)
            processes.append(process)
        while True:
            codes = [process.poll() for process in processes]
            if is_done():
                return
            if any(codes) or None not in codes:
                break
            if time.monotonic() > deadline:
                raise ValueError(f"{side} took more than {limit_s:g} s. Give a smaller workload")
            time.sleep(_POLL_S)
    if any(codes):
        lines = log.read_text(errors="replace").strip().splitlines() or ["(no output)"]
        sys.stderr.write("".join(f"{line}\n" for line in lines[:-1][-30:]))
        raise ValueError(f"{side} failed with exit code {next(filter(None, codes))}: {lines[-1]}")


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main_command(preset: str, workdir: Path, fields: Mapping[str, Any]) -> list[str]:
    """Return the command that trains in a work directory with some fields of the config."""
    command = [sys.executable, "-m", "tba_jax.main", f"--config={preset}", f"--workdir={workdir}"]
    return command + [f"--config.{name}={value}" for name, value in fields.items()]


def timed_steps(workdir: Path, skip: int) -> list[Figures]:
    """Return the metrics of the steps of a run after step `skip`, with the parts of their time.

    `step_s` is the time from the end of the step before, `train_s` the time of training in it, and
    `search_s` the time in which the searcher works; a synchronous run searches while it does not
    train. A run without such a step is a ValueError.
    """
    records = read_jsonl(workdir / "metrics.jsonl")
    steps = [x for x in records if "train/loss" in x and x["step"] >= skip]
    if len(steps) < 2:
        raise ValueError(f"{workdir} has no step after step {skip}. Raise the number of steps")
    timed = []
    for before, step in itertools.pairwise(steps):
        step_s, train_s = step["time_s"] - before["time_s"], step["train/step_s"]
        idle_s = train_s
        if "search/idle_s" in step:
            idle_s = step["search/idle_s"] - before["search/idle_s"]
        timed.append(step | {"step_s": step_s, "search_s": step_s - idle_s, "train_s": train_s})
    return timed


# --- peer, machine and model -------------------------------------------------


def peer(python: str) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return command, environment and versions of TRL in an interpreter.

    The environment has no PYTHONPATH, and nothing is downloaded.

    Raises:
        ValueError: the interpreter does not run, or a package is missing.
    """
    packages = trl_peer.PACKAGES
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    code = f"import importlib.metadata as m; print(*map(m.version, {packages}))"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, env=env, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise ValueError(
            f"--peer_python={python}: {reason}. Give an interpreter with {', '.join(packages)}"
        ) from error
    versions = dict(zip(map(str, packages), done.stdout.split(), strict=True))
    return [python, "-P", trl_peer.__file__], env, versions


def here(platform_name: str | None = None) -> Figures:
    """Return figures about this machine and the versions of the packages.

    Args:
        platform_name: platform of the sides, if this process must not use the device itself.
    """
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search("model name.*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    packages = ("jax", "jaxlib", "flax", "optax", "jax-cuda12-plugin", "jax-cuda13-plugin")
    versions = {"python": platform.python_version()}
    for package in (*packages, "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "hardware": {
            "processor": name[1] if name else platform.processor(),
            "num_cores": len(os.sched_getaffinity(0)),
            "platform": platform_name or jax.default_backend(),
            "device": platform_name or jax.devices()[0].device_kind,
        },
        "versions": versions,
    }


def write_model(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write random weights in float32 for a config.json, with the start model's tokenizer."""
    config = families.transformer_config(settings)
    params = transformer.init_params(config, jax.random.key(0), np.dtype("float32"))
    hf_weights.save(folder, config, params, settings, tokenizer_files_from=START_MODEL)
