# SPDX-License-Identifier: Apache-2.0
"""Command: number of searchers that one trainer process can serve, with the real protocol.

    python -m tba_jax.bench.fleet [--searchers=0,1,10,100,1000] [--period_s=60] [--json]

Searchers are simulated in one process: each requests tickets and sends `--responses` responses of
`--tokens` tokens every `--period_s` seconds, evenly spread. The other process has the search
server, outboxes and a replay buffer; one of its threads merges, draws a batch and multiplies
matrices for about `--step_ms`. Each process is pinned to one core if there are two.

Windows with and without responses alternate, because the speed of a shared machine varies: `step`
is the mean step time relative to the neighbouring window without responses (median and range over
`--windows` pairs; the row with 0 searchers shows the noise of the machine). Other columns are the
time of a put until its acknowledgement (p50, p99) and bytes per second. Lower --period_s until a
figure degrades; the trainer's share of its core shows the bottleneck.
"""

import argparse
import json
import multiprocessing
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tba_jax.bench.reporting import columns, make_parser, run_command
from tba_jax.bench.synthetic import commit, response
from tba_jax.flow.evaluation_shard import EvaluationShard, Lease
from tba_jax.flow.rounds import RoundCommit
from tba_jax.flow.trajectory import Group, Prompt
from tba_jax.remote.channel import Channel, ChannelServer, Endpoint
from tba_jax.remote.messages import Heartbeat, JoinRequest, SearcherKey, Trace, pack_json
from tba_jax.remote.search_channel import RemoteSearchServer, search_handlers
from tba_jax.remote.search_server import SearchServer
from tba_jax.remote.searcher_table import RemoteSearcher, ServerSettings
from tba_jax.replay.admission import Admission, Demand
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.outbox import Outbox

SAMPLES, PROMPTS = 16, 16  # responses of a ticket and prompts of a batch
DEADLINE_S = 120.0
MATRIX = 256


class NoEvaluations:
    """An evaluation queue without evaluations."""

    wanted = ()

    def lease(self) -> None: ...

    def complete(self, lease: Lease, shard: EvaluationShard) -> bool:
        del lease, shard
        return False

    def withdraw(self, lease: Lease) -> None: ...


class Trainer:
    """Trainer process: a search server, and a thread that merges, draws and computes.

    Args:
        num_searchers: number of searchers of the run.
        step_ms: time of a step without searchers.
        core: core to which the process is pinned; -1: none.
    """

    def __init__(self, num_searchers: int, step_ms: float, core: int) -> None:
        if core >= 0:
            os.sched_setaffinity(0, {core})
        searchers = range(max(1, num_searchers))
        self._searchers = [RemoteSearcher(i, Outbox(64 * 2**20)) for i in searchers]
        self._buffer = ReplayBuffer(ReplaySettings(max_bytes=2**28), 0)
        self.server = SearchServer(
            ServerSettings("bench", {}, SAMPLES, heartbeat_timeout_s=1e6, max_tickets=1024),
            self._searchers,
            Admission(Demand(PROMPTS, 1.0, 0, 1), list(searchers)),
            NoEvaluations(),
            clock=time.monotonic,
            log=lambda line: None,
        )
        self._step_s = step_ms / 1e3
        self._stop = threading.Event()
        self._steps: list[float] = []
        self._num_bytes, self._since, self._cpu = 0, 0.0, 0.0

    def run(self) -> None:
        """Make steps until `stop` is called; a step takes about `step_ms` without searchers."""
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
            commits = [c for searcher in self._searchers for c in searcher.outbox.take()]
            if commits:
                self._buffer.merge(commits, step)
            if self._buffer.num_trajectories:
                self._buffer.sample(PROMPTS, SAMPLES, step)
            for _ in range(products):
                np.matmul(matrix, matrix, out=product)
            self._steps.append(time.perf_counter() - start)
            step += 1

    def ready(self) -> None:
        """Wait until the first steps are done."""
        while len(self._steps) < 3:
            time.sleep(0.05)

    def begin(self) -> None:
        self._steps.clear()
        self._since, self._cpu = time.perf_counter(), time.process_time()
        self._num_bytes = int(self.server.metrics()["fleet/put_bytes"])

    def end(self) -> dict[str, float]:
        """End the measurement window; return its figures (mean step time nan without steps)."""
        seconds = time.perf_counter() - self._since
        steps = list(self._steps)
        received = self.server.metrics()["fleet/put_bytes"] - self._num_bytes
        return {
            "step_ms": 1e3 * sum(steps) / len(steps) if steps else float("nan"),
            "steps": len(steps),
            "mb_per_s": received / seconds / 1e6,
            "trainer_cpu_share": (time.process_time() - self._cpu) / seconds,
        }

    def stop(self) -> None:
        """Make `run` return."""
        self._stop.set()


def serve(pipe: Any, num_searchers: int, step_ms: float, core: int) -> None:
    """Run a trainer in this process until `stop` is called over its channel.

    Args:
        pipe: receives the endpoint of the channel.
        num_searchers, step_ms, core: as in `Trainer`.
    """
    trainer = Trainer(num_searchers, step_ms, core)

    def calls(method: Any) -> Any:
        return lambda data: pack_json(method())

    handlers = {
        **search_handlers(lambda: trainer.server),
        **{name: calls(getattr(trainer, name)) for name in ("ready", "begin", "end", "stop")},
    }
    channel = ChannelServer(handlers, secrets.token_hex(16), is_local=True).start()
    pipe.send(tuple(channel.endpoint))
    trainer.run()
    channel.close()


def make_commits(
    searcher: int, tickets: Sequence[int], num_tokens: int, rng: np.random.Generator
) -> list[RoundCommit]:
    """Return finished tickets with responses of `num_tokens` tokens."""
    commits = []
    for ticket in tickets:
        prompt = Prompt(searcher * 10**6 + ticket, "prompt", np.arange(64, dtype=np.int32), {})
        responses = tuple(
            response(
                prompt.prompt_id,
                rng.integers(0, 150_000, num_tokens, np.int32),
                float(sample % 2),
                behavior_token_logprobs=-rng.random(num_tokens, np.float32),
                searcher=searcher,
                round=ticket,
            )
            for sample in range(SAMPLES)
        )
        commits.append(commit(searcher, ticket, 0, [Group(prompt, responses, {})]))
    return commits


class Searchers:
    """Simulated searchers of one process, which send their responses one after the other.

    Args:
        server: the trainer's search server.
        args: arguments of the command.
        number: number of searchers.

    Attributes:
        latencies: seconds of each put until its acknowledgement.
        num_late: number of puts that started late because no thread was free.
    """

    def __init__(self, server: RemoteSearchServer, args: argparse.Namespace, number: int) -> None:
        self.latencies: list[float] = []
        self.num_late = 0
        self._server, self._args = server, args
        self._rng = np.random.default_rng(0)
        self._lock = threading.Lock()
        self._keys: list[SearcherKey] = []
        self._first_unseen = [0] * number
        self._num_puts, self._elapsed = 0, 0.0
        for first in range(0, number, 64):
            request = JoinRequest(tuple(range(first, min(number, first + 64))), "bench", {})
            self._keys += [start.key for start in server.join(request).starts]

    def work(self, seconds: float) -> None:
        """Send the responses that are due in the next seconds; searchers pause between calls."""
        until = self._elapsed + seconds
        begun = time.perf_counter() - self._elapsed
        threads = self._args.threads
        with ThreadPoolExecutor(threads) as pool:
            futures = []
            while self._keys:
                due = self._num_puts * self._args.period_s / len(self._keys)
                if due >= until:
                    break
                wait = begun + due - time.perf_counter()
                if wait > 0:
                    time.sleep(wait)
                self.num_late += sum(not f.done() for f in futures[-threads:]) == threads
                futures.append(pool.submit(self._put, self._num_puts % len(self._keys)))
                self._num_puts += 1
            time.sleep(max(0.0, begun + until - time.perf_counter()))
            for future in futures:
                future.result(DEADLINE_S)
        self._elapsed = until

    def _put(self, i: int) -> None:
        key = self._keys[i]
        num_tickets = max(1, self._args.responses // SAMPLES)
        tickets = self._server.request_tickets(
            key, num_tickets, self._first_unseen[i], Heartbeat()
        ).tickets
        if not tickets:
            return  # the outbox is full
        self._first_unseen[i] = tickets[-1] + 1
        commits = make_commits(i, tickets, self._args.tokens, self._rng)
        start = time.perf_counter()
        response = self._server.put(key, commits, Trace())
        if response.status != "ok":
            raise ValueError(f"a put received status {response.status}: {response.reason}")
        with self._lock:
            self.latencies.append(time.perf_counter() - start)


def summary(
    pairs: Sequence[tuple[dict[str, float], dict[str, float]]], latencies: Sequence[float]
) -> dict[str, Any]:
    """Return the measurements for one number of searchers.

    Args:
        pairs: measurements (without responses, with responses), one pair for each two consecutive
            windows.
        latencies: seconds of each put request.
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


def measure_one(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Measure alternating windows without and with `count` searchers."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=serve, args=(theirs, count, args.step_ms, args.trainer_core), daemon=True
    )
    process.start()
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"the trainer's process did not start within {DEADLINE_S:.0f} s")
    endpoint = Endpoint(*pipe.recv())
    channel = Channel(lambda: endpoint, timeout_s=DEADLINE_S)

    def ask(method: str) -> Any:
        return json.loads(channel.call(method))

    ask("ready")
    searchers = Searchers(RemoteSearchServer(channel), args, count)
    seconds = args.seconds / args.windows
    pairs = []
    for _ in range(args.windows):
        ask("begin")
        time.sleep(seconds)
        free = ask("end")
        ask("begin")
        searchers.work(seconds)
        pairs.append((free, ask("end")))
    ask("stop")
    process.join(DEADLINE_S)
    row = summary(pairs, searchers.latencies)
    return {"searchers": count, **row, "late": searchers.num_late}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements for each number of searchers."""
    try:
        counts = [int(part) for part in args.searchers.split(",")]
    except ValueError as error:
        raise ValueError(
            f"--searchers={args.searchers}: not a list of numbers. Set --searchers=4,16"
        ) from error
    args.trainer_core = 1 if (os.cpu_count() or 1) > 1 else -1
    if args.trainer_core > 0:
        os.sched_setaffinity(0, {0})
    workload = {name: getattr(args, name) for name in ("period_s", "responses", "tokens")}
    return workload | {"rows": [measure_one(args, count) for count in counts]}


def table(result: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each number of searchers."""
    yield (
        f"{result['responses']} responses of {result['tokens']} tokens from each searcher every "
        f"{result['period_s']:g} s"
    )
    yield from columns(
        result["rows"],
        {
            "searchers": "{searchers}",
            "step ms": "{step_ms:.1f}",
            "step": "{step_over_free:.3f}",
            "(range)": "({step_over_free_range[0]:.2f}-{step_over_free_range[1]:.2f})",
            "put p50 ms": "{put_p50_ms:.1f}",
            "put p99 ms": "{put_p99_ms:.1f}",
            "MB/s": "{mb_per_s:.1f}",
            "trainer's core": "{trainer_cpu_share:.0%}",
            "puts": "{puts}",
            "late": "{late}",
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser("fleet", __doc__)
    parser.add_argument(
        "--searchers", default="0,1,10,100,1000", help="numbers of searchers, with commas"
    )
    parser.add_argument(
        "--period_s", type=float, default=60.0, help="seconds between two puts of a searcher"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds of load for each number"
    )
    parser.add_argument(
        "--windows",
        type=int,
        default=6,
        help="pairs of windows for each number, one without and one with load",
    )
    parser.add_argument(
        "--responses", type=int, default=128, help=f"responses per put, {SAMPLES} per ticket"
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a response")
    parser.add_argument("--step_ms", type=float, default=100.0, help="approximate time of a step")
    parser.add_argument("--threads", type=int, default=16, help="concurrent puts")
    return run_command(parser, argv, measure, table)


if __name__ == "__main__":
    sys.exit(main())
