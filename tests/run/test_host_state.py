# SPDX-License-Identifier: Apache-2.0
"""Host states as bytes: exact, of this format only, never pickled."""

import io
import json

import numpy as np
import pytest

from tba_jax.flow.state import PartState
from tba_jax.run.errors import CheckpointError
from tba_jax.run.host_state import FORMAT, Facts, HostState, pack, unpack

FACTS = Facts(seed=3, num_searchers=2, run_id="f00d", fingerprints={"model": "beef"})
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


@pytest.mark.parametrize("number", [2, 9])
def test_another_format_is_refused_with_the_way_out(number):
    data = pack(HostState(Facts(0, 1, format=number), {}))
    with pytest.raises(
        CheckpointError, match=f"format {number} .* format {FORMAT}; continue the run"
    ):
        unpack(data)


def test_the_first_format_which_did_not_name_itself_is_refused_too():
    out = io.BytesIO()
    meta = np.frombuffer(json.dumps({"buffer": {"step": 7}, "run": {}}).encode(), np.uint8)
    np.savez(out, allow_pickle=False, **{"__meta__": meta, "buffer/tokens": np.arange(3)})
    with pytest.raises(
        CheckpointError, match=f"format 1 .* format {FORMAT}; continue the run with"
    ):
        unpack(out.getvalue())
