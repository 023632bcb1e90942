# SPDX-License-Identifier: Apache-2.0
"""Runs the sides of a benchmark in fresh processes.

Invariant: a side that fails, hangs or lacks a package raises one ValueError with the reason.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 3600


def run_side(
    side: str,
    job: Mapping[str, Any],
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    command: Sequence[str],
) -> dict[str, Any]:
    """Run one job in a fresh process; return the contents of its result file `job["result"]`.

    Args:
        side: name of the side, for the job and for errors.
        job: JSON values.
        folder: folder for files between the processes.
        env: environment; None: the environment of this process.
        command: command that receives the path of the job as its last argument.

    Raises:
        ValueError: the process failed or took too long; its last lines go to stderr.
    """
    path, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    result.unlink(missing_ok=True)
    path.write_text(json.dumps({**job, "side": side, "result": str(result)}))
    with log.open("w") as out:
        try:
            done = subprocess.run(
                [*command, str(path)], stdout=out, stderr=out, env=env, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"{side} took more than {TIMEOUT_S} s. Give a smaller workload, or fewer --peers"
            ) from error
    if done.returncode or not result.exists():
        raise failure(side, done.returncode, log)
    return json.loads(result.read_text())


def run_job(path: str, measure: Callable[[dict[str, Any]], Any]) -> int:
    """Measure the job of a JSON file from `run_side`; write the result to the path in the job."""
    job = json.loads(Path(path).read_text())
    Path(job["result"]).write_text(json.dumps(measure(job)))
    return 0


def failure(side: str, code: int | None, log: Path) -> ValueError:
    """Return the error of a failed process; the end of its output goes to stderr."""
    lines = log.read_text().strip().splitlines() or ["(no output)"]
    sys.stderr.write("\n".join(lines[:-1][-30:]) + "\n" if lines[1:] else "")
    return ValueError(f"{side} failed with exit code {code}: {lines[-1]}")


def peers_of(text: str, packages_of: Mapping[str, Sequence[str]], python: str) -> list[str]:
    """Return the peers of --peers; check that they are known and their packages are installed.

    Args:
        text: names separated by commas.
        packages_of: peer -> packages that it imports.
        python: interpreter that would run the peers.

    Raises:
        ValueError: a peer is unknown, the interpreter does not run, or a package is missing.
    """
    peers = [name for name in text.split(",") if name]
    for name in peers:
        if name not in packages_of:
            raise ValueError(
                f"--peers: unknown peer {name!r}; known peers: {', '.join(packages_of)}. Give "
                "some of them, separated by commas, or remove --peers"
            )
    for name in peers:
        packages = tuple(packages_of[name])
        code = (
            "import importlib.util as u, sys; "
            f"print(*[n for n in {packages} if u.find_spec(n) is None])"
        )
        try:
            done = subprocess.run(
                [python, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                f"--peer_python={python} does not run: {error}. Give a Python interpreter"
            ) from error
        if done.stdout.strip():
            raise ValueError(
                f"peer {name} needs {', '.join(done.stdout.split())}, absent from {python}. "
                "Install the packages there, or give another --peer_python"
            )
    return peers


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def hardware(report: Mapping[str, Any]) -> dict[str, Any]:
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
