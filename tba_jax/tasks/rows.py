# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets: JSON on disk, Parquet, the Hugging Face hub, or a taskset of verifiers.

A source is a folder with train.jsonl and test.jsonl (or .json, .parquet, or the hub's
train-*.parquet), a single file, hf://NAME[:CONFIGURATION] or verifiers:TASKSET. Packages for
Parquet and the hub are optional. Invariant: readers yield every row with its place (file and line),
for messages.
"""

import functools
import glob
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

Split = Literal["train", "test", "validation"]
Placed = tuple[str, dict[str, Any]]
"""(place of the row for messages, row)."""

HUB_PREFIX, TASKSET_PREFIX = "hf://", "verifiers:"
FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
_TASKSET_S = 900  # longest time for the rows of a taskset, which may download them


def has_split(source: str, split: Split) -> bool:
    """Return whether the source has this split; a single file has none."""
    if source.startswith(HUB_PREFIX):
        return split in _from_hub(source, "get_dataset_split_names")
    if source.startswith(TASKSET_PREFIX):
        return any(row["split"] == split for row in _taskset(source))
    return os.path.isdir(source) and bool(_of_split(source, split))


def read_rows(source: str, split: Split) -> Iterator[Placed]:
    """Yield (place, row) of every row of a split in order; for a single file, all rows.

    Raises:
        ValueError: data is missing, or a row is malformed (the message has file and line).
    """
    found = None
    for found in _rows(source, split):
        yield found
    if found is None:
        raise ValueError(f"{source} has no rows; wanted one JSON object per line. Add rows")


def _rows(source: str, split: Split) -> Iterator[Placed]:
    name = source.removeprefix(HUB_PREFIX).partition(":")[0]
    if source.startswith(HUB_PREFIX):
        for index, row in enumerate(_from_hub(source, "load_dataset", split=split)):
            yield f"{name}, {split} row {index}", _plain(row)
    elif source.startswith(TASKSET_PREFIX):
        for row in _taskset(source):
            if row["split"] == split:
                yield f"{source}, task {row['task']}", row
    else:
        files = _of_split(source, split) if os.path.isdir(source) else [source]
        for path in files or [f"{os.path.join(source, split)}.jsonl"]:
            is_file = os.path.isfile(path) and os.access(path, os.R_OK)  # a pipe waits for a writer
            if not is_file or not path.endswith(FILE_SUFFIXES):
                raise _unreadable(
                    path,
                    f"no readable file with a name that ends in {', '.join(FILE_SUFFIXES)}",
                    "Set task.data_path to a folder with train.jsonl and test.jsonl, to a file, or "
                    "to hf://NAME of a data set on the hub",
                )
            yield from _parquet_rows(path) if path.endswith(".parquet") else _json_rows(path)


def _of_split(folder: str, split: Split) -> list[str]:
    """Return the files of a split in a folder; raise ValueError if they have two formats."""
    stem = os.path.join(glob.escape(folder), split)
    kinds = [sorted(glob.glob(stem + end)) for end in (*FILE_SUFFIXES, "-*.parquet")]
    found, *others = [files for files in kinds if files] or [[]]
    if others:
        raise ValueError(
            f"{folder} has both {found[0]} and {others[0][0]}, so the {split} split is ambiguous. "
            "Remove one of them"
        )
    return found


def _json_rows(path: str) -> Iterator[Placed]:
    """Yield (place, row) of each line that is not blank, or of each object in a .json file."""
    with open(path, "rb") as file:
        if path.endswith(".json"):
            found = _parsed(file.read(), path)
            if not isinstance(found, list):
                raise ValueError(
                    f"{path}: {found!r:.80} is not a list of objects. Write a list, or JSON lines "
                    "to a .jsonl file"
                )
            yield from (_named(row, f"{path}, row {index}") for index, row in enumerate(found))
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _named(_parsed(line, where), where)


def _parsed(text: bytes, where: str) -> Any:
    try:
        found = json.loads(text.decode("utf-8-sig"))
        # A text with half of a surrogate pair is JSON, but no tokenizer can encode it.
        json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:  # also for huge numbers, deep nesting
        got = text.decode(errors="replace").strip()[:80]
        problem = f"not JSON in UTF-8 ({error}); got {got!r}"
        raise ValueError(f"{where}: {problem}. Correct it") from None


def _named(row: Any, where: str) -> Placed:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {row!r:.80} is not an object with named columns. Correct it")
    return where, row


def _parquet_rows(path: str) -> Iterator[Placed]:
    library = _package("pyarrow.parquet", path)
    try:
        table = library.read_table(path)
    except (OSError, ValueError) as error:  # Arrow's own errors are kinds of them
        raise _unreadable(path, error, "Write it again, or convert it to JSON lines") from None
    for index, row in enumerate(table.to_pylist()):
        yield f"{path}, row {index}", _plain(row)


def _from_hub(source: str, function: str, **options: Any) -> Any:
    """Return the result of a function of `datasets` for a data set and its configuration."""
    name, _, configuration = source.removeprefix(HUB_PREFIX).partition(":")
    library = _package("datasets", f"{name} on the Hugging Face hub")
    try:
        return getattr(library, function)(name, configuration or None, **options)
    except (OSError, ValueError) as error:  # no connection, no such data set or configuration
        remedy = "Check name and configuration (hf://NAME:CONFIGURATION), or use local files"
        raise _unreadable(source, error, remedy) from None


@functools.cache
def _taskset(source: str) -> list[dict[str, Any]]:
    """Return the rows that a taskset of verifiers prints, and ignore its other lines."""
    module, name = "tba_jax.environments.verifiers_bridge", source.removeprefix(TASKSET_PREFIX)
    command = [sys.executable, "-P", "-m", module, name]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TASKSET_S)
    except subprocess.TimeoutExpired:
        raise _unreadable(source, f"no rows in {_TASKSET_S} s", "Load it once alone") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines() or [f"exit {done.returncode}"]
        remedy = "Install the taskset beside verifiers, whose Python TBA_JAX_VERIFIERS names"
        raise _unreadable(source, lines[-1], remedy)
    return [json.loads(x) for x in done.stdout.splitlines() if x.startswith(b'{"prompt"')]


def _package(name: str, source: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"{source} needs the package `{name.partition('.')[0]}`. Install it: pip install "
            "'tba_jax[hub]', or convert the data to JSON lines"
        ) from None


def _unreadable(source: str, why: Exception | str, remedy: str) -> ValueError:
    line = (str(why).splitlines() or [type(why).__name__])[0]
    return ValueError(f"{source} cannot be read ({line}). {remedy}")


def _plain(value: Any) -> Any:
    """Return a value whose dates and times are texts (ISO 8601), as JSON needs."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.isoformat() if hasattr(value, "isoformat") else value
