# SPDX-License-Identifier: Apache-2.0
"""How fast the reward pool verifies MATH answers, and whether faults cost it any.

    python -m tba_jax.bench.reward_pool --json
    python -m tba_jax.bench.reward_pool --scaling --json

Scores 5,000 boxed answers of known verdict twice: as they are, and with faults among them: answers
that keep sympy busy for ever, items that kill their process and items that raise. Reported are the
rates, and of the second run what must be none: items without reward or reason (`num_lost`), faulty
items with a reward (`num_scored_faults`), sound items with another verdict or a reason
(`num_wrong`). With --scaling it scores them, without faults, for 1 and --num_workers processes and
1 and 4 threads that share them, a group of 16 responses at a time as searchers do, for the math
verifier and for a reward that waits 2 ms an item, which needs no core (`scaling`: a list of
{reward, num_workers, num_threads, items_per_s}). Needs the extra `math` and no accelerator.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent import futures

from tba_jax.rewards.pool import RewardPool
from tba_jax.rewards.source import ScoreResult

_REWARD = "tba_jax.bench.faulty_reward:faulty_math_reward"
# Each of them keeps sympy busy for longer than anybody waits.
_ENDLESS = (r"9^{9^{9^{9}}}", r"\sum_{k=1}^{10^9} \frac{1}{k}", r"\binom{10^9}{5\cdot 10^8}")
_REASON = {"hang": "reward_timeout", "kill": "reward_crash", "raise": "reward_error"}
_WAITING = "tba_jax.bench.faulty_reward:waiting_reward"
# Items of one call: a searcher's round; a group.
_ROUND, _GROUP = 250, 16


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code says whether every item got what it should."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.bench.reward_pool")
    parser.add_argument("--num_items", type=int, default=5000, help="verifications per run")
    parser.add_argument("--num_faults", type=int, default=10, help="of each of the three kinds")
    parser.add_argument("--num_workers", type=int, default=2, help="reward processes")
    parser.add_argument("--timeout_s", type=float, default=5.0, help="deadline of an item")
    parser.add_argument("--scaling", action="store_true", help="rates by workers and threads")
    parser.add_argument("--json", action="store_true", help="last line of output: a JSON object")
    args = parser.parse_args(argv)
    if args.num_items < 10 * args.num_faults or args.num_faults < 0 or args.num_workers < 1:
        parser.error("wanted --num_items of at least ten times --num_faults, and a worker")
    if args.scaling:
        scaling = measure_scaling(args.num_items, args.num_workers, args.timeout_s)
        for row in scaling:
            print("  ".join(f"{key}={value}" for key, value in row.items()))
        if args.json:
            print(json.dumps({"scaling": scaling}))
        return 0
    result = measure(args.num_items, args.num_faults, args.num_workers, args.timeout_s)
    for key, value in result.items():
        print(f"{key:>24}  {value}")
    if args.json:
        print(json.dumps(result))
    return int(any(result[key] for key in ("num_lost", "num_scored_faults", "num_wrong")))


def answers(num_items: int) -> tuple[list[str], list[str], list[float]]:
    """(responses, gold answers, verdicts): fractions, roots, sums and pairs, two of three right."""
    responses, gold, verdicts = [], [], []
    for i in range(num_items):
        a, b = i % 97 + 2, i % 89 + 3
        is_right = i % 3 != 0
        c = a if is_right else a + 1
        written, meant = (
            (rf"\frac{{{2 * c}}}{{{2 * b}}}", rf"\frac{{{a}}}{{{b}}}"),
            (rf"\sqrt{{{c * c * 7}}}", rf"{a}\sqrt{{7}}"),
            (f"({c}, {b})", rf"\left({a},{b}\right)"),
            (f"{b} + {c}x", f"{a}x+{b}"),
            (f"{c}{{,}}000", f"{a}000"),
        )[i % 5]
        responses.append(rf"Therefore it is $\boxed{{{written}}}$.")
        gold.append(rf"so $\boxed{{{meant}}}$")
        verdicts.append(float(is_right))
    return responses, gold, verdicts


def measure(
    num_items: int, num_faults: int, num_workers: int, timeout_s: float
) -> dict[str, float | int | dict[str, int]]:
    """The figures, by name."""
    responses, gold, verdicts = answers(num_items)
    faults = [""] * num_items
    kinds = [kind for kind in _REASON for _ in range(num_faults)]
    for j, kind in enumerate(kinds):
        at = (2 * j + 1) * num_items // (2 * len(kinds))  # evenly spread
        faults[at] = kind
    no_faults = [""] * num_items
    pool = RewardPool(_REWARD, num_workers=num_workers, timeout_s=timeout_s, max_failure_rate=1.0)
    try:
        pool.check()
        _score(pool, responses[:_ROUND], gold[:_ROUND], no_faults)  # processes warm up
        clean, clean_s = _score(pool, responses, gold, no_faults)
        faulty = [
            rf"\boxed{{{_ENDLESS[i % len(_ENDLESS)]}}}" if fault == "hang" else response
            for i, (response, fault) in enumerate(zip(responses, faults, strict=True))
        ]
        mixed, mixed_s = _score(pool, faulty, gold, faults)
    finally:
        pool.close()
    outcomes = list(zip(mixed.rewards, mixed.reasons, verdicts, faults, strict=True))
    return {
        "num_items": num_items,
        "num_workers": num_workers,
        "timeout_s": timeout_s,
        "items_per_s": num_items / clean_s,
        "items_per_s_with_faults": num_items / mixed_s,
        "num_faults": dict(Counter(fault for fault in faults if fault)),
        "reasons": dict(Counter(reason for reason in mixed.reasons if reason)),
        "num_lost": sum(reward is None and reason is None for reward, reason, *_ in outcomes)
        + num_items
        - len(outcomes),
        "num_scored_faults": sum(
            reward is not None or reason != _REASON[fault]
            for reward, reason, _, fault in outcomes
            if fault
        ),
        "num_wrong": sum(reward != verdict for reward, _, verdict, fault in outcomes if not fault)
        + sum(reward != verdict for reward, verdict in zip(clean.rewards, verdicts, strict=True)),
    }


def measure_scaling(
    num_items: int, num_workers: int, timeout_s: float
) -> list[dict[str, str | int | float]]:
    """Items per second by reward, number of processes and number of threads."""
    responses, gold, _ = answers(num_items)
    rows = []
    for reward in (_REWARD, _WAITING):
        for workers in sorted({1, num_workers}):
            pool = RewardPool(
                reward, num_workers=workers, timeout_s=timeout_s, max_failure_rate=1.0
            )
            try:
                pool.check()
                _score(pool, responses[:_ROUND], gold[:_ROUND], [""] * _ROUND)
                for threads in (1, 4):
                    seconds = _score_in_threads(pool, responses, gold, threads)
                    rows.append(
                        {
                            "reward": reward.rpartition(":")[2],
                            "num_workers": workers,
                            "num_threads": threads,
                            "items_per_s": round(num_items / seconds, 1),
                        }
                    )
            finally:
                pool.close()
    return rows


def _score_in_threads(
    pool: RewardPool, responses: list[str], gold: list[str], num_threads: int
) -> float:
    """Seconds for all items, divided over threads that score a group at a time."""

    def run(first: int) -> None:
        mine, right = responses[first::num_threads], gold[first::num_threads]
        _score(pool, mine, right, [""] * len(mine), _GROUP)

    start = time.perf_counter()
    with futures.ThreadPoolExecutor(num_threads) as threads:
        for done in [threads.submit(run, first) for first in range(num_threads)]:
            done.result()
    return time.perf_counter() - start


def _score(
    pool: RewardPool,
    responses: list[str],
    gold: list[str],
    faults: list[str],
    at_a_time: int = _ROUND,
) -> tuple[ScoreResult, float]:
    """All items, so many at a time, and the seconds that took."""
    rewards: list[float | None] = []
    reasons: list[str | None] = []
    # What hangs is in the response.
    kinds = [fault if fault != "hang" else "" for fault in faults]
    start = time.perf_counter()
    for first in range(0, len(responses), at_a_time):
        part = slice(first, first + at_a_time)
        result = pool.score(
            [""] * len(responses[part]),
            responses[part],
            {"answer": gold[part], "fault": kinds[part][: len(responses[part])]},
        )
        rewards += result.rewards
        reasons += result.reasons
    return ScoreResult(rewards, reasons, ""), time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
