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
from collections.abc import Callable, Mapping
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
_REPORT_S = 20.0  # time between two progress lines of a child
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


def ask(
    request: Mapping[str, Any],
    *,
    timeout_s: float,
    say: Callable[[str], None] = lambda line: None,
) -> Answer:
    """Run one child process and return its answer.

    Args:
        request: request for `compile_one.answer`.
        say: receives a line every 20 s while the child runs.
    """
    environment = dict(os.environ)
    if request["topology"]:
        environment |= NO_TPU
    start = time.monotonic()
    question: str | None = json.dumps(request)
    with subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as child:
        while True:
            left_s = start + timeout_s - time.monotonic()
            try:
                wait_s = max(0.0, min(_REPORT_S, left_s))
                stdout, stderr = child.communicate(question, timeout=wait_s)
                break
            except subprocess.TimeoutExpired:
                question = None  # standard input is written only once
                seconds = time.monotonic() - start
                if seconds >= timeout_s:
                    child.kill()
                    return Answer(None, f"not compiled within {timeout_s:.0f} s (--timeout_s)")
                say(f"still {_work(request)}: {seconds:.0f} s")
            except BaseException:
                child.kill()
                raise
    seconds = time.monotonic() - start
    if child.returncode == 0:
        value = json.loads(stdout.splitlines()[-1])
        refusal = value.get("refusal", "")
        return Answer(None, refusal, is_user_error=True) if refusal else Answer(value)
    return _failure(child.returncode, stderr, seconds)


def _work(request: Mapping[str, Any]) -> str:
    program = request["program"]
    return f"compiling {program}" if program else "reading the config and choosing its placement"


def _failure(returncode: int, stderr: str, seconds: float) -> Answer:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if returncode < 0:
        checks = [line for line in lines if "Check failed" in line or line.startswith("F0")]
        reason = checks[0] if checks else (lines[-1] if lines else "no output")
        name = {-6: "aborted", -9: "was killed (host memory may have run out)"}.get(
            returncode, f"ended with signal {-returncode}"
        )
        return Answer(None, f"the compiler {name} after {seconds:.0f} s: {_brief(reason)}")
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
