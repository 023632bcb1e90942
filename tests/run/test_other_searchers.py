# SPDX-License-Identifier: Apache-2.0
"""A run that continues with another number of searchers: nothing lost, nothing double."""

import pytest
from fake_rounds import distinct_responses, make_buffer, make_commit

from tba_jax.flow.state import PartState
from tba_jax.replay.outbox import Outbox
from tba_jax.run.host_state import Facts, HostState, pack, unpack, with_searchers
from tba_jax.run.run import Evaluated
from tba_jax.train.trainer import Counters


def make_state(step=5):
    """What a run of two searchers saves: old and fresh responses, some used, pending rounds."""
    buffer = make_buffer(seed=1)
    outboxes = {s: Outbox(10**9) for s in range(2)}
    for searcher, outbox in outboxes.items():
        for number in range(4):
            prompt_id = searcher + 2 * number
            outbox.put(
                make_commit(
                    # The last one comes twice and is one row.
                    {prompt_id: [*distinct_responses(3, start=10 * number), [99, 7], [99, 7]]},
                    round=number,
                    version=number,
                    searcher=searcher,
                    rejected={prompt_id: {"reward_error": 1}},
                    rewards={prompt_id: [0.1 * number] * 5},
                )
            )
            if number < 3:
                groups = [group for commit in outbox.take() for group in commit.groups]
                buffer.merge(groups, step + number)
    buffer.draw(1, 2, step + 2)
    parts = {
        "buffer": buffer.state(),
        **{f"outbox_{s}": outbox.state() for s, outbox in outboxes.items()},
        **{
            f"searcher_{s}": PartState({}, {"decoded_tokens": 100 + s, "idle_s": float(s)})
            for s in range(2)
        },
        "trainer": Counters(1.0, 1, 0.1, 0.1, 50, {0: 4}).state(),
        "clock": PartState({}, {"elapsed_s": 3.0, "time_to_first_step_s": 1.0}),
        "evaluations": Evaluated({"pass_at_1": 0.5}).state(),
    }
    return as_saved(HostState(Facts(0, 2), parts))


def as_saved(state):
    """Through bytes, as a checkpoint has it."""
    return unpack(pack(state))


def restored(state, **settings):
    """(buffer, outboxes) of a state, after the check that a merge makes."""
    buffer = make_buffer(**settings)
    buffer.restore(state.parts["buffer"])
    outboxes = {}
    for name, saved in state.named("outbox_").items():
        outboxes[name] = Outbox(10**9)
        outboxes[name].restore(saved)
    counts = [outbox.counts for outbox in outboxes.values()]
    buffer.check_ledger(sum(c.pending for c in counts), sum(c.generated for c in counts))
    return buffer, outboxes


def stored(state):
    """Everything stored, as comparable values: ID, reward, version, uses."""
    arrays = state.parts["buffer"].arrays
    columns = ("id", "reward", "version", "uses")
    return sorted(zip(*(arrays[f"row_{name}"].tolist() for name in columns), strict=True))


@pytest.mark.parametrize("num_searchers", [1, 3])
def test_what_waits_is_merged_and_no_round_number_comes_again(num_searchers):
    before = make_state()
    after = as_saved(with_searchers(before, num_searchers, make_buffer))
    buffer, outboxes = restored(after)
    # The fourth round of both searchers, of 5 responses each, was waiting.
    assert buffer.num_trajectories == 2 * 4 * 5
    assert set(stored(before)) < set(stored(after))
    assert [o.committed for o in outboxes.values()] == [(4, None)] * num_searchers
    assert all(o.num_rounds == 0 for o in outboxes.values())
    tokens = [s.meta["decoded_tokens"] for s in after.named("searcher_").values()]
    assert tokens == ([201] if num_searchers == 1 else [100, 101, 0])
    assert after.facts.num_searchers == num_searchers
    for name in ("trainer", "clock", "evaluations"):
        assert after.parts[name] == before.parts[name]
    assert buffer.ledger()["rejected"] == {"reward_error": 8}
