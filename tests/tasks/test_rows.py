# SPDX-License-Identifier: Apache-2.0
"""Rows from JSON lines, Parquet and the hub, and the place that each is from."""

import datetime
import json
import os
import sys
import types

import pytest

from tba_jax.tasks.rows import has_split, read_rows

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]


def test_json_comes_with_line_or_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "n": 1}\r\n\n{"prompt": "b", "n": 2}')
    wanted = [(f"{path}, line 1", ROWS[0]), (f"{path}, line 3", ROWS[1])]
    assert list(read_rows(str(path), "train")) == wanted
    assert not has_split(str(path), "test")
    path = tmp_path / "train.json"  # a list
    path.write_text(json.dumps(ROWS))
    wanted = [(f"{path}, row {i}", row) for i, row in enumerate(ROWS)]
    assert list(read_rows(str(tmp_path), "train")) == list(read_rows(str(path), "train")) == wanted


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"prompt": "a"}\n{"p": ', r"line 2: not JSON .*\); got '\{\"p"),
        ("rows.jsonl", b'[{"prompt": "a"}]', r"line 1: \[\{.* is not an object with named columns"),
        ("rows.jsonl", b'{"a": [{"b\\ud800": 1}]}', "line 1: not JSON .*surrogates not allowed"),
        ("rows.jsonl", b"\n \n", r"rows\.jsonl has no rows; wanted one JSON object per line"),
        ("rows.json", b'{"data": []}', r"rows\.json: {'data': \[\]} is not a list of objects"),
        ("rows.json", b'{"a": 1}\n{"a": 2}', r"rows\.json: not JSON .*Extra data"),
    ],
)
def test_a_malformed_line_or_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(f"{tmp_path}/{name}", "train"))


def test_parquet_files_and_shards_are_read_in_order(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, rows in (("00001", ROWS[1:]), ("00000", ROWS[:1])):
        path = tmp_path / f"train-{name}-of-00002.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), str(path))
    (tmp_path / "test.parquet").write_bytes(b"no parquet")
    assert has_split(str(tmp_path), "test")
    names = [f"{tmp_path}/train-0000{i}-of-00002.parquet, row 0" for i in (0, 1)]
    assert list(read_rows(str(tmp_path), "train")) == [*zip(names, ROWS, strict=True)]
    dated = pyarrow.Table.from_pylist([{"seen": [datetime.date(2026, 1, 2)]}])
    parquet.write_table(dated, f"{tmp_path}/dated.parquet")
    assert [row for _, row in read_rows(f"{tmp_path}/dated.parquet", "train")] == [
        {"seen": ["2026-01-02"]}
    ]
    with pytest.raises(ValueError, match=r"test\.parquet cannot be read \("):
        list(read_rows(str(tmp_path), "test"))


def test_a_pipe_and_a_split_in_two_formats_are_refused(tmp_path):
    os.mkfifo(tmp_path / "train.jsonl")  # opening it waits for a writer
    with pytest.raises(ValueError, match=r"train\.jsonl cannot be read \(no readable f"):
        [*read_rows(str(tmp_path), "train")]
    # Nor are two files of one split read.
    (tmp_path / "train.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has both .*train\.jsonl and .*train\.parquet, so the"):
        list(read_rows(str(tmp_path), "train"))


def test_a_taskset_of_verifiers_has_rows_of_both_splits(tmp_path, monkeypatch):
    python = tmp_path / "python"  # in the place of an interpreter with verifiers
    rows = [
        {"prompt": "a", "task": 0, "split": "test"},
        {"prompt": "b", "task": 1, "split": "train"},
    ]
    lines = "".join(f"echo '{json.dumps(row)}'\n" for row in rows)
    python.write_text(
        f"#!/bin/sh\necho loading\n{lines}[ $3 != sums ] && echo absent >&2 && exit 1\nexit 0"
    )
    python.chmod(0o700)
    monkeypatch.setenv("TBA_JAX_VERIFIERS", str(python))
    assert list(read_rows("verifiers:sums", "train")) == [("verifiers:sums, task 1", rows[1])]
    assert has_split("verifiers:sums", "test")
    with pytest.raises(ValueError, match=r"verifiers:other cannot be read \(absent\). Install the"):
        has_split("verifiers:other", "test")
    monkeypatch.setattr("tba_jax.tasks.rows._TASKSET_S", 0.01)
    with pytest.raises(ValueError, match=r"verifiers:slow cannot be read \(no rows in 0.01 s\)"):
        has_split("verifiers:slow", "test")


def test_hub_names_carry_a_configuration(monkeypatch):
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return ROWS

    library = {"load_dataset": load_dataset, "get_dataset_split_names": lambda *of: ["train"]}
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(**library))
    found = list(read_rows("hf://openai/gsm8k:main", "train"))
    assert found == [(f"openai/gsm8k, train row {i}", row) for i, row in enumerate(ROWS)]
    assert not has_split("hf://org/name", "test")
    assert asked == [("openai/gsm8k", "main", "train")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"package `datasets`. Install it: .*'tba_jax\[hub"):
        has_split("hf://org/name", "test")
