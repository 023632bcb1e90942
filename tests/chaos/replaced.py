# SPDX-License-Identifier: Apache-2.0
"""Processes that are suspended, lose their work directory to another one, and go on.

    python -m tests.chaos.replaced --seed=0 --times=20 [--at_once=2] [--out=DIR]

Each time a run of the main command is suspended at a random moment (starting, stepping, saving,
publishing). The same command takes its work directory over, and at a random moment of the second
process the first one continues. The first process must end with one line that says that it lost
the directory; the second one says that it took the directory over, and finishes the run. The logs
then hold the lines of one run, its schedule replays to equal losses, and its newest checkpoint and
published weights are whole. The last line of output is a JSON object; the exit code is 1 when
something was wrong.
"""

import argparse
import collections
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from tba_jax.storage import digests
from tba_jax.weights.versions import Versions
from tests.integration.commands import ROOT, command, environment, lines, losses

NUM_STEPS = 24
OVERRIDES = (
    f"num_steps={NUM_STEPS}",
    "checkpoint.period=3",
    "eval.period=12",
    "num_searchers=2",
    "search.num_slots=24",
)
TRANSPORTS = ("memory", "checkpoint")
MOMENTS = ("starting", "stepping", "saving", "publishing")
RETURNS = ("took over", "stepping", "finished")
MOST_S = 900.0
# The main command with a lease that expires at once, as if the first process had been away for
# long. The heartbeat of the first process keeps its usual period.
_IMPATIENT = (
    "from tba_jax.run.lock import Hold;"
    "Hold.__init__.__kwdefaults__.update(beat_s=0.1, expire_s=0.3);"
    "from tba_jax.commands.train import cli, leave; leave(cli())"
)


class Wrong(AssertionError):
    """What a trial must not show."""


def replace_once(workdir: Path, cache: Path, rng: np.random.Generator) -> str:
    """Suspend a run at a random moment, have it replaced, and check both processes.

    Args:
        workdir: of the run; must not exist.
        cache: of compiled programs.
        rng: picks the moments.

    Returns:
        What was done: moment of the suspension, moment of the continuation.

    Raises:
        Wrong: one of the processes, the logs, the checkpoint or the replay is not as it must be.
    """
    transport = str(rng.choice(TRANSPORTS))
    moment, back = str(rng.choice(MOMENTS)), str(rng.choice(RETURNS))
    if moment == "publishing":
        transport = "checkpoint"
    after_s, after_back_s = rng.random(2) * 0.4
    first_steps = int(rng.integers(1, 8))
    overrides = (*OVERRIDES, f"sync.transport={transport}")
    what = f"suspended {moment}, continued when the other one {back}, transport {transport}"
    argv, env = command(workdir, *overrides), environment(cache)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    old = subprocess.Popen(argv, env=env, cwd=ROOT, **pipes)
    started = [old]
    try:
        _wait(lambda: (workdir / "config.json").exists(), old)
        if moment == "starting":
            time.sleep(after_s * 20)
        else:
            _wait(lambda: len(losses(workdir)) >= first_steps, old)
            folder = {"saving": "checkpoints", "publishing": "weights"}.get(moment, "")
            if folder:
                _wait(lambda: any((workdir / folder).glob("*tmp*")), old, nap_s=0.002)
            time.sleep(after_s * (0.1 if folder else 1.0))
        old.send_signal(signal.SIGSTOP)
        _as_of_another_machine(workdir)
        taking = [sys.executable, "-c", _IMPATIENT, *argv[3:]]
        new = subprocess.Popen(taking, env=env, cwd=ROOT, **pipes)
        started.append(new)
        num_lines = len(lines(workdir / "metrics.jsonl"))
        if back == "took over":
            _wait(lambda: (workdir / "lock" / "00000002.json").exists(), new)
            time.sleep(after_back_s * 40)
        elif back == "stepping":
            _wait(lambda: _has_written(workdir, num_lines), new)
            time.sleep(after_back_s * 10)
        else:
            new.wait(MOST_S)
        old.send_signal(signal.SIGCONT)
        old_out, old_err = old.communicate(timeout=MOST_S)
        new_out, new_err = new.communicate(timeout=MOST_S)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.communicate()
    told = [line for line in old_err.splitlines() if line.startswith("error: ")]
    tracebacks = [line for line in (old_err + new_err).splitlines() if "Traceback" in line]
    told += tracebacks
    if old.returncode != 1 or len(told) != 1 or "has taken over" not in told[0]:
        raise Wrong(f"{what}: the first process: {old.returncode} {old_out} {old_err}")
    if new.returncode or "has taken it over" not in " ".join(new_out.split()):
        raise Wrong(f"{what}: the second process: {new.returncode} {new_out} {new_err}")
    for problem in _problems(workdir, transport):
        raise Wrong(f"{what}: {problem} | {told[0]}")
    _replay(workdir, overrides, cache, what)
    return what


def _as_of_another_machine(workdir: Path) -> None:
    """Let the holder of the lease look as if its process ran elsewhere."""
    entry = max((workdir / "lock").glob("*.json"))
    changed = json.loads(entry.read_text()) | {"machine": "elsewhere"}
    (workdir / "entry").write_text(json.dumps(changed))
    (workdir / "entry").replace(entry)


def _has_written(workdir: Path, num_lines: int) -> bool:
    """Return whether the second process has changed metrics.jsonl."""
    now = lines(workdir / "metrics.jsonl")
    return len(now) != num_lines and (workdir / "lock" / "00000002.json").exists()


def _wait(condition: Any, process: "subprocess.Popen[str]", nap_s: float = 0.02) -> None:
    end = time.monotonic() + MOST_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            raise Wrong(f"a process did not come to the moment: {process.poll()}")
        time.sleep(nap_s)


def _problems(workdir: Path, transport: str) -> list[str]:
    """What is wrong with the files of a finished run, a clause each."""
    found = []
    steps = [line["step"] for line in lines(workdir / "metrics.jsonl") if "train/loss" in line]
    if steps != list(range(1, NUM_STEPS + 1)):
        found.append(f"steps of metrics.jsonl: {steps}")
    for kind, keys in {"step": ("step",), "round": ("searcher", "round")}.items():
        events = [e for e in lines(workdir / "schedule.jsonl") if e["event"] == kind]
        counts = collections.Counter(tuple(e[key] for key in keys) for e in events)
        if twice := {key: n for key, n in counts.items() if n > 1}:
            found.append(f"{kind} events of schedule.jsonl: {twice}")
    chunks = collections.defaultdict(list)
    for event in lines(workdir / "schedule.jsonl"):
        if event["event"] == "chunk":
            chunks[event["searcher"]].append(event["chunk"])
    for searcher, numbers in chunks.items():
        if numbers != sorted(set(numbers)):
            found.append(f"chunks of searcher {searcher} are out of order: {numbers}")
    left = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    if not all(name.isdigit() for name in left) or str(NUM_STEPS) not in left:
        found.append(f"checkpoints: {left}")
    elif damage := digests.damage(epath.Path(workdir, "checkpoints", str(NUM_STEPS))):
        found.append(f"checkpoint {NUM_STEPS}: {damage}")
    if transport == "checkpoint":
        versions = Versions(workdir)
        left = sorted(path.name for path in (workdir / "weights").iterdir())
        if left != sorted(map(str, versions.named())) or any(
            versions.damage(version) for version in versions.named()
        ):
            found.append(f"weights: {left}, named are {versions.named()}")
    return found


def _replay(workdir: Path, overrides: tuple[str, ...], cache: Path, what: str) -> None:
    again = workdir.with_name(f"{workdir.name}-again")
    done = subprocess.run(
        command(again, *overrides, flags=(f"--replay_schedule={workdir / 'schedule.jsonl'}",)),
        env=environment(cache),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=MOST_S,
    )
    if done.returncode or losses(again) != losses(workdir):
        raise Wrong(f"{what}: the replay differs: {done.stderr}")


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(description="suspended processes that are replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--at_once", type=int, default=1)
    parser.add_argument("--out", default="", help="folder to work in; kept")
    args = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        out = Path(args.out or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        out.mkdir(parents=True, exist_ok=True)
        done: collections.Counter[str] = collections.Counter()
        wrong: list[str] = []

        def trial(number: int) -> None:
            rng = np.random.default_rng((args.seed, number))
            try:
                what = replace_once(out / f"run{number}", out / "compiled", rng)
            except (Wrong, subprocess.TimeoutExpired) as error:
                what = f"WRONG {number}: {error}"
                wrong.append(what)
            done[what if what not in wrong else "wrong"] += 1
            print(f"{number}: {what}", flush=True)

        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(trial, range(args.times)))
    print(json.dumps({"seed": args.seed, "done": dict(done), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
