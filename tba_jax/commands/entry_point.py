# SPDX-License-Identifier: Apache-2.0
"""Entry point of every command: failures become one line on standard error and an exit code."""

import argparse
import ctypes
import gc
import importlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import logging as absl_logging

from tba_jax.commands.interruption import to_null
from tba_jax.devices.platform import prepare_process
from tba_jax.run.errors import tell

_MODULES = {  # of commands whose module has another name
    "main": "tba_jax.commands.train",
    "plan": "tba_jax.planning.command",
}
_PR_SET_PDEATHSIG = 1  # value in <linux/prctl.h>


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, even if the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser without arguments for a command or for a module such as "bench.decode".

    Args:
        description: text of --help; its lines stay as they are.
    """
    return argparse.ArgumentParser(
        prog=f"python -m tba_jax{'.' if '.' in name else ' '}{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run(name: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command of the package by its name, and exit with its code.

    Args:
        argv: arguments of the command; None: those of this process.
    """
    module = _MODULES.get(name, f"tba_jax.commands.{name}")
    if name == "main":
        gc.disable()  # until a run begins: imports make a million objects and no garbage
    code = run_command(lambda: importlib.import_module(module).main(argv))
    sys.stdout.flush()
    sys.stderr.flush()
    native = ("searcher-", "compiler")
    if any(t.daemon and t.name.startswith(native) for t in threading.enumerate()):
        os._exit(code)  # a thread in native code may crash during the interpreter's shutdown
    sys.exit(code)


def run_command(main: Callable[[], int]) -> int:
    """Run a command and return its exit code; print a failure as one line.

    A command whose output pipe is closed, as in `COMMAND | head`, prints nothing and returns the
    exit code of SIGPIPE.
    """
    prepare_process()
    # Orbax warns about folders that it only reads, and logs one failure with several tracebacks;
    # asyncio adds one for each array that it could not write.
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
    try:
        try:
            code = main()
        except SystemExit:  # argparse raises it after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # detects a full disk here instead of at the interpreter's exit
        return code
    except Exception as error:  # `tell` prints it
        is_unread = isinstance(error, BrokenPipeError) and _has_no_reader()
        if isinstance(error, OSError):
            try:
                sys.stdout.flush()
            except OSError:
                to_null(sys.stdout)  # so that the flush at exit succeeds
        return 128 + signal.SIGPIPE if is_unread else tell(error)


def _has_no_reader() -> bool:
    """Return whether standard output is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))
