# SPDX-License-Identifier: Apache-2.0
"""Host states as bytes: exact, of this run only, never pickled."""

import dataclasses

import numpy as np
import pytest

from tba_jax.flow.state import PartState
from tba_jax.run.errors import CheckpointError
from tba_jax.run.host_state import Facts, HostState, check_facts, pack, unpack

FACTS = Facts(seed=3, run_id="f00d")
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


@pytest.mark.parametrize("changes", [{"run_id": "beef"}, {"seed": 4}])
def test_a_checkpoint_of_another_run_is_refused(changes):
    check_facts(12, FACTS, FACTS)
    with pytest.raises(CheckpointError, match="checkpoint 12 is of .* was copied there"):
        check_facts(12, FACTS, dataclasses.replace(FACTS, **changes))
