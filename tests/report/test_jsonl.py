# SPDX-License-Identifier: Apache-2.0
"""Logs of JSON lines: whole lines only, cut back whole, damage with file and line."""

import math
import os

import numpy as np
import pytest

from tba_jax.report import jsonl


def test_a_log_has_whole_lines_with_null_for_what_is_not_finite(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')  # torn by a kill
    assert jsonl.read_jsonl(path) == [{"step": 1}]
    writer = jsonl.JsonlWriter(path)
    writer.write(3, {"a": np.float32(0.5), "b": math.nan, "c": [[1, np.int64(2)]], "d": math.inf})
    writer.close()
    last = {"step": 3, "a": 0.5, "b": None, "c": [[1, 2]], "d": None}
    assert jsonl.read_jsonl(path) == [{"step": 1}, last]


def test_read_jsonl_names_file_and_line_of_damage(tmp_path):
    path = tmp_path / "m.jsonl"
    assert jsonl.read_jsonl(path) == []
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: not JSON .*nonsense"):
        jsonl.read_jsonl(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: .*expected a JSON object"):
        jsonl.read_jsonl(path)


def test_keep_drops_records_and_a_line_without_the_field_leaves_the_log(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = jsonl.JsonlWriter(path)
    for step in range(4):
        writer.write(step, {})
    writer.keep(lambda record: record["step"] < 2)
    writer.append({"text": "no step"})
    before = path.read_bytes()
    with pytest.raises(jsonl.LogError, match=r"m\.jsonl, line 3: a field is missing"):
        writer.keep(lambda record: record["step"] < 1)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.jsonl"]
    writer.write(9, {})
    writer.close()
    assert jsonl.read_jsonl(path) == [{"step": 0}, {"step": 1}, {"text": "no step"}, {"step": 9}]
