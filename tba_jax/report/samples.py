# SPDX-License-Identifier: Apache-2.0
"""Responses of samples.jsonl, for the pages."""

import itertools
from pathlib import Path
from typing import Any

from tba_jax.report.jsonl import parse_line, read_lines
from tba_jax.report.words import shown


def _group(line: bytes) -> bytes:
    """Return the beginning of a line that the responses of one step or evaluation share."""
    return line[: line.find(b'"prompt_id"')]


def read_samples(path: Path, most_bytes: int) -> list[dict[str, Any]]:
    """Return the responses of evenly spaced steps of the log.

    Args:
        path: path of samples.jsonl, which need not exist.
        most_bytes: limit on the bytes of the returned lines.

    Raises:
        ValueError: one of the returned lines is damaged.
    """
    stride = -(-path.stat().st_size // most_bytes) if path.exists() else 1
    groups = itertools.groupby(read_lines(path), lambda line: _group(line[1]))
    return [
        parse_line(f"{path}, line {number}", line)
        for index, (_, lines) in enumerate(groups)
        if index % stride == 0
        for number, line in lines
    ]


def newest_evaluation(path: Path) -> list[dict[str, Any]]:
    """Return the responses of the newest evaluation of a log, in the format of report.json.

    Raises:
        ValueError: the newest line of an evaluation is damaged.
    """
    lines: list[tuple[int, bytes]] = []
    for number, line in read_lines(path):
        if b'"eval"' in _group(line):
            lines = [x for x in lines if _group(x[1]) == _group(line)] + [(number, line)]
    records = [parse_line(f"{path}, line {number}", line) for number, line in lines]
    return [
        {**x, "after": "".join(x.get("tokens", [])), "after_reward": x.get("reward")}
        for x in records
    ]


def browser_data(path: Path, most_bytes: int) -> dict[str, list[Any]]:
    """Return what the script of the page reads, with each prompt once.

    Returns:
        prompts: [kind of the responses, prompt, answer]. rows: records of samples.jsonl, in which
        "prompt" is an index of `prompts`.

    Raises:
        ValueError: as in `read_samples`.
    """
    prompts: dict[tuple[str, str, str], int] = {}
    rows = []
    for sample in read_samples(path, most_bytes):
        key = sample["of"], shown(sample.get("prompt", "")), shown(sample.pop("answer", ""))
        sample["tokens"] = [shown(token) for token in sample.get("tokens", [])]
        rows.append({**sample, "prompt": prompts.setdefault(key, len(prompts))})
    return {"prompts": list(prompts), "rows": rows}
