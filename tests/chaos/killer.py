# SPDX-License-Identifier: Apache-2.0
"""Kill one run of each driver many times with SIGKILL, at random moments, then let it end.

    python -m tests.chaos.killer --kills=100 [--seed=0] [--out=DIR] [--environment]

Runs of the main command are killed while they start, step, save or close. After each kill the
newest checkpoint is whole and not an earlier one. The run that comes to its end has a closed
ledger, no step missing or twice, and complete checkpoints and weights; a synchronous run has the
train state and the losses of a run that was never killed. The last line of output is a JSON object;
the exit code is 1 when something was lost or wrong.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax.commands.saved import load_run_config
from tba_jax.devices.site import reading_mesh
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.model_parts import abstract_state, describe_model
from tests.integration.commands import (
    IN_AN_ENVIRONMENT,
    ROOT,
    children,
    command,
    environment,
    lines,
    losses,
)

STEPS_PER_KILL = 5
OVERRIDES = ("checkpoint.period=3", "eval.period=12")
DRIVERS = {"sync": ("driver=sync",), "async": ("num_searchers=2", "search.num_slots=24")}
MOMENTS = {"starting": 0.25, "stepping": 0.4, "saving": 0.25, "closing": 0.1}
START_S = 10.0  # most seconds of a process before its first line


class Wrong(AssertionError):
    """What a run must not show."""


class Killer:
    """Kills runs of one number of steps.

    Args:
        seed: of the moments.
        out: folder to work in.
        more: further overrides of the runs.
    """

    def __init__(self, seed: int, out: Path, num_steps: int, more: tuple[str, ...] = ()) -> None:
        self.seed, self.out, self.num_steps = seed, out, num_steps
        self.most_s = 240.0 + num_steps
        self.overrides = (*OVERRIDES, f"num_steps={num_steps}", *more)
        self.cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or out / "compiled")
        self.done: collections.Counter[str] = collections.Counter()
        self.undisturbed = out / "undisturbed"
        self._finish(self.undisturbed, "sync")

    def kill_often(self, driver: str, kills: int) -> None:
        """Kill one run that often, then let it end and check it.

        Raises:
            Wrong: something was lost or wrong.
        """
        rng = np.random.default_rng((self.seed, list(DRIVERS).index(driver)))
        workdir, saved = self.out / driver, 0
        for number in range(kills):
            self._kill(workdir, driver, rng, number)
            saved = self._newest(workdir, saved)
        self._finish(workdir, driver)
        self._check(workdir, driver)

    def _start(self, workdir: Path, driver: str) -> "subprocess.Popen[str]":
        argv = command(workdir, *self.overrides, *DRIVERS[driver])
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(argv, text=True, env=environment(self.cache), cwd=ROOT, **pipes)

    def _finish(self, workdir: Path, driver: str) -> None:
        process = self._start(workdir, driver)
        out, err = process.communicate(timeout=4 * self.most_s)
        if process.returncode:
            raise Wrong(f"{driver}: exit code {process.returncode}: {out[-500:]} {err[-800:]}")

    def _kill(self, workdir: Path, driver: str, rng: np.random.Generator, number: int) -> None:
        """Start the run and kill it at a random moment."""
        process = self._start(workdir, driver)
        try:
            moment = self._wait(process, workdir, rng)
            if process.poll() is not None:
                raise Wrong(f"{driver}: ended after {number} kills: {process.communicate()}")
        finally:
            offspring = [] if process.poll() is not None else children(process.pid)
            process.kill()
            _, err = process.communicate()
        if "Traceback" in err:
            raise Wrong(f"{driver}, killed {moment}: {err[-800:]}")
        end = time.monotonic() + 20
        while alive := [pid for pid in offspring if os.path.exists(f"/proc/{pid}")]:
            if time.monotonic() > end:
                raise Wrong(f"{driver}: processes {alive} outlived the run")
            time.sleep(0.05)
        self.done[f"killed {moment}"] += 1

    def _wait(self, process: Any, workdir: Path, rng: np.random.Generator) -> str:
        """Wait for a random moment of a process; return its name."""
        before = lines(workdir / "metrics.jsonl")
        reached = max((line["step"] for line in before), default=0)
        moment = str(rng.choice(list(MOMENTS), p=list(MOMENTS.values())))
        if moment == "closing" and reached < self.num_steps - 6:
            moment = "stepping"
        after_s = rng.random() * {"starting": START_S}.get(moment, 0.5)
        num_lines = int(rng.integers(1, 7))

        def is_come() -> bool:
            if moment == "starting":
                return True
            if moment == "saving":
                return any((workdir / "checkpoints").glob("*tmp*"))
            now = lines(workdir / "metrics.jsonl")
            if moment == "stepping":
                return len(now) >= len(before) + num_lines
            return any(line["step"] == self.num_steps for line in now)

        end = time.monotonic() + self.most_s
        while process.poll() is None and not is_come() and time.monotonic() < end:
            time.sleep(0.005 if moment == "saving" else 0.05)
        time.sleep(after_s if process.poll() is None else 0.0)
        return moment

    def _newest(self, workdir: Path, saved: int) -> int:
        """Check the newest checkpoint after a kill; return its step."""
        folder = workdir / "checkpoints"
        newest = max((int(p.name) for p in folder.glob("*") if p.name.isdigit()), default=0)
        if newest < saved:
            raise Wrong(f"checkpoint {saved} is gone, {newest} is left in {workdir}")
        if newest and (found := Checkpoints(workdir, read_only=True).damage(newest)):
            raise Wrong(f"checkpoint {newest} in {workdir} is not whole: {found}")
        self.done["checkpoints read"] += newest > 0
        return newest

    def _check(self, workdir: Path, driver: str) -> None:
        """Check a run that came to its end."""
        ledger = json.loads((workdir / "report.json").read_text())["ledger"]
        gone = sum(v for k, v in ledger.items() if k.startswith("evicted"))
        gone += ledger["waiting"] + ledger["stored"] + ledger["lost"]
        if ledger["generated"] != gone + sum(ledger["rejected"].values()):
            raise Wrong(f"{driver}: ledger not closed: {ledger}")
        if sorted(losses(workdir)) != list(range(1, self.num_steps + 1)):
            raise Wrong(f"{driver}: steps missing or twice")
        left = [path.name for path in (workdir / "checkpoints").iterdir()]
        if not all(name.isdigit() for name in left):
            raise Wrong(f"{driver}: unfinished checkpoints are left: {left}")
        if driver == "sync":
            if losses(workdir) != losses(self.undisturbed):
                raise Wrong("other losses than undisturbed")
            mine, wanted = self._train_state(workdir), self._train_state(self.undisturbed)
            jax.tree.map(np.testing.assert_array_equal, mine, wanted)

    def _train_state(self, workdir: Path) -> Any:
        config = load_run_config(str(workdir))
        model = describe_model(config).config
        mesh = reading_mesh(model.hidden_size, jax.local_devices())
        checkpoints = Checkpoints(workdir, read_only=True)
        return checkpoints.read(self.num_steps, abstract_state(config, model, mesh))


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(description="kill runs at random moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100, help="of one run of each driver")
    parser.add_argument("--out", default="", help="folder to work in; kept")
    parser.add_argument("--environment", action="store_true", help="episodes of several turns")
    args = parser.parse_args(argv)
    wrong = []
    with tempfile.TemporaryDirectory(prefix="killer-") as scratch:
        out = Path(args.out or scratch).absolute()
        out.mkdir(parents=True, exist_ok=True)
        more = IN_AN_ENVIRONMENT if args.environment else ()
        killer = Killer(args.seed, out, args.kills * STEPS_PER_KILL, more)
        with ThreadPoolExecutor(len(DRIVERS)) as pool:
            for future in [pool.submit(killer.kill_often, name, args.kills) for name in DRIVERS]:
                try:
                    future.result()
                except AssertionError as error:
                    wrong.append(str(error))
        print(json.dumps({"seed": args.seed, "done": dict(killer.done), "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
