# SPDX-License-Identifier: Apache-2.0
"""Kill one run of each driver many times with SIGKILL, at random moments, then let it end.

    python -m tests.chaos.killer --kills=100 [--seed=0] [--out=DIR]
    python -m tests.chaos.killer --fleet=30,5,3,1 [--seed=0] [--out=DIR]

Runs of the main command are killed while they start, step or save. After each kill the newest
checkpoint is whole and not an earlier one. The run that comes to its end has a closed ledger, no
step missing or twice, and complete checkpoints; a synchronous run has the train state and the
losses of a run that was never killed.

With --fleet: a fleet on a Ray cluster of three nodes. The numbers are kills of a searcher, of a
member of the trainer group and of the owner of the buffer, and replacements of a node.
"""

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from tba_jax.commands.saved import load_policy
from tba_jax.run.checkpoint import Checkpoints
from tests.integration.commands import assert_trained, lines, losses, run, start
from tests.integration.fleets import LIMIT_S, Fleet, below, check

STEPS_PER_KILL = 10
SETTINGS = ("checkpoint.period=3", "eval.period=12")
DRIVERS = {"sync": ("driver=sync",), "async": ("num_searchers=2", "search.num_slots=24")}
MOST_S = 240.0  # longest wait for a moment
EVENTS = ("searcher", "trainer", "owner", "node")
FLEET = {
    "fleet.trainer_hosts": 2,
    "mesh.data": 2,
    "fleet.trainer": "CPU=1,trains=1",
    "fleet.searcher": "CPU=1,searches=1",
    "checkpoint.period": 5,
    "task.num_eval_prompts": 256,
    "eval.period": 20,
}


def kill_often(workdir, driver, *, kills, num_steps, cache, seed=0):
    """Kill one run that often, then let it end and check it.

    Raises:
        AssertionError: something was lost or wrong.
    """
    draws = np.random.default_rng(seed)
    settings = (*SETTINGS, *DRIVERS[driver], f"num_steps={num_steps}")
    saved = 0
    for _ in range(kills):
        process = start(workdir, *settings, cache=cache)
        wait_for_moment(process, workdir, draws)
        offspring = [] if process.poll() is not None else [pid for pid, _ in below(process.pid)]
        process.kill()
        out, err = process.communicate()
        assert process.returncode in (0, -9) and "Traceback" not in err, (out, err)
        end = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{pid}") for pid in offspring):
            assert time.monotonic() < end, f"processes of {offspring} outlived the run"
            time.sleep(0.05)
        before, saved = saved, newest_checkpoint(workdir)
        assert saved >= before, f"checkpoint {before} is gone, {saved} is left in {workdir}"
    run(workdir, *settings, cache=cache, timeout=4 * MOST_S + num_steps)
    check_finished(workdir, num_steps)


def wait_for_moment(process, workdir, draws):
    """Wait until a random moment: the start of a process, some steps later, or a save."""
    log = workdir / "metrics.jsonl"
    before, num_lines = len(lines(log)), int(draws.integers(1, 7))
    moments = {
        "starting": lambda: True,
        "stepping": lambda: len(lines(log)) >= before + num_lines,
        "saving": lambda: any((workdir / "checkpoints").glob("*tmp*")),
    }
    moment = str(draws.choice(list(moments), p=[0.25, 0.5, 0.25]))
    end = time.monotonic() + MOST_S
    while process.poll() is None and not moments[moment]() and time.monotonic() < end:
        time.sleep(0.01)
    if process.poll() is None:
        time.sleep(draws.random() * (10.0 if moment == "starting" else 0.5))


def newest_checkpoint(workdir):
    """Step of the newest checkpoint, which is whole; 0 without one."""
    folder = workdir / "checkpoints"
    newest = max((int(p.name) for p in folder.glob("*") if p.name.isdigit()), default=0)
    assert not newest or not Checkpoints(workdir, read_only=True).damage(newest)
    return newest


def check_finished(workdir, num_steps):
    """Check a finished run: ledger, tickets, logs and checkpoints."""
    assert_trained(workdir, num_steps)
    metrics = lines(workdir / "metrics.jsonl")
    evaluated = [x["step"] for x in metrics if "eval/pass_at_1" in x]
    assert evaluated == sorted(set(evaluated)) and {0, num_steps} <= {*evaluated}
    assert all(path.name.isdigit() for path in (workdir / "checkpoints").iterdir())


def kill_fleet(workdir, counts, *, seed=0):
    """Let each of `EVENTS` hit a fleet `counts` times, let it end, check it; return its pass@1.

    Raises:
        AssertionError: something was lost or wrong, or the policy did not learn steadily.
    """
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")  # as `connected` does
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # all nodes are on loopback
    from ray.cluster_utils import Cluster

    def node(**resources):
        return {"num_cpus": 2, "resources": resources, "object_store_memory": 2**27}

    draws = np.random.default_rng(seed)
    order = draws.permutation(np.repeat(EVENTS, counts)).tolist()
    num_steps = 40 + 4 * len(order)
    cluster = Cluster(True, head_node_args=node(trains=2))
    nodes = [cluster.add_node(**node(searches=1)) for _ in range(2)]
    try:
        address = {"fleet.address": cluster.address, "num_steps": num_steps}
        # The rate of the preset is for batches of 16 prompts.
        address["optimizer.learning_rate"] = "linear(2e-4, 0, warmup=5)"
        fleet = Fleet(workdir, max(LIMIT_S, 200.0 * len(order)), **FLEET, **address)
        for number, event in enumerate(order):
            fleet.until_step(len(losses(workdir)) + int(draws.integers(1, 5)))
            time.sleep(draws.random())
            print(f"{number}: {event} at step {len(losses(workdir))}", flush=True)
            if event == "node":
                cluster.remove_node(nodes.pop(), allow_graceful=False)
                fleet.until_step(len(losses(workdir)) + 5)
                nodes.append(cluster.add_node(**node(searches=1)))
                continue
            while not (found := fleet.processes(event)):
                fleet.until_step(len(losses(workdir)))
            found[int(draws.integers(len(found)))].kill()
        assert fleet.end() == 0, fleet.told()
    finally:
        cluster.shutdown()
    num_restarts = fleet.told().count(". Restarting the trainer from ")
    assert num_restarts == counts[1] + counts[2], fleet.told()
    assert check(workdir, num_steps)["fleet"]["searchers"] == 2
    rates = [x["eval/pass_at_1"] for x in lines(workdir / "metrics.jsonl") if "eval/pass_at_1" in x]
    falls = np.maximum.accumulate(rates) - rates
    assert rates[-1] > rates[0] + 0.3 and max(falls) < 0.1, rates  # of 256 prompts
    return rates


def main():
    parser = argparse.ArgumentParser(description="kill runs at random moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100, help="of one run of each driver")
    parser.add_argument("--fleet", default="", help=f"numbers of {EVENTS}, in a fleet, instead")
    parser.add_argument("--out", default="", help="folder to work in; kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="killer-") as scratch:
        out = Path(args.out or scratch).absolute()
        if args.fleet:
            rates = kill_fleet(out / "fleet", [*map(int, args.fleet.split(","))], seed=args.seed)
            print(f"fleet: {args.fleet} of {EVENTS}, nothing lost or wrong; pass@1: {rates}")
            return 0
        given = {"num_steps": args.kills * STEPS_PER_KILL, "cache": out / "compiled"}
        for driver in DRIVERS:
            kill_often(out / driver, driver, kills=args.kills, seed=args.seed, **given)
            print(f"{driver}: {args.kills} kills, nothing lost or wrong", flush=True)
        kill_often(out / "undisturbed", "sync", kills=0, **given)
        assert losses(out / "sync") == losses(out / "undisturbed")
        found, wanted = (load_policy(str(out / name))[2] for name in ("sync", "undisturbed"))
        for mine, theirs in itertools.zip_longest(*map(jax.tree.leaves, (found, wanted))):
            np.testing.assert_array_equal(mine, theirs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
