# SPDX-License-Identifier: Apache-2.0
"""Fleets that lose processes and machines while they run, on Ray clusters of this machine.

    python -m tests.chaos.fleet kills --runs=10 --kills=5 [--seed=0] [--out=DIR]
    python -m tests.chaos.fleet trainer --kills=10
    python -m tests.chaos.fleet machine

`kills`: short runs, in each of which random processes end by SIGKILL at random moments. `trainer`:
one run, whose trainer alone is killed, again and again. `machine`: searchers' machine is taken
away, and another one comes. After every run: exit code 0, every response under one heading of the
ledger, every ticket once, every step once, and nothing is left of it. One JSON line a run; the exit
code is 1 when one of them fails.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.fleets import Fleet, below, check

SHORT = {"fleet.max_searchers": 3}
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def kills(workdir: Path, draws: random.Random, args: argparse.Namespace) -> dict[str, Any]:
    """Random processes, at random moments."""
    num_steps = 6 * args.kills
    fleet = Fleet(workdir, **SHORT, num_steps=num_steps)
    killed = []
    for number in range(args.kills):
        fleet.until_step(1 + 4 * number)
        time.sleep(draws.uniform(0.0, 2.0))
        name = draws.choice(["SearcherProcess", "SearcherProcess", "TrainerProcess"])
        which = draws.randrange(3)
        # One that died just now may be on its way back.
        fleet.until(
            lambda name=name, which=which: fleet.kill(name, which) or _over(fleet),
            f"a process ray::{name}",
        )
        if not _over(fleet):
            killed.append(name)
    return {"killed": killed, **_ended(fleet, num_steps)}


def trainer(workdir: Path, draws: random.Random, args: argparse.Namespace) -> dict[str, Any]:
    """The trainer alone; searchers live on."""
    num_steps = 24 * args.kills + 4  # a fleet makes about four steps a second
    fields = {"num_steps": num_steps}
    fleet = Fleet(workdir, **fields)
    fleet.until_step(1)
    searchers = _pids(fleet, "SearcherProcess")
    killed: list[int] = []
    for _ in range(args.kills):
        fleet.until_step(fleet.num_steps() + 2)
        time.sleep(draws.uniform(0.0, 3.0))
        # It may be on its way back.
        fleet.until(lambda: fleet.kill("TrainerProcess"), "a process ray::TrainerProcess")
        killed.append(fleet.num_steps())
    fleet.until(lambda: fleet.num_steps() >= num_steps - 1 or _over(fleet), f"step {num_steps - 1}")
    lived = searchers == _pids(fleet, "SearcherProcess")
    result = {"killed_at_step": killed, **_ended(fleet, num_steps), "searchers_lived_on": lived}
    assert lived, "a searcher ended with a trainer"
    return result


def machine(workdir: Path, draws: random.Random, args: argparse.Namespace) -> dict[str, Any]:
    """Two searchers' machine goes; later another one comes."""
    del draws, args
    fields = {"num_steps": 40, "fleet.max_searchers": 3}
    with _cluster(num_cpus=2) as cluster:
        node = cluster.add_node(**{**NODE, "num_cpus": 2})
        fleet = Fleet(workdir, os.getpid(), **fields, **{"fleet.address": cluster.address})
        fleet.until_told("searcher 2 ")
        fleet.until_step(6)
        cluster.remove_node(node, allow_graceful=False)
        fleet.until_step(14)
        cluster.add_node(**{**NODE, "num_cpus": 2})
        result = _ended(fleet, fields["num_steps"], has_cluster=False)
    return result


class _cluster:
    """A Ray cluster with a head of so many processes; other machines are added to it."""

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus

    def __enter__(self) -> Any:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        from ray.cluster_utils import Cluster

        head = {**NODE, "num_cpus": self._num_cpus, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        return self._cluster

    def __exit__(self, *error: object) -> None:
        self._cluster.shutdown()


def _over(fleet: Fleet) -> bool:
    return fleet.process.poll() is not None


def _pids(fleet: Fleet, name: str) -> list[int]:
    return sorted(p for p, words in below(fleet.process.pid) if words.startswith(f"ray::{name}"))


def _ended(fleet: Fleet, num_steps: int, *, has_cluster: bool = True) -> dict[str, Any]:
    """See that the run ended as every run must, and its cluster with it if it has one."""
    code = fleet.end()
    assert code == 0, f"exit code {code}:\n{fleet.told()}"
    report = check(fleet.workdir, num_steps)
    if has_cluster:
        left = [words for _, words in below(os.getpid()) if words.startswith("ray")]
        assert not left, f"left over: {left}"
    figures = report["fleet"]
    return {
        "pass_at_1": report["eval"]["after"].get("pass_at_1"),
        "before": report["eval"]["before"].get("pass_at_1"),
        "wall_s": round(report["wall_s"], 1),
        "staleness": report["staleness"]["mean"],
        **{name: figures[name] for name in ("lost", "duplicates")},
        "responses_lost": report["ledger"]["lost"],
        "generated": report["ledger"]["generated"],
        "joins": [each["joins"] for each in figures["by_searcher"]],
    }


SCENES: dict[str, Callable[[Path, random.Random, argparse.Namespace], dict[str, Any]]] = {
    "kills": kills,
    "trainer": trainer,
    "machine": machine,
}


def main() -> int:
    """Play a scene so many times; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fleet", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("scene", choices=SCENES)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--kills", type=int, default=5, help="in a run")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first run; the next has one more"
    )
    parser.add_argument("--out", type=Path, default=None, help="keeps the work directories")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fleet_") as scratch:
        for seed in range(args.seed, args.seed + args.runs):
            workdir = (args.out or Path(scratch)) / f"{args.scene}-{seed}"
            workdir.parent.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            result: dict[str, Any]
            try:
                result = SCENES[args.scene](workdir, random.Random(seed), args)
            except AssertionError as error:
                failed += 1
                result = {"failed": str(error)[-3000:]}
            seconds = round(time.perf_counter() - start, 1)
            line = {"scene": args.scene, "seed": seed, "seconds": seconds, **result}
            print(json.dumps(line), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
