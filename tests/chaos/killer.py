# SPDX-License-Identifier: Apache-2.0
"""The random killer: what happens to a run, at random moments, for a given time.

    python -m tests.chaos.killer --seed=0 --budget_min=25 [--at_once=2] [--out=DIR]
    python -m tests.chaos.killer --seed=0 --kills=100   # of one run of each driver
    python -m tests.chaos.killer --seed=0 --kills=10 --environment   # episodes of several turns
    python -m tests.chaos.killer --out=DIR --again=NUMBER   # one damaged file of an earlier call

Real runs of the main command, some at once, are killed (in starting, stepping, saving, closing),
suspended, told to end, started with another clock, with a disk that is full or read-only; between
two processes a file of the work directory is damaged.
After each, the same command either continues rightly or ends with one line. A run that came to its
end has a closed ledger, no step missing, checkpoints whose digests hold; a synchronous one has the
very train state of a run that nothing happened to, an asynchronous one the losses of its schedule's
replay. While those processes work, this one damages a file of an undamaged directory at a time and
reads it as the commands do (`damage.py`). With `--kills`, one run of each driver is killed that
often with SIGKILL, nothing else is done to it, and it then continues to its end. The last line of
output is a JSON object; the exit code is 1 when something was lost, wrong in silence, or told in
more than one line.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax.commands.saved import load_run_config
from tba_jax.devices.site import reading_mesh
from tba_jax.report.lines import wrong_event, wrong_metrics
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.model_parts import abstract_state, describe_model
from tba_jax.weights.versions import Versions
from tests.chaos import damage
from tests.integration.commands import (
    IN_AN_ENVIRONMENT,
    ROOT,
    children,
    command,
    environment,
    lines,
    losses,
)

NUM_STEPS = 24
STEPS_PER_KILL = 5
OVERRIDES = (
    "checkpoint.period=3",
    "checkpoint.keep=2",
    "eval.period=12",
    "sync.transport=checkpoint",
)
DRIVERS = {"sync": ("driver=sync",), "async": ("num_searchers=2", "search.num_slots=24")}
MOST_S = 240.0  # a process that takes longer hangs
ENOUGH = 800  # damaged files
MOMENTS = {"starting": 0.25, "stepping": 0.4, "saving": 0.25, "closing": 0.1}
SHIFT_S = 300_000_000  # of a clock: ten years


@dataclasses.dataclass
class Life:
    """One process of a run, from its start to its end.

    Attributes:
        what: was done to it.
        code, out, err: as it ended.
        was_killed: by us, at once.
    """

    what: str
    code: int
    out: str
    err: str
    was_killed: bool


@dataclasses.dataclass
class Story:
    """One run, over all its processes.

    Attributes:
        workdir: its directory.
        driver: of DRIVERS.
        events: what happened to it.
        has_whole_logs: no log of it was damaged.
        has_whole_checkpoints: no file of a checkpoint was damaged.
        saved: newest step of which a checkpoint was seen.
        spoilt: files that were damaged, and what was in them.
        rng: of what is done to it.
    """

    workdir: Path
    driver: str
    rng: np.random.Generator
    events: list[str] = dataclasses.field(default_factory=list)
    has_whole_logs: bool = True
    has_whole_checkpoints: bool = True
    saved: int = 0
    spoilt: dict[Path, bytes] = dataclasses.field(default_factory=dict)


class Killer:
    """Does all of it.

    Args:
        seed: of what is done, though not of what comes of it.
        out: folder to work in.
        num_steps: of each run.
    """

    def __init__(
        self, seed: int, out: Path, num_steps: int = NUM_STEPS, more: tuple[str, ...] = ()
    ) -> None:
        self.seed, self.out, self.num_steps = seed, out, num_steps
        self.most_s = MOST_S + num_steps
        self.overrides = (*OVERRIDES, f"num_steps={num_steps}", *more)
        self.reading = threading.RLock()  # whoever reads checkpoints in this process
        self.numbers = itertools.count()
        self.cache = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or out / "compiled")
        self.done: collections.Counter[str] = collections.Counter()
        self.told: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.start_s = 10.0  # until a process's first line
        self.template, self.before, self.states = self._undamaged()
        self.want_losses = losses(self.template.folder)
        self.want_state = self._train_state(self.template.folder)

    # Files, in this process.

    def _undamaged(self) -> tuple[damage.Template, Any, Any]:
        folder = self.out / "template"
        if not (folder / "report.json").exists():
            story = Story(folder, "sync", np.random.default_rng(self.seed))
            life = self._live(story, "undisturbed", until=None)
            assert life.code == 0, life.err
        config = load_run_config(str(folder))
        model = describe_model(config).config
        mesh = reading_mesh(model.hidden_size, jax.local_devices())
        template = damage.Template(folder, config, abstract_state(config, model, mesh))
        with tempfile.TemporaryDirectory(dir=self.out) as scratch:
            before = damage.baselines(template, Path(scratch))
        return template, before, damage.states_of(template)

    def damage_one(self, number: int) -> None:
        """Damage a file of a copy of the undamaged directory, and read that."""
        rng = np.random.default_rng((self.seed, number))
        with self.reading, tempfile.TemporaryDirectory(dir=self.out) as scratch:
            tried = damage.try_one(self.template, self.before, self.states, rng, Path(scratch))
        if tried is None:
            return
        what, wrong, found = tried
        self.done["damaged files read"] += 1
        for value in found.values():
            if isinstance(value, Exception):
                self.told[_pattern(str(value))] += 1
        for each in wrong:
            self._fail(f"{what} | {each} | --out={self.out} --seed={self.seed} --again={number}")

    def _fail(self, text: str) -> None:
        self.wrong.append(text)
        # Not to what the thread that reads damaged files may have put in standard output's place.
        print(f"WRONG: {text}", file=sys.__stdout__, flush=True)

    # Processes.

    def _live(self, story: Story, what: str, *, until: Any, clock_s: int = 0, ro: bool = False):
        """Start a process, do to it what `until` does, and wait for its end."""
        env = environment(self.cache)
        if clock_s:
            env["PYTHONPATH"] = f"{ROOT / 'tests/chaos/other_clock'}:{env['PYTHONPATH']}"
            env["TBA_OTHER_CLOCK_S"] = str(clock_s)
        argv = command(story.workdir, *self.overrides, *DRIVERS[story.driver])
        if ro:
            mount = f"mount --bind {story.workdir} {story.workdir} && "
            mount += f"mount -o remount,bind,ro {story.workdir} && exec "
            argv = ["unshare", "-m", "sh", "-c", mount + '"$@"', "sh", *argv]
        # Pipes, which hold all that a run prints: a limit on files' sizes leaves them alone.
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )
        began, was_killed = time.monotonic(), False
        try:
            if until is not None:
                was_killed = until(process)
            while process.poll() is None:
                if time.monotonic() - began > self.most_s:
                    self._fail(f"hangs after {story.events[-5:]}, {what}")
                    break
                time.sleep(0.05)
        finally:
            offspring = [] if process.poll() is not None else children(process.pid)
            process.kill()
            out, err = process.communicate()
        self._gone(offspring, story)
        return Life(what, process.returncode, out, err, was_killed)

    def _gone(self, offspring: list[int], story: Story) -> None:
        end = time.monotonic() + 20
        while alive := [pid for pid in offspring if os.path.exists(f"/proc/{pid}")]:
            if time.monotonic() > end:
                self._fail(f"processes {alive} outlived {story.events[-1:]}")
                return
            time.sleep(0.05)

    def _moment(self, process: subprocess.Popen[Any], story: Story) -> str:
        """Wait for a random moment; what the process does then, "" where it has ended."""
        before = lines_of(story.workdir)
        reached = max((line["step"] for line in before), default=0)
        kind = str(story.rng.choice(list(MOMENTS), p=list(MOMENTS.values())))
        if kind == "closing" and reached < self.num_steps - 6:
            kind = "stepping"
        began = time.monotonic()
        after_s = float(story.rng.random()) * {"starting": self.start_s, "closing": 8.0}.get(
            kind, 0.5
        )
        num_lines = int(story.rng.integers(1, 7))

        def is_come() -> bool:
            if kind == "starting":
                return True
            if kind == "saving":
                return any((story.workdir / "checkpoints").glob("*tmp*"))
            now = lines_of(story.workdir)
            if kind == "stepping":
                return len(now) >= len(before) + num_lines
            return any(line["step"] == self.num_steps for line in now)

        while (
            process.poll() is None and not is_come() and time.monotonic() < began + self.most_s / 2
        ):
            time.sleep(0.005 if kind == "saving" else 0.05)
        end = time.monotonic() + after_s
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return kind if process.poll() is None else ""

    def _kill(self, process: subprocess.Popen[Any], story: Story) -> bool:
        """SIGKILL at a random moment; whether it came to that."""
        kind = self._moment(process, story)
        if not kind:
            return False
        offspring = children(process.pid)
        process.kill()
        process.wait()
        self._gone(offspring, story)
        self.done["kills"] += 1
        self.done[f"killed {kind}"] += 1
        return True

    def kill(self, story: Story) -> Life:
        """SIGKILL at a random moment."""
        return self._live(story, "killed", until=lambda process: self._kill(process, story))

    def tell(self, story: Story) -> Life:
        """SIGTERM at a random moment."""

        def until(process: subprocess.Popen[Any]) -> bool:
            if self._moment(process, story):
                process.terminate()
                self.done["told to end"] += 1
            return False

        return self._live(story, "told to end", until=until)

    def suspend(self, story: Story) -> Life:
        """Time that goes on without the process."""

        def until(process: subprocess.Popen[Any]) -> bool:
            if self._moment(process, story):
                process.send_signal(signal.SIGSTOP)
                time.sleep(3.0)
                process.send_signal(signal.SIGCONT)
                self.done["suspended"] += 1
            return self._kill(process, story)

        return self._live(story, "suspended", until=until)

    def kill_a_worker(self, story: Story) -> Life:
        """SIGKILL to a process that scores, and later to the run."""

        def until(process: subprocess.Popen[Any]) -> bool:
            if self._moment(process, story):
                for pid in children(process.pid):
                    with contextlib.suppress(OSError):
                        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                            os.kill(pid, signal.SIGKILL)
                            self.done["workers killed"] += 1
                            break
            return self._kill(process, story)

        return self._live(story, "worker killed", until=until)

    def fill_disk(self, story: Story) -> Life:
        """From a random moment on no file grows beyond a size, as on a full disk."""

        def until(process: subprocess.Popen[Any]) -> bool:
            if self._moment(process, story):
                size = int(10 ** story.rng.uniform(0, 6))
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
                    self.done["disks filled"] += 1
            return False

        return self._live(story, "disk full", until=until)

    def forbid_writing(self, story: Story) -> Life:
        """The work directory is read-only."""
        self.done["disks made read-only"] += 1
        return self._live(story, "disk read-only", until=None, ro=True)

    def shift_clock(self, story: Story) -> Life:
        """The clock is ten years wrong, and files are of then, too; then killed."""
        shift = SHIFT_S if story.rng.random() < 0.5 else -SHIFT_S
        for file in story.workdir.rglob("*"):
            with contextlib.suppress(OSError):
                os.utime(file, (time.time() - shift, time.time() - shift))
        self.done["clocks shifted"] += 1
        return self._live(
            story,
            f"clock shifted by {shift} s",
            until=lambda process: self._kill(process, story),
            clock_s=shift,
        )

    def spoil(self, story: Story) -> None:
        """Damage a file between two processes, and remember what was in it."""
        picked = damage.pick(story.rng, story.workdir)
        if picked is None:
            return
        kind, file = picked
        before = file.read_bytes()
        what = damage.damage(story.rng, file)
        if not what:
            return
        story.spoilt.setdefault(file, before)
        self.done["files damaged between processes"] += 1
        story.events.append(f"{kind} {file.relative_to(story.workdir)}: {what}")
        story.has_whole_logs &= file.suffix != ".jsonl"
        story.has_whole_checkpoints &= "checkpoints" not in file.parts

    # Runs.

    def stories(self, end_s: float) -> None:
        """Runs, one after the other, until time is over."""
        while time.monotonic() < end_s:
            self.story(next(self.numbers), end_s)

    def story(self, number: int, end_s: float) -> None:
        """One run, until it is finished or time is over."""
        driver = list(DRIVERS)[number % 2]
        rng = np.random.default_rng((self.seed, 10**6 + number))
        story = Story(self.out / f"run{number}", driver, rng)
        deeds = (
            *[self.kill] * 12,
            self.tell,
            self.suspend,
            self.kill_a_worker,
            self.fill_disk,
            self.forbid_writing,
            self.shift_clock,
        )
        while time.monotonic() < end_s:
            if (story.workdir / "metrics.jsonl").exists() and rng.random() < 0.3:
                self.spoil(story)
            deed = deeds[int(rng.integers(len(deeds)))]
            if not story.workdir.exists():
                deed = self.kill
            life = deed(story)
            story.events.append(life.what)
            self._judge(story, life)
            if story.has_whole_checkpoints:
                with self.reading:
                    self._keeps_checkpoints(story)
            if life.code == 0 and not life.was_killed:
                with self.reading:
                    self._finished(story)
                if driver == "async" and story.has_whole_logs:
                    self._replay(story)
                if not self.wrong:
                    shutil.rmtree(story.workdir)
                return
            if life.code in (1, 2):
                self._put_back(story)

    def kill_often(self, driver: str, kills: int) -> None:
        """Kill one run that often, then let it end."""
        number = list(DRIVERS).index(driver)
        rng = np.random.default_rng((self.seed, 10**7 + number))
        story = Story(self.out / f"run{number}", driver, rng)
        killed = 0
        while not (killed == kills or self.wrong):
            life = self.kill(story)
            story.events.append(life.what)
            self._judge(story, life)
            with self.reading:
                self._keeps_checkpoints(story)
            killed += life.was_killed
            if not life.was_killed:
                error = life.err.strip()[-300:]
                self._fail(f"{driver}: ended after {killed} of {kills} kills: {life.code} {error}")
        life = self._live(story, "undisturbed", until=None)
        self._judge(story, life)
        if life.code == 0:
            with self.reading:
                self._finished(story)
            if driver == "async":
                self._replay(story)

    def _put_back(self, story: Story) -> None:
        """Mend what was damaged, as the line asks for; a log loses the lines that are wrong."""
        for file, before in story.spoilt.items():
            if not file.parent.is_dir():
                continue  # put aside with its checkpoint
            if file.suffix == ".jsonl" and file.is_file():
                wrong = wrong_metrics if file.name == "metrics.jsonl" else wrong_event
                whole = file.read_bytes().split(b"\n")
                before = b"".join(line + b"\n" for line in whole if _is_right(line, wrong))
            elif file.is_dir():
                shutil.rmtree(file)
            elif file.is_symlink():
                file.unlink()
            file.write_bytes(before)
        story.events.append("put back")
        story.spoilt.clear()

    def _judge(self, story: Story, life: Life) -> None:
        """A process ends by our hand, in order, or in one line."""
        where = f"{story.driver} {story.events[-6:]}"
        if "Traceback" in life.err + life.out:
            self._fail(f"traceback: {where}: {life.err[-800:]}")
        if life.was_killed or life.code in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            return
        error = life.err.strip().splitlines()
        if life.code not in (1, 2) or len(error) != 1 or not error[0].startswith("error: "):
            self._fail(f"exit code {life.code}, not one line: {where}: {life.err[-800:]}")
        elif "(not expected" in error[0]:
            self._fail(f"nobody expected: {where}: {error[0]}")
        else:
            self.told[_pattern(error[0])] += 1
            self.done["ended in one line"] += 1

    def _keeps_checkpoints(self, story: Story) -> None:
        """Whatever ended a process: the newest checkpoint is whole, and not an earlier one."""
        folder = story.workdir / "checkpoints"
        # An older one may have been killed while it was removed.
        newest = max((int(p.name) for p in folder.glob("*") if p.name.isdigit()), default=0)
        if newest < story.saved:
            self._fail(f"checkpoint {story.saved} is gone, {newest} is left: {story.events[-6:]}")
        story.saved = newest
        if newest and (found := Checkpoints(str(folder), read_only=True).damage(newest)):
            self._fail(f"checkpoint {newest} is not whole: {found}: {story.events[-6:]}")
        self.done["checkpoints read"] += newest > 0

    def _finished(self, story: Story) -> None:
        """What a run that came to its end must show."""
        self.done[f"{story.driver} runs finished"] += 1
        workdir, where = story.workdir, f"{story.workdir.name} {story.driver} {story.events}"
        ledger = json.loads((workdir / "report.json").read_text())["ledger"]
        gone = sum(v for k, v in ledger.items() if k.startswith("evicted"))
        gone += ledger["outbox"] + ledger["stored"] + ledger["duplicate"] + ledger["lost"]
        if ledger["generated"] != gone + sum(ledger["rejected"].values()):
            self._fail(f"ledger not closed: {where}: {ledger}")
        checkpoints = Checkpoints(str(workdir / "checkpoints"), read_only=True)
        left = [path.name for path in (workdir / "checkpoints").iterdir()]
        # One that was damaged when nobody needed it is older than the newest.
        if not all(name.isdigit() for name in left) or checkpoints.damage(self.num_steps):
            self._fail(f"checkpoints are left damaged or unfinished: {where}: {left}")
        versions = Versions(workdir)
        left = sorted(path.name for path in (workdir / "weights").iterdir())
        named = versions.named()
        # Here, too, an older one may have been damaged that nobody read again.
        if left != sorted(map(str, named)) or any(map(versions.damage, named[-1:])):
            self._fail(f"weights are left damaged or unfinished: {where}: {left}")
        if story.has_whole_logs and sorted(losses(workdir)) != list(range(1, self.num_steps + 1)):
            self._fail(f"steps missing or twice: {where}")
        if story.driver == "sync":
            if self._train_state(workdir) != self.want_state:
                self._fail(f"another train state than undisturbed: {where}")
            if story.has_whole_logs and losses(workdir) != self.want_losses:
                self._fail(f"other losses than undisturbed: {where}")

    def _replay(self, story: Story) -> None:
        where = f"{story.workdir.name} {story.driver} {story.events}"
        again = story.workdir.with_name(story.workdir.name + "-again")
        done = subprocess.run(
            command(
                again,
                *self.overrides,
                *DRIVERS[story.driver],
                flags=(f"--replay_schedule={story.workdir / 'schedule.jsonl'}",),
            ),
            env=environment(self.cache),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=self.most_s,
        )
        if done.returncode or losses(again) != losses(story.workdir):
            self._fail(f"its schedule's replay differs: {where}: {done.stderr[-500:]}")
        self.done["schedules replayed"] += 1
        shutil.rmtree(again, ignore_errors=True)

    def _train_state(self, workdir: Path) -> str:
        checkpoints = Checkpoints(str(workdir / "checkpoints"), read_only=True)
        _, state, _ = checkpoints.restore(self.template.target, self.num_steps)
        return damage.digest_of(state)


def lines_of(workdir: Path) -> list[dict[str, Any]]:
    """Lines of metrics so far; [] where they are damaged."""
    try:
        return lines(workdir / "metrics.jsonl")
    except (OSError, ValueError):
        return []


def _is_right(line: bytes, wrong: Any) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and not wrong(record)


def _pattern(message: str) -> str:
    """A message without what differs from one time to the next."""
    message = re.sub(r"/\S+/", "…/", message)
    message = re.sub(r"\b[0-9a-f]{8,}\b|\d[\d,.]*", "#", message)
    return message[:110]


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(description="the random killer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget_min", type=float, default=25.0)
    parser.add_argument("--at_once", type=int, default=2, help="runs")
    parser.add_argument("--out", default="", help="folder; kept where something is wrong")
    parser.add_argument("--kills", type=int, default=0, help="of one run of each driver")
    parser.add_argument("--environment", action="store_true", help="episodes of several turns")
    parser.add_argument("--again", type=int, default=None, help="number of a damaged file")
    args = parser.parse_args(argv)
    out = Path(args.out or tempfile.mkdtemp(prefix="killer-")).absolute()
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + 60 * args.budget_min
    num_steps = NUM_STEPS if not args.kills else args.kills * STEPS_PER_KILL
    killer = Killer(args.seed, out, num_steps, IN_AN_ENVIRONMENT if args.environment else ())
    if args.again is not None:
        killer.damage_one(args.again)
    elif args.kills:
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda driver: killer.kill_often(driver, args.kills), DRIVERS))
    else:
        with ThreadPoolExecutor(args.at_once) as pool:
            stories = [pool.submit(killer.stories, end_s) for _ in range(args.at_once)]
            number = 0
            while time.monotonic() < end_s and not all(story.done() for story in stories):
                if killer.done["damaged files read"] >= ENOUGH:
                    time.sleep(0.5)
                    continue
                killer.damage_one(number)
                number += 1
            for story in stories:
                story.result()
    result = {"seed": args.seed, "done": dict(killer.done), "wrong": killer.wrong}
    result["told"] = dict(killer.told.most_common())
    print(json.dumps(result))
    if not killer.wrong and not args.out:
        shutil.rmtree(out)
    return 1 if killer.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
