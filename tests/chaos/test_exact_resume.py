# SPDX-License-Identifier: Apache-2.0
"""An asynchronous run that is killed again and again loses no ticket and commits none
twice."""

import collections
import json
import random

import pytest
from commands import kill_after, lines, losses, run, start

from tba_jax.flow.rounds import unpack_commits
from tba_jax.run.checkpoint import load_host_state

# Two searchers that decode without rounds; fewer slots than two prompts' samples need, so that
# tickets end in another order than they were begun in.
CONTINUOUS = (
    "num_searchers=2",
    "search.num_slots=24",
    "search.max_new_tokens=12",
    "checkpoint.period=5",
    "eval.period=20",
)


def assert_every_ticket_once(workdir):
    """Tickets committed, open and never taken are told apart by log and checkpoint alike."""
    events = lines(workdir / "schedule.jsonl")
    merged = collections.Counter(
        (e["searcher"], e["round"]) for e in events if e["event"] == "round"
    )
    assert set(merged.values()) == {1}
    _, (host_state,) = load_host_state(str(workdir))
    for searcher in (0, 1):
        # What is committed is merged or waits in the outbox.
        arrays, meta = host_state.parts[f"outbox_{searcher}"]
        position = meta["position"]
        ahead = {number for number, _ in position["ahead"]}
        committed = set(range(position["next_round"])) | ahead
        done = {number for s, number in merged if s == searcher}
        waiting = {commit.round for commit in unpack_commits(arrays, meta)}
        assert done | waiting == committed and not done & waiting
        assert position["next_round"] > 0


def assert_ledger_closed(workdir):
    ledger = json.loads((workdir / "report.json").read_text())["ledger"]
    evicted = sum(v for k, v in ledger.items() if k.startswith("evicted"))
    rejected = sum(ledger["rejected"].values())
    assert ledger["generated"] > 0
    assert ledger["generated"] == (ledger["outbox"] + ledger["stored"] + evicted + rejected)


def kill_and_resume(folder, *, kills, num_steps, cache):
    """SIGKILL that often at random moments, to the end."""
    rng = random.Random(11)
    workdir = folder / "live"
    overrides = (*CONTINUOUS, f"num_steps={num_steps}")
    for _ in range(kills):
        reached = max(losses(workdir), default=0)
        process = start(workdir, *overrides, cache=cache)
        steps = rng.randint(1, num_steps // (2 * kills))
        kill_after(process, workdir, reached, steps, rng, most_s=1.0)
    done = run(workdir, *overrides, cache=cache)
    assert done.returncode == 0, done.stderr
    metrics = lines(workdir / "metrics.jsonl")
    assert [r["step"] for r in metrics if "train/loss" in r] == list(range(1, num_steps + 1))
    assert_every_ticket_once(workdir)
    assert_ledger_closed(workdir)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_lose_no_ticket(cache, tmp_path):
    kill_and_resume(tmp_path, kills=10, num_steps=100, cache=cache)
