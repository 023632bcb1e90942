# SPDX-License-Identifier: Apache-2.0
"""Flags and output that the benchmark commands share.

Invariant: a result contains the command and the date.
"""

import argparse
import datetime
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.devices.platform import prepare_process


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m tba_jax.bench.NAME`."""
    return argparse.ArgumentParser(
        prog=f"python -m tba_jax.bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Define --dtype, --repeats and --seed of a benchmark that measures in fresh processes."""
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=3, help="processes per side")
    parser.add_argument("--seed", type=int, default=0)


def check_least(args: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raise ValueError if a flag is below its minimum; a flag that is None is not checked."""
    for name, value in least.items():
        given = getattr(args, name)
        if given is not None and given < value:
            raise ValueError(f"got --{name}={given}; wanted at least {value}")


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], Iterable[str]],
) -> int:
    """Parse, measure and print; return the exit code.

    Args:
        parser: parser whose `prog` is the command as a user types it. It gets the flag --json,
            which prints the result as a JSON object in the last line of output.
        argv: command-line arguments; None: those of this process.
        measure: returns the result by name; a ValueError is printed as one line.
        table: formats the result, with `command` and `date`, as lines of text.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser.add_argument("--json", action="store_true", help="last line of output: a JSON object")
    args = parser.parse_args(argv)
    prepare_process()
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


def run_in_folder(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace, Path], dict[str, Any]],
    table: Callable[[dict[str, Any]], Iterable[str]],
) -> int:
    """Do `run_command` with a `measure` that also receives an empty temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        return run_command(parser, argv, lambda args: measure(args, Path(folder)), table)


def columns(rows: Iterable[Mapping[str, Any]], formats: Mapping[str, str]) -> list[str]:
    """Return rows as aligned columns, after a line of titles.

    Args:
        rows: fields of each row; a cell whose field is missing is empty.
        formats: title -> format of the cell, such as "{step_s:.2f} s".
    """

    def cell(row: Mapping[str, Any], form: str) -> str:
        try:
            return form.format_map(row)
        except KeyError:
            return ""

    lines = [list(formats), *([cell(row, form) for form in formats.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(x.rjust(n) for x, n in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
