# SPDX-License-Identifier: Apache-2.0
"""A searcher that comes back when the run has ended."""

from types import SimpleNamespace

import pytest

from tba_jax.run.fleet import searching
from tba_jax.run.fleet.messages import RUN_ENDED, Welcome


@pytest.mark.parametrize(
    ("refusal", "end"),
    [(RUN_ENDED, RUN_ENDED), ("it has another model", "refused: it has another model")],
)
def test_a_run_that_has_ended_is_no_refusal(monkeypatch, refusal, end):
    """A driver ends a run when all are refused, and must not while closing figures are made."""
    monkeypatch.setattr(searching, "identity_of", lambda shared: {})
    door = SimpleNamespace(join=lambda hello: (Welcome((), refusal=refusal), 1.0))
    config = SimpleNamespace(fleet=SimpleNamespace(trainer_silence_s=1.0))
    clock = SimpleNamespace(set=lambda seconds: None)
    party = SimpleNamespace(shared=SimpleNamespace(config=config), slots=(0,), clock=clock)
    told = []
    assert searching.search(party, door, "here", told.append) == end and not told
