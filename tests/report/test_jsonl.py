# SPDX-License-Identifier: Apache-2.0
"""Logs of JSON lines: whole lines, cut back without being read, streamed."""

import json
import math
import os

import numpy as np
import pytest

from tba_jax.report import jsonl


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_writes_numbers_lists_and_null_for_nan(tmp_path):
    writer = jsonl.JsonlWriter(tmp_path / "deep" / "m.jsonl")
    writer.write(3, {"a": np.float32(0.5), "b": math.nan, "c": [[1, np.int64(2)]], "d": math.inf})
    writer.close()
    expected = {"step": 3, "a": 0.5, "b": None, "c": [[1, 2]], "d": None}
    assert lines_of(tmp_path / "deep" / "m.jsonl") == [expected]


def test_jsonl_cuts_a_line_torn_by_a_kill(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert jsonl.read_jsonl(path) == [{"step": 1}]
    writer = jsonl.JsonlWriter(path)
    writer.write(2, {})
    writer.close()
    assert lines_of(path) == [{"step": 1}, {"step": 2}]


def test_read_jsonl_names_file_and_line_of_damage(tmp_path):
    path = tmp_path / "m.jsonl"
    assert jsonl.read_jsonl(path) == []
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: not JSON .*nonsense"):
        jsonl.read_jsonl(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: .*expected a JSON object"):
        jsonl.read_jsonl(path)


def log_of(path, num_lines):
    writer = jsonl.JsonlWriter(path)
    for step in range(num_lines):
        writer.write(step, {"text": "x" * 90})
    return writer


def test_keep_does_not_read_what_lies_before_its_start(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = log_of(path, 6)
    start = writer.num_bytes()
    for step in range(6, 9):
        writer.write(step, {})
    with open(path, "r+b") as file:
        file.write(b"damaged")  # a reader of the whole would stumble
    writer.keep(lambda record: record["step"] == 7, start)
    writer.write(10, {})
    writer.close()
    with open(path, "rb") as file:
        file.seek(start)
        assert [json.loads(line)["step"] for line in file] == [7, 10]
    assert os.listdir(tmp_path) == ["m.jsonl"]
