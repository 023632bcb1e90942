# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a file that is read, its reader returns, or raises an error of one line.

FUZZ_EXAMPLES=1000 tries more contents.
"""

import json
import os

import hypothesis.strategies as st
import numpy as np
import pytest
from etils import epath
from hypothesis import HealthCheck, Phase, given, settings

from tba_jax.flow.state import pack_arrays, unpack_arrays
from tba_jax.report.files import load_run
from tba_jax.report.jsonl import JsonlWriter, read_jsonl
from tba_jax.report.page import render
from tba_jax.run import lock
from tba_jax.run.errors import UserError, is_mendable
from tba_jax.run.workdir import finished_report, run_id_of, saved_config
from tba_jax.storage import digests

NAMES = st.sampled_from(
    "config crc32c run_id run files versions eval after before step steps sync searcher version "
    "ids weights start_s end_s eval/metric train/loss staleness_histogram samples ledger kinds "
    "host pid beat question answer prompt driver num_steps fleet wall_s staleness "
    "economy rejected generated config_changes".split()
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats()
    | st.sampled_from(["", "x", "sync", "step", "eval", "\ud800", "9" * 5000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=12,
)
DEEP = st.sampled_from([b"[" * 50_000, b'{"a":' * 12_000, b"1" * 9_999, b"\xff\xfe{", b"\0" * 999])
LINE = JSON.map(lambda value: json.dumps(value).encode() + b"\n")
OBJECT = st.dictionaries(NAMES, JSON).map(lambda facts: json.dumps(facts).encode())
CONTENTS = st.binary(max_size=200) | DEEP | LINE | st.lists(LINE).map(b"".join) | OBJECT
WHOLE = pack_arrays({"x": np.arange(9)}, {})
few = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "20")),
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def hold(folder):
    with lock.hold(folder):
        pass


def report(folder):
    render(load_run(folder), {})


def keep(folder):
    log = JsonlWriter(folder / "metrics.jsonl")
    try:
        log.keep(lambda record: record["step"] <= 3)
    finally:
        log.close()


READERS = {
    "config.json": (saved_config, run_id_of, report),
    "report.json": (lambda folder: finished_report(folder, 3), report),
    "metrics.jsonl": (keep, report, lambda folder: read_jsonl(folder / "metrics.jsonl")),
    "heartbeat": (hold,),
    "digests.json": (lambda folder: digests.damage(epath.Path(folder)),),
    "host_buffer": (lambda folder: unpack_arrays((folder / "host_buffer").read_bytes()),),
}


@pytest.mark.parametrize("name", READERS)
def test_any_contents_are_read_or_refused_in_a_line(name, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    monkeypatch.setattr(lock, "EXPIRE_S", 0.05)
    (tmp_path / "report.html").write_text("")
    contents = CONTENTS
    if name == "host_buffer":
        contents |= st.tuples(st.integers(0, len(WHOLE)), st.binary(min_size=1, max_size=9)).map(
            lambda cut: WHOLE[: cut[0]] + cut[1] + WHOLE[cut[0] + len(cut[1]) :]
        )

    @few
    @given(contents)
    def read(content):
        (tmp_path / "metrics.jsonl").write_bytes(b"")
        (tmp_path / name).write_bytes(content)
        for reader in READERS[name]:
            try:
                reader(tmp_path)
            except Exception as error:
                assert is_mendable(error), (reader, error)
                assert str(error) and "\n" not in str(error), error
                assert isinstance(error, UserError | ValueError | RuntimeError)

    read()
