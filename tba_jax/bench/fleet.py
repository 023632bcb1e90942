# SPDX-License-Identifier: Apache-2.0
"""How many searchers one trainer's process can serve: the real protocol and payloads, through Ray.

    python -m tba_jax.bench.fleet [--searchers=0,1,10,100,1000] [--period_s=60] [--json]

Searchers are simulated, many to a process: each asks for tickets and puts `--responses` responses
of `--tokens` tokens every `--period_s` seconds, evenly spread. On the other side is an actor with
the desk, outboxes and a replay buffer, whose other thread merges, draws a batch and multiplies
matrices for about as long as `--step_ms`. The two processes are pinned to a core each where there
are two. Windows with and without puts take turns, as a shared machine is never equally fast for
long: `step` is the mean time of a step beside that of the neighbouring window without puts (median
and range over `--windows` pairs; without searchers it is what the machine itself does). Then put +
acknowledge (p50, p99), and bytes a second of the windows with puts. Lower --period_s until one of
them gives way; then the trainer's share of its core says what saturated. Needs the extra `fleet`.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tba_jax.bench.reporting import run_command
from tba_jax.evaluation.evaluator import Part
from tba_jax.flow.rounds import PhaseTimes, RoundCommit, RoundMetrics, RoundReport
from tba_jax.flow.trajectory import Group, Prompt, Trajectory
from tba_jax.replay.admission import Admission, Demand
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.outbox import Outbox
from tba_jax.run.fleet.desk import Desk
from tba_jax.run.fleet.messages import Answer, Caller, Hello, Vitals, Welcome, decode, encode
from tba_jax.run.fleet.seats import Terms

SAMPLES, PROMPTS = 16, 16  # responses of a ticket, prompts of a batch
DEADLINE_S = 120.0
MATRIX = 256


class NoEvaluations:
    """Nothing to evaluate, as the desk asks for it."""

    def lend(self) -> None:
        """No part is left."""

    def hand_in(self, loan: tuple[int, int], part: Part) -> bool:
        """Nothing was lent."""
        del loan, part
        return False

    def take_back(self, loan: tuple[int, int]) -> None:
        """Nothing was lent."""


class Trainer:
    """The other side: a desk, and a thread that trains, as far as the processor can tell.

    Args:
        num_searchers: slots.
        step_ms: of a step without searchers.
        core: that this process is pinned to; -1: none.
    """

    def __init__(self, num_searchers: int, step_ms: float, core: int) -> None:
        if core >= 0:
            os.sched_setaffinity(0, {core})
        slots = range(max(1, num_searchers))
        self._outboxes = {slot: Outbox(64 * 2**20) for slot in slots}
        self._buffer = ReplayBuffer(ReplaySettings(max_bytes=2**28), 0)
        self._desk = Desk(
            Terms("bench", {}, SAMPLES, silence_s=1e6, num_tickets_ahead=1024),
            self._outboxes,
            Admission(Demand(PROMPTS, 1.0, 0, 1), list(slots)),
            NoEvaluations(),
            clock=time.monotonic,
            tell=lambda line: None,
        )
        self._step_s = step_ms / 1e3
        self._stop = threading.Event()
        self._steps: list[float] = []
        self._num_bytes, self._since, self._cpu = 0, 0.0, 0.0

    def run(self) -> None:
        """Steps until `end`; each has as much work as took `step_ms` at the beginning."""
        matrix = np.full((MATRIX, MATRIX), 0.5, np.float32)
        product = np.matmul(matrix, matrix)
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < 0.5:
            np.matmul(matrix, matrix, out=product)
            count += 1
        products = max(1, round(count * self._step_s / (time.perf_counter() - start)))
        step = 0
        while not self._stop.is_set():
            start = time.perf_counter()
            commits = [c for outbox in self._outboxes.values() for c in outbox.take()]
            if commits:
                self._buffer.merge(commits, step)
            if self._buffer.num_trajectories:
                self._buffer.sample(PROMPTS, SAMPLES, step)
            for _ in range(products):
                np.matmul(matrix, matrix, out=product)
            self._steps.append(time.perf_counter() - start)
            step += 1

    def ready(self) -> None:
        """Wait for the first steps."""
        while len(self._steps) < 3:
            time.sleep(0.05)

    def begin(self) -> None:
        """A window begins."""
        self._steps.clear()
        self._since, self._cpu = time.perf_counter(), time.process_time()
        self._num_bytes = int(self._desk.figures()["fleet/put_bytes"])

    def end(self) -> dict[str, float]:
        """Figures of the window; the mean time of its steps is nan without any."""
        seconds = time.perf_counter() - self._since
        steps = list(self._steps)
        received = self._desk.figures()["fleet/put_bytes"] - self._num_bytes
        return {
            "step_ms": 1e3 * sum(steps) / len(steps) if steps else float("nan"),
            "steps": len(steps),
            "mb_per_s": received / seconds / 1e6,
            "trainer_cpu_share": (time.process_time() - self._cpu) / seconds,
        }

    def stop(self) -> None:
        """`run` ends."""
        self._stop.set()

    def join(self, hello: Hello) -> tuple[Welcome, float]:
        """`Desk.join`."""
        return self._desk.join(hello), 0.0

    def assign(self, caller: Caller, wanted: int, seen: int, vitals: Vitals) -> Answer:
        """`Desk.assign`."""
        return self._desk.assign(caller, wanted, seen, vitals)

    def put(self, caller: Caller, data: bytes) -> Answer:
        """`Desk.put` of encoded commits."""
        return self._desk.put(caller, decode(data), len(data))


def make_commits(
    slot: int, tickets: Sequence[int], num_tokens: int, rng: np.random.Generator
) -> list[RoundCommit]:
    """Finished tickets with responses of so many tokens."""
    commits = []
    for ticket in tickets:
        prompt = Prompt(slot * 10**6 + ticket, "prompt", np.arange(64, dtype=np.int32), {})
        responses = tuple(
            Trajectory(
                prompt_id=prompt.prompt_id,
                response_tokens=rng.integers(0, 150_000, num_tokens, np.int32),
                reward=float(sample % 2),
                reward_parts={},
                behavior_token_logprobs=-rng.random(num_tokens, np.float32),
                reference_logprob=-100.0,
                version_min=0,
                version_max=0,
                searcher=slot,
                round=ticket,
                sampling_temperature=1.0,
                finish_reason="length",
            )
            for sample in range(SAMPLES)
        )
        metrics = RoundMetrics(SAMPLES * num_tokens, 0.5, float(num_tokens), 1.0, 0.0, {})
        report = RoundReport(metrics, PhaseTimes(0.0, 1.0, 1.0, 0.0, 0.0))
        commits.append(
            RoundCommit(slot, ticket, 0, (Group(prompt, responses, {}),), {}, SAMPLES, report)
        )
    return commits


class Searchers:
    """Simulated ones of one process, who put in turn.

    Args:
        ray: the module.
        trainer: handle of the other side.
        args: the command's.
        number: how many.

    Attributes:
        latencies: seconds of each put until it was acknowledged.
        num_late: puts that could not begin when they were due, as no thread was free.
    """

    def __init__(self, ray: Any, trainer: Any, args: argparse.Namespace, number: int) -> None:
        self.latencies: list[float] = []
        self.num_late = 0
        self._ray, self._trainer, self._args = ray, trainer, args
        self._rng = np.random.default_rng(0)
        self._lock = threading.Lock()
        self._callers: list[Caller] = []
        self._seen = [0] * number
        self._num_puts, self._elapsed = 0, 0.0
        for first in range(0, number, 64):
            hello = Hello(tuple(range(first, min(number, first + 64))), "bench", {})
            welcome, _ = ray.get(trainer.join.remote(hello), timeout=DEADLINE_S)
            self._callers += [seat.caller for seat in welcome.seats]

    def work(self, seconds: float) -> None:
        """Put what is due in the next seconds; time stands still for searchers in between."""
        until = self._elapsed + seconds
        begun = time.perf_counter() - self._elapsed
        threads = self._args.threads
        with ThreadPoolExecutor(threads) as pool:
            futures = []
            while self._callers:
                due = self._num_puts * self._args.period_s / len(self._callers)
                if due >= until:
                    break
                wait = begun + due - time.perf_counter()
                if wait > 0:
                    time.sleep(wait)
                self.num_late += sum(not f.done() for f in futures[-threads:]) == threads
                futures.append(pool.submit(self._put, self._num_puts % len(self._callers)))
                self._num_puts += 1
            time.sleep(max(0.0, begun + until - time.perf_counter()))
            for future in futures:
                future.result(DEADLINE_S)
        self._elapsed = until

    def _put(self, i: int) -> None:
        ray, caller = self._ray, self._callers[i]
        ask = self._trainer.assign.options(concurrency_group="io")
        num_tickets = max(1, self._args.responses // SAMPLES)
        question = ask.remote(caller, num_tickets, self._seen[i], Vitals())
        tickets = ray.get(question, timeout=DEADLINE_S).tickets
        if not tickets:
            return  # back-pressure
        self._seen[i] = tickets[-1] + 1
        data = encode(make_commits(i, tickets, self._args.tokens, self._rng))
        start = time.perf_counter()
        message = self._trainer.put.options(concurrency_group="io").remote(caller, data)
        answer = ray.get(message, timeout=DEADLINE_S)
        if answer.verdict != "ok":
            raise ValueError(f"a put was answered {answer.verdict}: {answer.why}")
        with self._lock:
            self.latencies.append(time.perf_counter() - start)


def summary(
    pairs: Sequence[tuple[dict[str, float], dict[str, float]]], latencies: Sequence[float]
) -> dict[str, Any]:
    """Figures of one number of searchers.

    Args:
        pairs: of neighbouring windows, without puts and with them.
        latencies: of puts, seconds.
    """
    ratios = [busy["step_ms"] / free["step_ms"] for free, busy in pairs]
    with_puts = [busy for _, busy in pairs]
    row: dict[str, Any] = {
        "step_ms": float(np.mean([each["step_ms"] for each in with_puts])),
        "step_over_free": float(np.median(ratios)),
        "step_over_free_range": [min(ratios), max(ratios)],
        "mb_per_s": float(np.mean([each["mb_per_s"] for each in with_puts])),
        "trainer_cpu_share": float(np.mean([each["trainer_cpu_share"] for each in with_puts])),
        "puts": len(latencies),
    }
    if latencies:
        row["put_p50_ms"], row["put_p99_ms"] = (
            1e3 * float(np.quantile(latencies, share)) for share in (0.5, 0.99)
        )
    return row


def measure_one(ray: Any, actor: Any, args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Windows without and with so many searchers, by turns."""
    trainer = actor.options(num_cpus=0).remote(count, args.step_ms, args.trainer_core)
    running = trainer.run.options(concurrency_group="run").remote()

    def ask(method: Any) -> Any:
        return ray.get(method.remote(), timeout=DEADLINE_S)

    ask(trainer.ready)
    searchers = Searchers(ray, trainer, args, count)
    seconds = args.seconds / args.windows
    pairs = []
    for _ in range(args.windows):
        ask(trainer.begin)
        time.sleep(seconds)
        free = ask(trainer.end)
        ask(trainer.begin)
        searchers.work(seconds)
        pairs.append((free, ask(trainer.end)))
    ask(trainer.stop)
    ray.get(running, timeout=DEADLINE_S)
    ray.kill(trainer)
    row = summary(pairs, searchers.latencies)
    return {"searchers": count, **row, "late": searchers.num_late}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Figures for each number of searchers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"needs Ray ({error}); pip install 'tba_jax[fleet]'") from error
    try:
        counts = [int(part) for part in args.searchers.split(",")]
    except ValueError as error:
        raise ValueError(f"--searchers={args.searchers}: wanted numbers with commas") from error
    remote: Any = ray.remote
    actor = remote(concurrency_groups={"run": 1, "io": 8})(Trainer)
    args.trainer_core = 1 if (os.cpu_count() or 1) > 1 else -1
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=2**27,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        if args.trainer_core > 0:
            os.sched_setaffinity(0, {0})
        rows = [measure_one(ray, actor, args, count) for count in counts]
    finally:
        ray.shutdown()
    return {
        "period_s": args.period_s,
        "responses": args.responses,
        "tokens": args.tokens,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """One line for each number of searchers."""
    yield (
        f"{result['responses']} responses of {result['tokens']} tokens from each searcher every "
        f"{result['period_s']:g} s"
    )
    yield (
        "searchers  step ms  step (range)       put p50 ms  put p99 ms   MB/s  trainer's core  "
        "puts  late"
    )
    for row in result["rows"]:
        least, most = row["step_over_free_range"]
        yield (
            f"{row['searchers']:9d} {row['step_ms']:8.1f}  {row['step_over_free']:.3f} "
            f"({least:.2f}-{most:.2f}) {row.get('put_p50_ms', 0.0):11.1f} "
            f"{row.get('put_p99_ms', 0.0):11.1f} {row['mb_per_s']:6.1f} "
            f"{row['trainer_cpu_share']:15.0%} {row['puts']:5d} {row['late']:5d}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.bench.fleet", description=__doc__)
    parser.add_argument("--searchers", default="0,1,10,100,1000", help="numbers, with commas")
    parser.add_argument("--period_s", type=float, default=60.0, help="between a searcher's puts")
    parser.add_argument("--seconds", type=float, default=60.0, help="with puts, for each number")
    parser.add_argument("--windows", type=int, default=6, help="that these are divided into")
    parser.add_argument("--responses", type=int, default=128, help=f"of a put; {SAMPLES} a ticket")
    parser.add_argument("--tokens", type=int, default=512, help="of a response")
    parser.add_argument("--step_ms", type=float, default=100.0, help="a step, about")
    parser.add_argument("--threads", type=int, default=16, help="puts under way at a time")
    return run_command(parser, argv, measure, table)


if __name__ == "__main__":
    sys.exit(main())
