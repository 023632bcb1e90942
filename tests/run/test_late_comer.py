# SPDX-License-Identifier: Apache-2.0
"""A searcher that comes back when the run has ended, and one whose trainer says so and dies."""

from types import SimpleNamespace

import pytest

from tba_jax.config.schema import make_config
from tba_jax.devices.worker import StopFlag
from tba_jax.remote.messages import RUN_ENDED, JoinResponse
from tba_jax.run import search_process


@pytest.mark.parametrize(
    ("refusal", "end"),
    [(RUN_ENDED, RUN_ENDED), ("it has another model", "refused: it has another model")],
)
def test_a_run_that_has_ended_is_no_refusal(refusal, end):
    """A driver ends a run when all are refused, and must not while closing figures are made."""
    server = SimpleNamespace(join=lambda request: JoinResponse((), refusal=refusal))
    config = make_config({"placement": "fleet"})
    clock = SimpleNamespace(set=lambda seconds: None)
    process = SimpleNamespace(
        shared=SimpleNamespace(config=config, identity={}, clock=clock),
        search=SimpleNamespace(local=()),
    )
    told = []
    assert search_process.search(process, server, "here", told.append) == end and not told


def test_a_searcher_repeats_its_request_after_the_end_of_the_run(monkeypatch):
    """The trainer may die after that, and another one go on; who knows ends the process."""
    actors = pytest.importorskip("tba_jax.run.ray_actors")
    monkeypatch.setattr(actors, "_ENDED_S", 0.0)
    process = object.__new__(actors.SearcherProcess)
    process._lines, process._stop = [], StopFlag()
    told = f"searcher 0 ends: {RUN_ENDED}"
    ends = iter([told, RUN_ENDED, RUN_ENDED, "searcher 0 ends: another process is it now"])
    assert process._until_dismissed(lambda: next(ends)).endswith("another process is it now")
    assert process._lines == [told]
