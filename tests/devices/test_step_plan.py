# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: the same on all hosts, whatever each of them sees."""

import threading

import numpy as np
import pytest

from tba_jax.devices.step_plan import Offer, Planner, StepPlan, share_out
from tba_jax.flow.padding import bucket_length

READY = Offer(is_ready=True, num_fresh=8, wants_stop=False)


class Meeting:
    """Processes of a run as threads: each call waits for the others, process 0 decides."""

    def __init__(self, num_processes):
        self._barrier = threading.Barrier(num_processes, timeout=20)
        self._offers = [None] * num_processes
        self._decision = None

    def host(self, process_id):
        meeting = self

        class Host:
            num_processes = len(meeting._offers)

            def __init__(self):
                self.process_id = process_id

            def decide(self, offer, decide):
                meeting._offers[process_id] = offer
                meeting._barrier.wait()
                if process_id == 0:
                    meeting._decision = decide(np.stack(meeting._offers))
                meeting._barrier.wait()
                return meeting._decision

        return Host()


def planner(hosts=None, **changes):
    options = {
        "num_prompts": 16,
        "recency_prob": 1.0,
        "pace": "off",
        "seed": 0,
        "num_steps": 10,
        "sync_period": 2,
        "checkpoint_period": 5,
    } | changes
    return Planner(Meeting(1).host(0) if hosts is None else hosts, **options)


def on_all_hosts(num_hosts, call):
    """call(planner of host h, h) on every host at once; the results by host."""
    meeting = Meeting(num_hosts)
    results = [None] * num_hosts

    def run(h):
        results[h] = call(planner(meeting.host(h)), h)

    threads = [threading.Thread(target=run, args=(h,)) for h in range(num_hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_hosts_that_see_different_data_agree_on_the_largest_bucket():
    lengths = [(7, 12), (9, 5), (3, 6), (8, 16)]
    buckets = (8, 16)
    agreed = on_all_hosts(4, lambda planner, h: planner.agree_on_shape(lengths[h]))
    assert agreed == [(9, 16)] * 4
    # What each would have chosen by itself: other shapes of one program, silently wrong numbers.
    alone = {tuple(bucket_length(n, buckets) for n in own) for own in lengths}
    assert len(alone) > 1


def test_hosts_that_see_different_data_get_one_plan():
    offers = [
        READY._replace(evaluated=8),
        Offer(is_ready=True, num_fresh=1, wants_stop=True, evaluated=4),
        Offer(is_ready=True, num_fresh=0, wants_stop=False, evaluated=6),
        Offer(is_ready=True, num_fresh=4, wants_stop=False, evaluated=8),
    ]
    plans = on_all_hosts(4, lambda planner, h: planner.plan(1, offers[h]))
    # Four slots on each host; 4 + 1 + 0 + 4 of the 16 can be fresh.
    expected = StepPlan(
        wait=False,
        stop=True,
        sync=True,
        save=False,
        num_fresh=(4, 1, 0, 4),
        num_short=7,
        collect=4,  # what the slowest has done of evaluating
    )
    assert plans == [expected] * 4


def test_one_unready_host_makes_all_wait_and_pace_waits_for_the_sum_of_fresh_prompts():
    not_ready = READY._replace(is_ready=False)
    assert planner().decide(0, [READY, not_ready]).wait
    assert not planner().decide(0, [READY, READY]).wait
    few = READY._replace(num_fresh=7)
    assert not planner(pace="off").decide(0, [READY, few]).wait
    assert planner(pace="trainer").decide(0, [READY, few]).wait
    # Half of the slots fresh: one host makes up for the other.
    half = planner(pace="trainer", recency_prob=0.25)
    plan = half.decide(3, [READY, READY._replace(num_fresh=0)])
    assert not plan.wait and plan.num_fresh[1] == 0 and plan.num_short == 0


def test_evaluations_are_put_together_once_every_host_has_done_its_share():
    done, not_done = READY._replace(evaluated=0), READY
    assert planner().decide(0, [done, not_done]).collect == -1
    assert planner().decide(0, [done, done]).collect == 0
    waiting = done._replace(is_ready=False)
    plan = planner().decide(0, [done, waiting])
    assert plan.wait and plan.collect == 0


def test_where_one_host_draws_for_all_it_alone_decides_whether_there_is_a_batch():
    offers = [
        READY,
        Offer(is_ready=True, num_fresh=0, wants_stop=True, is_publishing=True),
    ]
    meeting = Meeting(2)
    planners = [planner(meeting.host(h), shares_data=False) for h in range(2)]
    assert [p.share for p in planners] == [16, 16] and [p.draws for p in planners] == [True, False]
    plan = planners[0].decide(1, offers)
    assert plan == StepPlan(wait=False, stop=True, sync=True, save=False, publish=False)
    assert planners[0].decide(1, [READY._replace(is_ready=False), READY]).wait
    found = on_both(planners, lambda p, h: p.plan(1, offers[h]))
    assert found == [plan, plan]


def on_both(planners, call):
    """call(planner, h) of all at once; the results."""
    results = [None] * len(planners)

    def run(h):
        results[h] = call(planners[h], h)

    threads = [threading.Thread(target=run, args=(h,)) for h in range(len(planners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_slot_kinds_stay_decided_over_a_wait_and_have_the_right_mean():
    mixed = planner(recency_prob=0.5)
    many = READY._replace(num_fresh=100)
    wanted = [sum(mixed.decide(step, [many, many]).num_fresh) for step in range(400)]
    assert wanted[7] == sum(mixed.decide(7, [many, many]).num_fresh)
    # Standard error of a mean of 400 binomials(16, 1/2) is 0.1; false alarm beyond 5 of them.
    assert np.mean(wanted) == pytest.approx(8.0, abs=0.5)


def test_sync_and_save_follow_the_step_and_one_host_decides_nothing_about_slots():
    plans = [planner().plan(step, READY) for step in range(10)]
    assert [step + 1 for step, plan in enumerate(plans) if plan.sync] == [2, 4, 6, 8]
    assert [step + 1 for step, plan in enumerate(plans) if plan.save] == [5, 10]
    assert all(plan.num_fresh == () and not plan.stop for plan in plans)


@pytest.mark.parametrize(
    ("total", "available", "shares"),
    [
        (6, [4, 4], (3, 3)),
        (6, [4, 1], (4, 1)),
        (5, [4, 4, 4], (2, 2, 1)),
        (0, [4, 4], (0, 0)),
        (9, [0, 0], (0, 0)),
        (7, [1, 9, 2], (1, 4, 2)),
    ],
)
def test_share_out_is_even_as_far_as_the_supply_allows(total, available, shares):
    assert share_out(total, available) == shares
