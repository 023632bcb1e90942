# SPDX-License-Identifier: Apache-2.0
"""Responses of samples.jsonl, for the list on the page."""

import itertools
from pathlib import Path
from typing import Any

from tba_jax.report.jsonl import parse_line, read_lines
from tba_jax.report.words import shown


def browser_data(path: Path, most_bytes: int) -> dict[str, list[Any]]:
    """Return the data of the page's script: responses of evenly spaced steps of the log.

    Args:
        path: path of samples.jsonl, which need not exist.
        most_bytes: limit on the bytes of the chosen lines.

    Returns:
        prompts: [kind of the responses, prompt, answer], each once. rows: records of samples.jsonl,
        in which "prompt" is an index of `prompts`.

    Raises:
        ValueError: one of the chosen lines is damaged.
    """
    stride = -(-path.stat().st_size // most_bytes) or 1 if path.exists() else 1
    prompts: dict[tuple[str, str, str], int] = {}
    rows = []
    # Lines of one step or evaluation begin alike.
    steps = itertools.groupby(read_lines(path), lambda x: x[1].partition(b'"prompt_id"')[0])
    for index, (_, lines) in enumerate(steps):
        for number, line in () if index % stride else lines:
            sample = parse_line(f"{path}, line {number}", line)
            key = sample["of"], shown(sample.get("prompt", "")), shown(sample.pop("answer", ""))
            sample["tokens"] = [shown(token) for token in sample.get("tokens", [])]
            rows.append({**sample, "prompt": prompts.setdefault(key, len(prompts))})
    return {"prompts": list(prompts), "rows": rows}
