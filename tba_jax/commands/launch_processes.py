# SPDX-License-Identifier: Apache-2.0
"""Command: run the main command as several processes of one pod on this machine.

    python -m tba_jax launch_processes --num_processes=2 -- [ARGUMENTS OF tba_jax.main]

Every output line starts with the number of its process. When a process fails, this command prints
which process failed first and how. It waits for the other processes to end, kills those that do
not end, and returns an error code. Signals are forwarded to all processes.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from tba_jax.commands.entry_point import make_parser
from tba_jax.commands.interruption import handling, surviving_closed_outputs

# JAX notices a dead process within 30 s and ends the others.
GRACE_S = 45.0
_POLL_S = 0.1


def launch(
    num_processes: int,
    arguments: Sequence[str],
    *,
    command: Sequence[str] = (sys.executable, "-m", "tba_jax.main"),
    grace_s: float = GRACE_S,
) -> int:
    """Run the processes to their end.

    Args:
        arguments: arguments of the command; flags that identify each process are added.
        grace_s: seconds after the first failure for the others to end by themselves.

    Returns:
        0 on success, else the exit code of the first process that failed (128 + the number of the
        signal that killed it).
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    who = [f"--coordinator={coordinator}", f"--num_processes={num_processes}"]
    processes: list[subprocess.Popen[bytes]] = []
    printers: list[threading.Thread] = []

    def forward(number: int, frame: object) -> None:
        del frame
        for process in processes:
            process.send_signal(number)  # does nothing after the process has ended

    with contextlib.ExitStack() as stack:
        stack.enter_context(handling(forward))
        stack.enter_context(surviving_closed_outputs())
        for i in range(num_processes):
            process = subprocess.Popen(
                [*command, *arguments, *who, f"--process_id={i}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A separate session, so that Ctrl-C reaches each process once, from `forward`.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            processes.append(process)
            stack.callback(_kill, process)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                printer = threading.Thread(target=_print_lines, args=(i, source, target))
                printer.daemon = True
                printer.start()
                printers.append(printer)
        code = _wait(processes, grace_s)
        for printer in printers:
            printer.join(grace_s)
        return code


def _print_lines(number: int, source: IO[bytes], target: IO[str]) -> None:
    with source:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            target.write(f"[{number}] {text}\n")
            target.flush()


def _wait(processes: Sequence["subprocess.Popen[bytes]"], grace_s: float) -> int:
    """Wait until every process has ended; kill the others some time after the first failure."""
    first, deadline = 0, float("inf")
    while True:
        codes = [process.poll() for process in processes]
        failed = [(i, code) for i, code in enumerate(codes) if code]
        if failed and not first:
            i, code = failed[0]
            first, deadline = code if code > 0 else 128 - code, time.monotonic() + grace_s
            how = f"exited with {code}"
            if code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            _print_error(
                f"process {i} {how}, the first of {len(processes)} to fail; its last lines are "
                f"above. The others have {grace_s:.0f} s to end. Run the same command again to "
                "continue from the newest checkpoint"
            )
        if None not in codes:
            return first
        if time.monotonic() > deadline:
            for i, process in enumerate(processes):
                if _kill(process):
                    _print_error(f"process {i} did not end by itself: killed")
        time.sleep(_POLL_S)


def _print_error(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def _kill(process: "subprocess.Popen[bytes]") -> bool:
    """Kill a running process with its reward workers; return whether it was running."""
    if process.poll() is not None:
        return False
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10.0)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = make_parser("launch_processes", __doc__)
    parser.add_argument("--num_processes", type=int, required=True, help="processes of the pod")
    parser.add_argument("arguments", nargs="*", help="after --: arguments of tba_jax.main")
    args: Any = parser.parse_args(argv)
    if args.num_processes < 1:
        raise ValueError(f"--num_processes={args.num_processes}: wanted at least 1")
    return launch(args.num_processes, args.arguments)
