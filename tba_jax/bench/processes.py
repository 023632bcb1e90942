# SPDX-License-Identifier: Apache-2.0
"""What benchmarks with several sides share: each side in a fresh process, and whether it can run.

It does not know what is measured. The invariant it owns: a side that fails, hangs or lacks a
package is one ValueError that says which, and why.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
    """Do one job in a fresh process; what it writes to the file `job["result"]` that it is given.

    Args:
        side: what the process is to do, and its name in errors.
        job: JSON values.
        folder: for messages between the processes.
        env: environment; None: ours.
        command: gets the path of the job as its last argument.

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
                f"{side} took more than {TIMEOUT_S} s. Give a smaller load, or fewer --peers"
            ) from error
    if done.returncode or not result.exists():
        lines = log.read_text().strip().splitlines() or ["(it said nothing)"]
        sys.stderr.write("\n".join(lines[:-1][-30:]) + "\n" if lines[1:] else "")
        raise ValueError(f"{side} failed with exit code {done.returncode}: {lines[-1]}")
    return json.loads(result.read_text())


def check_peers(
    peers: Sequence[str], packages_of: Mapping[str, Sequence[str]], python: str
) -> None:
    """See that every peer is known and that its packages are there.

    Args:
        peers: names given with --peers.
        packages_of: by the name of a peer, what it imports.
        python: the interpreter that would run them.

    Raises:
        ValueError: an unknown peer, an interpreter that does not run, a missing package.
    """
    for name in peers:
        if name not in packages_of:
            raise ValueError(
                f"unknown peer {name!r} in --peers; known are {', '.join(packages_of)}. Give some "
                "of them, separated by commas, or leave --peers out"
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
                "Install the extra `bench` (pip install 'tba_jax[bench]'), or give --peer_python"
            )


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
