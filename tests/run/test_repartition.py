# SPDX-License-Identifier: Apache-2.0
"""Host states divided anew: nothing lost, nothing double, every ledger adds up."""

import numpy as np
from fake_rounds import distinct_responses, make_buffer, make_commit

from tba_jax.flow.state import PartState
from tba_jax.replay.outbox import Outbox
from tba_jax.run.host_state import Facts, HostState, pack, unpack
from tba_jax.run.repartition import on_one_host, owner_of, repartition
from tba_jax.run.run import Evaluated
from tba_jax.train.trainer import Counters


def make_state(host, num_hosts, num_searchers=2, step=5, **settings):
    """What one host saves: old and fresh responses, one use of some, a pending round."""
    buffer = make_buffer(**{"seed": host, **settings})
    share = num_searchers // num_hosts
    mine = range(host * share, (host + 1) * share)
    outboxes = {s: Outbox(10**9) for s in mine}
    for searcher, outbox in outboxes.items():
        for number in range(4):
            prompt_id = searcher + num_searchers * number
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
                buffer.merge(outbox.take(), step + number)
    buffer.sample(1, 2, step + 2)
    parts = {
        "buffer": buffer.state(),
        **{f"outbox_{s}": outbox.state() for s, outbox in outboxes.items()},
        **{
            f"searcher_{s}": PartState({}, {"decoded_tokens": 100 + s, "idle_s": float(s)})
            for s in mine
        },
        "trainer": Counters(1.0, 1, 0.1, 0.1, 50, {0: 4}).state(),
        "clock": PartState({}, {"elapsed_s": 3.0, "time_to_first_step_s": 1.0}),
        "evaluations": Evaluated({"pass_at_1": 0.5} if host == 0 else None).state(),
    }
    return as_saved(HostState(Facts(0, num_hosts, num_searchers), parts))


def as_saved(state):
    """Through bytes, as a checkpoint has it."""
    return unpack(pack(state))


def divide(states, num_hosts, num_searchers=2, **settings):
    return [
        as_saved(
            repartition(
                states,
                host=host,
                num_hosts=num_hosts,
                num_searchers=num_searchers,
                make_buffer=lambda: make_buffer(**settings),
            )
        )
        for host in range(num_hosts)
    ]


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


def content(states):
    """Everything stored, as comparable values: prompt, reward, version, count, uses, tokens."""
    found = []
    for state in states:
        arrays = state.parts["buffer"].arrays
        ends = np.cumsum(arrays["tokens_sizes"])
        for i, end in enumerate(ends):
            tokens = arrays["tokens"][end - arrays["tokens_sizes"][i] : end].tobytes()
            columns = ("prompt_id", "reward", "version_min", "count", "uses")
            found.append((*(arrays[f"row_{name}"][i].item() for name in columns), tokens))
    return sorted(found)


def fresh_of(meta):
    """(step of the merge, prompt, unused responses, oldest version) of everything fresh."""
    return {tuple(group[:4]) for group in meta["fresh"]}


def decoded(state):
    """Tokens drawn by each searcher."""
    return {name: s.meta["decoded_tokens"] for name, s in state.named("searcher_").items()}


def ledger(states):
    buffers = [restored(state)[0].ledger() for state in states]
    rejected = sum(sum(b["rejected"].values()) for b in buffers)
    names = ("generated", "stored", "united", "used", "fresh_short")
    return {**{name: sum(b[name] for b in buffers) for name in names}, "rejected": rejected}


def test_two_hosts_to_one_and_back():
    two = [make_state(host, 2) for host in range(2)]
    one = divide(two, 1)
    again = divide(one, 2)
    assert content(one) == content(two) == content(again)
    assert ledger(one) == ledger(two) == ledger(again)
    for host, state in enumerate(again):
        assert {i % 2 for i in state.parts["buffer"].arrays["prompt_ids"].tolist()} == {host}
        # Rounds, prompt streams and what waits move with their searcher.
        _, before = restored(two[host])
        _, after = restored(state)
        assert list(after) == [f"outbox_{host}"] == list(before)
        name = f"outbox_{host}"
        assert after[name].committed == before[name].committed
        assert after[name].num_rounds == before[name].num_rounds == 1
    assert [decoded(state) for state in again] == [{"searcher_0": 100}, {"searcher_1": 101}]
    assert one[0].parts["trainer"].meta["staleness_counts"] == [[0, 8]]
    before = [state.parts["evaluations"].meta["before"] for state in (*one, *again)]
    assert before == [{"pass_at_1": 0.5}, {"pass_at_1": 0.5}, None]
    assert [state.facts.num_processes for state in (*one, *again)] == [1, 2, 2]


def test_fresh_prompts_stay_fresh_and_drawn_ones_do_not_come_back():
    two = [make_state(host, 2) for host in range(2)]
    fresh = [fresh_of(state.parts["buffer"].meta) for state in two]
    buffer, _ = restored(divide(two, 1)[0])
    merged = fresh_of(buffer.state().meta)
    assert merged == fresh[0] | fresh[1] and merged
    ready, num_fresh = buffer.supply(4, 2, 7)
    assert ready and num_fresh == len(merged)
    assert all(d.is_fresh for d in buffer.sample(num_fresh, 2, 7, num_fresh=num_fresh))


def test_another_number_of_searchers_merges_what_waits_and_repeats_no_round():
    one = divide([make_state(host, 2) for host in range(2)], 1, num_searchers=3)[0]
    buffer, outboxes = restored(one)
    # The fourth round of both searchers, of 5 responses each, was waiting.
    assert buffer.num_trajectories == 2 * 4 * 5
    assert buffer.stats()["buffer/num_rows"] == 2 * 4 * 4
    assert [o.committed for o in outboxes.values()] == [(4, None)] * 3
    assert all(o.num_rounds == 0 for o in outboxes.values())
    assert decoded(one) == {"searcher_0": 100, "searcher_1": 101, "searcher_2": 0}


def test_one_response_on_two_hosts_stays_with_both_counts():
    # search.ownership=any: the same prompt and response on both.
    states = [make_state(0, 2), make_state(0, 2)]
    second = states[1].parts
    second["outbox_1"], second["searcher_1"] = second.pop("outbox_0"), second.pop("searcher_0")
    merged = divide(states, 1)[0]
    buffer, _ = restored(merged)  # the ledger adds up
    assert content([merged]) == content(states)
    # Their groups are one: twice as many responses are fresh.
    (before, _) = (fresh_of(state.parts["buffer"].meta) for state in states)
    after = fresh_of(merged.parts["buffer"].meta)
    assert after == {(step, i, 2 * unused, version) for step, i, unused, version in before}
    assert buffer.num_fresh_groups == len(before)


def test_counts_of_the_economy_add_up_over_hosts():
    settings = {"max_staleness": 9, "recency_prob": 1.0}
    two = [make_state(host, 2, **settings) for host in range(2)]
    (one,) = divide(two, 1, **settings)
    again = divide([one], 2, **settings)
    buffers = [restored(state, **settings)[0] for state in (*two, one, *again)]
    assert [b.num_fresh_groups for b in buffers] == [2, 2, 4, 2, 2]
    # One group of three was drawn on each host; what waits moves, what is over stays on host 0.
    assert [b.economy.trained_groups for b in buffers] == [1, 1, 2, 2, 0]
    assert [b.economy.merged_groups for b in buffers] == [3, 3, 6, 4, 2]
    assert [b.stats()["buffer/trained_share"] for b in buffers] == [1.0] * 5
    assert [b.economy.came_in.total() for b in buffers] == [15, 15, 30, 30, 0]


def test_the_newest_merge_can_be_drawn_again_after_a_division():
    settings = {"recycle_fresh": True, "recency_prob": 1.0}
    states = [make_state(host, 2, **settings) for host in range(2)]
    buffer, _ = restored(divide(states, 1, **settings)[0], **settings)
    assert (buffer.num_fresh_groups, buffer.ledger()["fresh_recycled"]) == (0, 0)
    draws = buffer.sample(3, 2, 7)
    # The third round of both searchers came at step 7, to prompts 4 and 5; then the one before.
    again = {d.prompt.prompt_id for d in draws if d.is_fresh}
    assert {4, 5} < again and len(again) == 3
    assert buffer.ledger()["fresh_recycled"] == 3


def test_owner_is_the_host_of_the_searcher_that_owns_the_prompt():
    assert [owner_of(i, num_searchers=4, num_hosts=2) for i in range(6)] == [0, 0, 1, 1, 0, 0]
    assert {owner_of(i, num_searchers=1, num_hosts=1) for i in range(6)} == {0}


def test_on_one_host_leaves_a_single_state_alone():
    state = make_state(0, 1, num_searchers=2)
    assert on_one_host([state]) is state
    assert content([on_one_host([make_state(host, 2) for host in range(2)])])
