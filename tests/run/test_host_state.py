# SPDX-License-Identifier: Apache-2.0
"""Host states as bytes: exact, of this format and the one before, never pickled."""

import io
import json

import numpy as np
import pytest

from tba_jax.flow.state import PartState
from tba_jax.run.host_state import CheckpointError, Facts, HostState, pack, unpack

FACTS = Facts(seed=3, num_processes=1, num_searchers=2, base_fingerprint="f00d")
ARRAYS = {"tokens": np.arange(7, dtype=np.int32), "empty": np.zeros((0, 3))}


def test_the_round_trip_is_exact():
    state = HostState(FACTS, {"buffer": PartState(ARRAYS, {"k": [1, "ü"]})})
    facts, parts = unpack(pack(state))
    assert facts == FACTS
    arrays, meta = parts["buffer"]
    assert meta == {"k": [1, "ü"]} and set(arrays) == set(ARRAYS)
    for name, wanted in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], wanted)
        assert arrays[name].dtype == wanted.dtype


def test_objects_are_not_pickled():
    bad = PartState({"bad": np.array([{"a": 1}], object)}, {})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        pack(HostState(FACTS, {"x": bad}))


def test_a_newer_format_is_refused_with_the_way_out():
    data = pack(HostState(Facts(0, 1, 1, format=9), {}))
    with pytest.raises(CheckpointError, match="format 9 .* up to 2; continue the run with"):
        unpack(data)


def test_format_1_is_read_with_its_counters_in_their_parts():
    """What version 0.9 wrote: one part `run` with everybody's counters."""
    run = {
        "seed": 3,
        "num_processes": 1,
        "num_searchers": 2,
        "elapsed_s": 12.5,
        "before": {"pass_at_1": 0.5},
        "after": None,
        "last_eval_step": 4,
        "time_to_first_step_s": 2.0,
        "wait_s": 1.0,
        "sync_s": [0.1],
        "trained_tokens": 99,
        "staleness_counts": [[0, 4]],
        "decoded_tokens": [[0, 100], [1, 101]],
        "searcher_idle_s": [[1, 0.5]],
        "base_fingerprint": "f00d",
    }
    metas = {"buffer": {"step": 7}, "outbox_0": {}, "outbox_1": {}, "run": run}
    out = io.BytesIO()
    meta = np.frombuffer(json.dumps(metas).encode(), np.uint8)
    np.savez(out, allow_pickle=False, **{"__meta__": meta, "buffer/tokens": np.arange(3)})
    facts, parts = unpack(out.getvalue())
    assert facts == Facts(3, 1, 2, "f00d", format=1)
    assert parts["buffer"].arrays["tokens"].tolist() == [0, 1, 2]
    assert {name: part.meta for name, part in parts.items() if name != "buffer"} == {
        "outbox_0": {},
        "outbox_1": {},
        "searcher_0": {"decoded_tokens": 100, "idle_s": 0.0},
        "searcher_1": {"decoded_tokens": 101, "idle_s": 0.5},
        "trainer": {
            "wait_s": 1.0,
            "sync_s": [0.1],
            "trained_tokens": 99,
            "staleness_counts": [[0, 4]],
        },
        "clock": {"elapsed_s": 12.5, "time_to_first_step_s": 2.0},
        "evaluations": {"before": {"pass_at_1": 0.5}, "after": None, "last_eval_step": 4},
    }
