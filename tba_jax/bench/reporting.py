# SPDX-License-Identifier: Apache-2.0
"""Flags and output that the benchmark commands share.

Invariant: a result contains the command and the date.
"""

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def add_comparison_flags(parser: argparse.ArgumentParser, peers: str) -> None:
    """Define the flags of a benchmark whose sides run in separate processes.

    Args:
        parser: gets --peers, --peer_python, --dtype, --repeats and --seed.
        peers: names that --peers takes, for its help.
    """
    parser.add_argument("--peers", default="", help=f"comma-separated: {peers}")
    parser.add_argument("--peer_python", default=sys.executable, help="interpreter with the peers")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3, help="processes per side")
    parser.add_argument("--seed", type=int, default=0)


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], Iterable[str]],
) -> int:
    """Parse, measure and print; return the exit code.

    Args:
        parser: its `prog` is the command as a user types it. It gets the flag --json: the result
            as a JSON object, the last line of output.
        argv: arguments; None: of this process.
        measure: gives the figures by name; a ValueError is a mistake of the user's.
        table: the result, with `command` and `date`, as lines to read.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser.add_argument("--json", action="store_true", help="last line of output: a JSON object")
    args = parser.parse_args(argv)
    try:
        result = measure(args)
    except ValueError as error:
        print(f"{parser.prog.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 1
    result["command"] = shlex.join([*parser.prog.split(), *argv])
    result["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    for line in table(result):
        print(line)
    if args.json:
        print(json.dumps(result))
    return 0
