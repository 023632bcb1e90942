# SPDX-License-Identifier: Apache-2.0
"""Child processes that describe or compile a planned run, one process for each request.

A compiler may abort its process or take very long; the plan reports both and continues. A child
receives one JSON object on standard input and prints one JSON object as the last line of its
standard output (`compile_one` is its main program). This module imports no JAX.

Invariant: the caller always gets an `Answer`, and no child outlives its timeout.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

_MODULE = "tba_jax.planning.compile_one"
NO_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables with which libtpu neither looks for TPUs nor takes one, set before JAX is imported."""
_REMEDY = (
    "Set other mesh sizes or another --config.placement; docs/plan.md lists what each chip accepts"
)
_ERROR = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)(?::|$)")
_TOO_LARGE = re.compile(r"(?:total memory required|Used)[^()]*\(?([\d.]+)([KMGT])")


class Answer(NamedTuple):
    """Result of a child process.

    Attributes:
        value: JSON object of the answer; None if the child failed.
        failure: reason of the failure in one line; "" on success.
        is_user_error: the child refused the request with a message for the user.
        is_too_large: the compiler reported too little device memory.
        needed_bytes: memory that the compiler asked for if `is_too_large`; 0 if it named no size.
    """

    value: dict[str, Any] | None
    failure: str = ""
    is_user_error: bool = False
    is_too_large: bool = False
    needed_bytes: float = 0.0


def ask(request: Mapping[str, Any], *, timeout_s: float) -> Answer:
    """Run one child process and return its answer.

    Args:
        request: request for `compile_one.answer`.
    """
    environment = dict(os.environ)
    if request["topology"]:
        environment |= NO_TPU
    start = time.monotonic()
    try:
        child = subprocess.run(
            [sys.executable, "-m", _MODULE, str(os.getpid())],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"not compiled within {timeout_s:.0f} s; raise --timeout_s")
    seconds = time.monotonic() - start
    if child.returncode == 0:
        value = json.loads(child.stdout.splitlines()[-1])
        refusal = value.get("refusal", "")
        return Answer(None, refusal, is_user_error=True) if refusal else Answer(value)
    return _failure(child.returncode, child.stderr, seconds)


def _failure(returncode: int, stderr: str, seconds: float) -> Answer:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if returncode < 0:
        checks = [line for line in lines if "Check failed" in line or line.startswith("F0")]
        reason = checks[0] if checks else (lines[-1] if lines else "no output")
        name = {-6: "aborted", -9: "was killed (host memory may have run out)"}.get(
            returncode, f"ended with signal {-returncode}"
        )
        told = f"the compiler {name} after {seconds:.0f} s: {_brief(reason)}"
        return Answer(None, f"{told}. {_REMEDY}" if returncode == -6 else told)
    exhausted = [line for line in lines if "RESOURCE_EXHAUSTED" in line]
    if exhausted:
        found = _TOO_LARGE.search(exhausted[-1])
        unit = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
        needed = float(found[1]) * unit[found[2]] if found else 0.0
        reason = exhausted[-1].split("RESOURCE_EXHAUSTED:", 1)[1].strip()
        return Answer(None, _brief(reason), is_too_large=True, needed_bytes=needed)
    errors = [line for line in lines if _ERROR.match(line)]
    reason = (errors or lines or [f"exit code {returncode}"])[-1]
    return Answer(None, _brief(reason))


def _brief(line: str) -> str:
    return line if len(line) <= 240 else f"{line[:160]} ... {line[-70:]}"
