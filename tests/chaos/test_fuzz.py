# SPDX-License-Identifier: Apache-2.0
"""Whatever is in a file that is read, its reader returns, or raises what is told in one line."""

import json
import os

import hypothesis.strategies as st
import numpy as np
import pytest
from etils import epath
from hypothesis import HealthCheck, Phase, given, settings

from tba_jax.flow.state import PartState
from tba_jax.report.files import load_run
from tba_jax.report.jsonl import JsonlWriter, read_jsonl
from tba_jax.report.page import render
from tba_jax.run import lock
from tba_jax.run.checkpoint import pack, unpack
from tba_jax.run.errors import UserError, is_mendable
from tba_jax.run.lock import Hold
from tba_jax.run.workdir import is_finished, run_id_of, saved_config
from tba_jax.storage import digests
from tba_jax.storage.steps import READ_ERRORS

NAMES = st.sampled_from(
    "config crc32c run_id files versions eval after before step steps event sync chunk round "
    "searcher version tickets begins ids weights bucket start_s end_s eval/metric "
    "train/loss staleness_histogram samples ledger kinds host machine pid began beat released "
    "question answer prompt model_type weight_map report driver num_steps kinds host fleet "
    "by_searcher wall_s staleness economy rejected generated config_changes".split()
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats()
    | st.sampled_from(["", "x", "sync", "step", "chunk", "round", "eval", "\ud800", "9" * 5000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=12,
)
DEEP = st.sampled_from([b"[" * 50_000, b'{"a":' * 12_000, b"1" * 9_999, b"\xff\xfe{", b"\0" * 999])
CONTENTS = (
    st.binary(max_size=200)
    | DEEP
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.lists(JSON.map(lambda value: json.dumps(value).encode() + b"\n")).map(b"".join)
)
OBJECT = st.dictionaries(NAMES, JSON).map(lambda facts: json.dumps(facts).encode())
few = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "20")),
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def hold(folder):
    with Hold(folder):
        return True


def report(folder):
    run = load_run(folder)
    return render(run, {})


def keep(folder):
    log = JsonlWriter(folder / "metrics.jsonl")
    try:
        log.keep(lambda record: record["step"] <= 3)
    finally:
        log.close()


READERS = {
    "config.json": (saved_config, run_id_of, report),
    "report.json": (lambda folder: is_finished(folder, 3), report),
    "metrics.jsonl": (keep, report, lambda folder: read_jsonl(folder / "metrics.jsonl")),
    "heartbeat.json": (hold,),
    "checkpoints/3/digests.json": (lambda f: digests.damage(epath.Path(f / "checkpoints/3")),),
    "checkpoints/3/host.npz": (lambda f: unpack((f / "checkpoints/3/host.npz").read_bytes()),),
}
# What readers raise that their callers tell.
TOLD = {"checkpoints/3/host.npz": READ_ERRORS}


@pytest.mark.parametrize("name", READERS)
def test_any_contents_are_read_or_refused_in_a_line(name, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    monkeypatch.setattr(lock, "EXPIRE_S", 0.05)
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "report.html").write_text("")
    whole = pack({"buffer": PartState({"x": np.arange(9)}, {})})
    contents = CONTENTS | OBJECT
    if name.endswith(".npz"):
        contents = st.tuples(
            st.integers(0, len(whole)), st.binary(min_size=1, max_size=9), st.booleans()
        ).map(lambda cut: whole[: cut[0]] + cut[1] + (whole[cut[0] + len(cut[1]) :] * cut[2]))

    @few
    @given(contents)
    def read(content):
        for other in (tmp_path / "metrics.jsonl", file):
            other.write_bytes(b"")
        file.write_bytes(content)
        for reader in READERS[name]:
            try:
                reader(tmp_path)
            except TOLD.get(name, ()):
                pass
            except Exception as error:
                assert is_mendable(error), (reader, error)
                assert str(error) and "\n" not in str(error), error
                assert isinstance(error, UserError | ValueError | RuntimeError)

    read()
