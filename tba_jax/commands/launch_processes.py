# SPDX-License-Identifier: Apache-2.0
"""Command: run the main command as several processes of one pod on this machine.

    python -m tba_jax.launch_processes --num_processes=2 -- --config=math \
        --config.placement=pod [ARGUMENTS OF tba_jax.main]

Every output line starts with the number of its process. When a process fails, this command prints
which process failed first and how. It waits for the other processes to end, kills those that do
not end, and returns an error code. Signals are forwarded to all processes.
"""

import argparse
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from tba_jax.commands.interruption import not_ignored, surviving_closed_outputs

# JAX notices a dead process within 30 s and ends the others.
GRACE_S = 45.0
_POLL_S = 0.5


class _Child:
    """A process, and the last line of its output while it is incomplete."""

    def __init__(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        self.number = number
        self.process = process
        self._partial = {"out": b"", "err": b""}

    def show(self, data: bytes, stream: str, out: IO[str]) -> None:
        """Print complete lines; empty `data` ends the stream, and prints the last partial line."""
        text = self._partial[stream] + data
        end = text.rfind(b"\n") + 1 if data else len(text)
        self._partial[stream] = text[end:]
        for line in text[:end].decode(errors="replace").splitlines():
            print(f"[{self.number}] {line}", file=out, flush=True)


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def describe_exit(code: int) -> str:
    """Describe how a process ended, from `Popen.returncode`."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


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
    coordinator = f"127.0.0.1:{_free_port()}"
    interruptions: list[int] = []
    previous = {
        number: signal.signal(number, lambda n, frame: interruptions.append(n))
        for number in not_ignored()
    }
    children: list[_Child] = []
    try:
        for i in range(num_processes):
            who = [
                f"--coordinator={coordinator}",
                f"--num_processes={num_processes}",
                f"--process_id={i}",
            ]
            process = subprocess.Popen(
                [*command, *arguments, *who],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A separate session, so that Ctrl-C reaches each process once, from `_watch`.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
            children.append(_Child(i, process))
        with surviving_closed_outputs():
            return _watch(children, interruptions, grace_s)
    finally:
        for child in children:
            _kill(child)
            for stream in (child.process.stdout, child.process.stderr):
                if stream is not None:
                    stream.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(children: Sequence[_Child], interruptions: list[int], grace_s: float) -> int:
    """Forward output and signals until every process has ended."""
    selector = selectors.DefaultSelector()
    for child in children:
        for stream, name in ((child.process.stdout, "out"), (child.process.stderr, "err")):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, (child, name))
    first: int | None = None
    deadline = float("inf")
    while selector.get_map():
        for key, _ in selector.select(_POLL_S):
            child, name = key.data
            data = os.read(key.fd, 65536)
            child.show(data, name, sys.stdout if name == "out" else sys.stderr)
            if not data:
                selector.unregister(key.fileobj)
        while interruptions:
            number = interruptions.pop()
            for child in children:
                if child.process.poll() is None:
                    child.process.send_signal(number)
        for child in children:
            code = child.process.poll()
            if code and first is None:
                first = code if code > 0 else 128 - code
                deadline = time.monotonic() + grace_s
                print(
                    f"error: process {child.number} {describe_exit(code)}, the first of "
                    f"{len(children)} to fail; its last lines are above. The others have "
                    f"{grace_s:.0f} s to end. Run the same command again to continue from the "
                    "newest checkpoint",
                    file=sys.stderr,
                    flush=True,
                )
        if time.monotonic() > deadline:
            deadline = float("inf")
            for child in children:
                if _kill(child):
                    print(
                        f"error: process {child.number} did not end by itself: killed",
                        file=sys.stderr,
                        flush=True,
                    )
    for child in children:
        code = child.process.wait(grace_s)
        if code and first is None:
            first = code if code > 0 else 128 - code
    return first or 0


def _kill(child: _Child) -> bool:
    """Kill a running process with its reward workers; return whether it was running."""
    if child.process.poll() is not None:
        return False
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait(10.0)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.launch_processes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--num_processes", type=int, required=True, help="processes of the pod")
    parser.add_argument("arguments", nargs="*", help="after --: arguments of tba_jax.main")
    args: Any = parser.parse_args(argv)
    if args.num_processes < 1:
        parser.error(f"--num_processes={args.num_processes}: wanted at least 1")
    return launch(args.num_processes, args.arguments)


if __name__ == "__main__":
    sys.exit(main())
