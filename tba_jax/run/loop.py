# SPDX-License-Identifier: Apache-2.0
"""The training loop: publish weights, merge responses, draw a batch, update, log, evaluate, save.

    every `sync_period` steps:  trainer.publish()   new weights, numbered by the step
                                sync()              merge finished responses into the buffer;
                                                    synchronous: evaluate and sample before
    every step:                 source.step()       plan and batch of the owner
                                trainer.step()      loss, gradient, update
                                log and save

Every trainer process runs `Loop.train`. `source` is the owner in its process and a client in the
others. driver=sync alternates search and training on one thread: bit-reproducible, with any number
of searchers. With `search.exact_lag=D` a merge takes the tickets of D publications ago. With
driver=async, searchers sample concurrently, on threads of this process or in other processes.
Trainer and searchers wait for each other only with `replay.max_staleness` and `replay.pace`.

Invariant: a loop ends with a save or with the first failure, and every wait for a
thread or process has a time limit (tests/integration/test_runs.py).
Reference: Trajectory Balance with Asynchrony, arXiv 2503.18929, section 3 and algorithm 1.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.config.advice import Times
from tba_jax.devices.cluster import CONTINUE, PeerError
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.flow.layout import Batch
from tba_jax.flow.tickets import Report, summarise
from tba_jax.flow.trajectory import Draw
from tba_jax.remote.channel import HEARTBEAT_S
from tba_jax.remote.messages import Plan
from tba_jax.remote.owner import Owner
from tba_jax.run.build import Run
from tba_jax.run.errors import RunError, Watchdog
from tba_jax.run.search_process import search
from tba_jax.search.searcher import POLL_S, Searcher, stop_workers
from tba_jax.train.trainer import Finished
from tba_jax.weights.memory import DELIVERY_S, Weights

# A run counts as starved after it has merged this many batches of groups without a step. The number
# is large because a policy that repeats its responses may add few new ones for some time.
_STARVED_BATCHES = 20


def train(run: Run, interrupted: Callable[[], bool]) -> None:
    """Train until the last step or an interruption, save, and evaluate the final policy.

    All trainer processes of the run call this function. `interrupted` returns whether to stop.

    Raises:
        RunError: no batch can be drawn. NonFiniteError: loss or gradient is not finite.
        WorkerError: a searcher or the weight poller failed; its cause has the traceback.
        PeerError: another process of the run does not respond.
    """
    loop = Loop(run, interrupted)
    workers: list[Worker] = []
    try:
        workers = [worker.start() for worker in loop.workers()]
        loop.train()
        # Save before the final evaluation, which may take long or fail.
        run.save()
        if run.trainer.step_index >= run.config.num_steps:
            loop.evaluate_last()
        loop.close()
    except BaseException:
        # Stop all workers first, so that no later failure hides the first failure.
        loop.stop.set()
        if run.server is not None:  # the run may continue in another process
            run.server.handlers = {}
        run.shared.close()  # ends a `score` call that waits for a reward
        raise
    finally:
        # Join the workers: a thread in native code may crash when the interpreter ends.
        stop_workers(workers, loop.stop)
    loop.stop.check()


class Loop:
    """Training loop of a trainer process; `owner` is None if another process has the buffer."""

    def __init__(self, run: Run, interrupted: Callable[[], bool]) -> None:
        self.run, self.owner = run, run.owner
        # A failed request to the channel server also stops the workers.
        self.stop = StopFlag() if run.server is None else run.server.failure
        self.check = self.stop.check
        self._plan, self._interrupted = Plan(), interrupted
        self._is_sync, self._newest_eval = run.config.driver == "sync", run.last_eval_step
        self._ended = StopFlag()  # set when the owner reports the end of the run
        self._watchdog = Watchdog(run.config.log.watchdog_s)
        # Asynchronous: pairs of a decoding and a grading thread.
        self._searchers = [Searcher(each, run.owner) for each in run.parts] if run.owner else []
        searching = () if self._is_sync else self._searchers
        self._searching = [each.workers(self.stop) for each in searching]
        self._merged_before = 0  # number of merged groups at the last step
        if self._is_sync and self.owner is not None:
            self.owner.allow(0, -1)

    def wants_stop(self) -> bool:
        """Return whether this process, or a process that reports to it, received a stop signal."""
        self.check()  # called while this process waits for a plan
        return self._interrupted() or (self.owner is not None and self.owner.wants_stop)

    def workers(self) -> list[Worker]:
        """Return the workers: searchers, delivery of weights, checks of the other processes."""
        if self.owner is None and self.run.parts:
            return [Worker("search-process", self._search, self.stop)]
        found = [worker for pair in self._searching for worker in pair]
        if not self._is_sync:
            found.append(Worker("weight-poller", self._poll, self.stop))
        if self.owner is None:
            return found
        if self.owner.remote_searchers:
            lose, period_s = self.owner.lose_silent, HEARTBEAT_S / 8
            found.append(Worker("heartbeat-check", lose, self.stop, idle_s=period_s))
        if not self._is_sync:
            found.append(Worker("watchdog", self._watchdog.step, self.stop, idle_s=1.0))
        return found

    def _poll(self, wait_s: float = DELIVERY_S) -> bool:
        """Deliver a publication, and announce it to searchers of other processes."""
        is_delivered = self.run.weights.poll(wait_s)
        if self.owner is not None and (newest := self.run.weights.newest) is not None:
            self.owner.version = newest
        return is_delivered

    def _search(self) -> bool:
        """Search until the owner reports the end of the run."""
        run = self.run
        assert run.client and isinstance(run.weights, Weights), "a pod searches in memory"
        if not self._ended.is_set():
            search(run.shared.identity, run.parts, run.weights, run.client, self.wants_stop)
            self._ended.set()
        return False

    def train(self) -> None:
        """Train until the last step or an interruption."""
        run, trainer, config = self.run, self.run.trainer, self.run.config
        if not self._is_sync:
            trainer.publish()
        reports = self.begin()
        extra: dict[str, Any] = {}  # metrics between two steps, for the next metrics line
        extras: dict[int, dict[str, Any]] = {}  # of launched steps whose results are not read
        is_due = self._is_sync and not trainer.step_index % config.sync_period
        while trainer.step_index < config.num_steps:
            self.check()
            if is_due:
                if self._plan.publish:
                    extra["sync/publish_s"] = trainer.publish()
                    extra["sync/version"] = trainer.step_index
                reports += self.sync(trainer.step_index)
                extra["sync/deliver_s"] = run.weights.delivery_s
                is_due = False
            if not trainer.step(self._decide):
                if self._plan.stop:
                    break
                reports += self.no_batch()
                continue
            step = trainer.step_index
            is_due = not step % config.sync_period
            is_saved = bool(config.checkpoint.period) and not step % config.checkpoint.period
            extras[step] = extra | self.stepped() | summarise(reports)
            extra, reports = {}, []
            # The results of an asynchronous step are read after the next step was launched.
            is_read_late = not self._is_sync and not is_saved
            self._log(trainer.finished(pending=int(is_read_late)), extras)
            if is_saved:
                run.save()
        self._log(trainer.finished(), extras)

    def _decide(self) -> tuple[Batch | None, Sequence[Draw]]:
        source = self.run.owner or self.run.client
        assert source is not None, "every process has an owner or a client"
        self._plan = source.step(self.run.trainer.step_index, self.wants_stop)
        return self._plan.batch, self._plan.draws

    def _log(self, finished: Sequence[Finished], extras: dict[int, dict[str, Any]]) -> None:
        """Log steps whose results have arrived, and remove their metrics from `extras`."""
        run = self.run
        for step, values, shown in finished:
            extra = extras.pop(step)
            run.logs.add_step(step, shown)
            idle = [] if run.owner is None else run.owner.idle_s
            times = Times(run.clock(), run.trainer.wait_s, sum(idle) / max(1, len(idle)))
            for line in run.advice.lines(run.config, step, {**values, **extra}, times):
                run.logs.progress.note(line)
            values = values | run.callbacks(step, values)
            facts = {"time_s": run.clock(), **values, **extra, **run.buffer.stats()}
            run.logs.metrics.write(step, facts)
            run.checkpoints.check()
            if run.hold is not None:
                run.hold.check()

    def _own(self) -> Owner:
        assert self.owner is not None, "this process owns the buffer"
        return self.owner

    def _until(
        self, is_done: Callable[[], bool], what: str, progress: Callable[[], Any] = lambda: None
    ) -> None:
        """Wait for other threads and processes; with driver=sync, let the local searchers work.

        Raises:
            PeerError: the value of `progress` does not change for `log.watchdog_s`.
        """
        limit_s = self.run.config.log.watchdog_s
        seen, deadline = progress(), time.monotonic() + limit_s
        while not is_done():
            self.check()
            steps = [f for each in self._searchers for f in (each.step, each.grade)]
            if self._is_sync and any([step() for step in steps]):
                continue
            self._watchdog.kick()
            self.stop.wait(POLL_S)
            if (now := progress()) != seen:
                seen, deadline = now, time.monotonic() + limit_s
            elif time.monotonic() > deadline:
                raise PeerError(
                    f"the searchers {what} within {limit_s:.0f} s (config.log.watchdog_s): absent "
                    f"{self.owner.absent if self.owner else '?'}. Look at their outputs. {CONTINUE}"
                )

    def _merge(self, most: int | None = None) -> list[Report]:
        """Merge finished responses and record finished evaluations: both are progress."""
        reports = self._own().merge(self.run.trainer.step_index, most)
        if self.run.record_evaluations() or reports:
            self._watchdog.kick()
        return reports

    def begin(self) -> list[Report]:
        """Let other processes join, and wait for the first responses; return their reports."""
        run, owner, reports = self.run, self.owner, list[Report]()
        if owner is not None:
            if run.server is not None:
                run.server.handlers = owner.handlers()
            if run.trainer.step_index and run.last_eval_step < 0:
                owner.evaluations.request(0)  # interrupted before the start model was evaluated
            if run.config.placement != "fleet" and owner.absent:  # a fleet begins with those there
                run.logs.progress.phase("waiting for the processes that search")
                self._until(lambda: not owner.absent or self.wants_stop(), "did not all join")
        if self._is_sync:
            return reports
        if owner is not None:
            run.trainer.waiting_since = run.clock()
            run.logs.progress.phase("searchers fill the buffer")
            while run.trainer.step_index == 0 and not self.wants_stop():
                if run.buffer.num_trajectories and owner.is_filled:
                    break
                reports += self.no_batch()
            # The first step of a process compiles; the display ends the phase after it.
            run.logs.progress.phase("compiling the training step")
        # Request the evaluation after the fill, so that it does not delay the first responses.
        return reports + self.sync(run.trainer.step_index)

    def sync(self, step: int) -> list[Report]:
        """React to a publication at `step`; return the reports of responses that were merged.

        Without `replay.max_staleness`, none is published while the last one is being written.
        """
        if self.owner is not None:
            return self._sample(step) if self._is_sync else self._merge_and_evaluate(step)
        if self._is_sync:  # else a worker delivers, and a wait for storage would stop the trainer
            self.run.weights.poll()
        if self._is_due(step):
            self._newest_eval = step
            self.run.weights.keep(step)
        return []

    def _is_due(self, step: int) -> bool:
        """Return whether the version published at `step` must be evaluated."""
        newest, config = self._newest_eval, self.run.config
        period, is_last = config.eval.period, step >= config.num_steps
        return newest < 0 or bool(period and not is_last and step // period > newest // period)

    def _sample(self, step: int) -> list[Report]:
        """Evaluate the new weights if that is due, sample with them, and merge (driver=sync)."""
        run, owner, config = self.run, self._own(), self.run.config
        self._deliver()
        if self._is_due(step):
            run.logs.progress.phase("evaluating")
            self._evaluate(step)
            run.logs.progress.phase("")
        # The total depends on the step alone: a run that was interrupted while it sampled
        # continues with the tickets that are left.
        each = config.batch.num_prompts * config.sync_period
        fill = -(-config.search.initial_fill // (each * config.search.samples_per_prompt))
        num_rounds = max(config.search.exact_lag + 1, fill) + step // config.sync_period
        owner.allow(owner.num_given + num_rounds * each, step)
        self._until(
            lambda: owner.is_done or self.wants_stop(),
            "finished no ticket",
            lambda: owner.ledger()["generated"],
        )
        if not owner.is_done:  # the rest of the tickets is sampled and merged by the resumed run
            self._interrupted = lambda: True
            return []
        return self._merge(each if config.search.exact_lag else None)

    def _merge_and_evaluate(self, step: int) -> list[Report]:
        """Merge, and request an evaluation of the newest version, if one is due (driver=async)."""
        run, reports = self.run, self._merge()
        if not self._is_due(step):
            return reports
        if isinstance(run.weights, Weights):
            run.weights.poll()  # this version becomes the newest at once
        self._until(lambda: run.weights.newest is not None, "got no weights")
        version = run.weights.newest
        assert version is not None, "just delivered"
        if self._is_due(version):  # else a later one is evaluated
            self._newest_eval = version
            run.weights.keep(version)
            self._own().evaluations.request(version)
        return reports

    def no_batch(self) -> list[Report]:
        """Wait and merge (driver=async); raise RunError if many merged groups make no batch."""
        run, config = self.run, self.run.config
        why = "every response of the last tickets was rejected, evicted or aged out"
        if not self._is_sync:
            self.stop.wait(POLL_S)
            merged = self._own().num_merged - self._merged_before
            reports = self._merge()  # another draw is tried before these count
            first = -(-config.search.initial_fill // config.search.samples_per_prompt)
            if merged <= _STARVED_BATCHES * max(config.batch.num_prompts, first):
                return reports
            why = f"{merged:,} groups were merged since the last step"
        counts = {name: n for name, n in run.buffer.ledger().items() if n}
        look = "replay.max_bytes and batch.num_prompts"
        if rejected := counts.get("rejected"):
            why += f", and most rejections are {max(rejected, key=rejected.get)}"
            look = "its first line above, and at the output of your code in the folder logs"
        raise RunError(
            f"no batch of {config.batch.num_prompts} prompts can be drawn from the replay buffer: "
            f"{why}. It holds {run.buffer.num_trajectories} rows ({run.buffer.num_bytes:,} of "
            f"{config.replay.max_bytes:,} bytes); responses so far: {counts}. Look at {look}"
        )

    def stepped(self) -> dict[str, Any]:
        """React to a step; return metrics of the searchers."""
        run, owner = self.run, self.owner
        if owner is None:
            return {}
        extra: dict[str, Any] = {"search/skipped_prompts": owner.num_skipped}
        extra |= owner.metrics() if owner.remote_searchers else {}
        if (server := run.shared.server) is not None:
            extra |= {f"search/{name}": n for name, n in server.failures.take().items()}
        if self._is_sync:
            return extra
        for searcher, (decoding, _) in zip(self._searchers, self._searching, strict=True):
            owner.beat(searcher.index, decoding.take_idle_s(), searcher.decode_counts())
        counts = owner.take_decode_counts()
        self._merged_before = owner.num_merged
        owner.note_step(run.trainer.step_index)
        run.record_evaluations()
        self._watchdog.kick()
        extra |= {"search/under_way": owner.num_under_way, "search/idle_s": sum(owner.idle_s)}
        if counts.slot_steps:
            extra["search/slot_use"] = counts.tokens / counts.slot_steps
        if counts.prompt_tokens and run.config.task.environment:
            extra["search/kept_prefix"] = counts.kept_tokens / counts.prompt_tokens
        if (lock := run.shared.sites.trainer.lock) is not None:
            extra["sync/turn_wait_s"] = lock.wait_s
        return extra

    def evaluate_last(self) -> None:
        """Publish and evaluate the final policy once; no new tickets begin."""
        run, step = self.run, self.run.trainer.step_index
        run.record_evaluations()
        if run.last_eval_step < step:
            run.logs.progress.phase("evaluating the final policy")
            if self.owner is not None:
                self.owner.allow(0, -1)
            run.trainer.publish()
            self._deliver()
            self._evaluate(step)

    def _deliver(self) -> None:
        """Wait until the newest publication has been delivered and announced."""
        run = self.run
        if self._is_sync or isinstance(run.weights, Weights):
            self._poll(0.0)
        else:  # only a worker may wait for storage
            self._until(lambda: run.weights.newest == run.trainer.version, "got no weights")

    def _evaluate(self, version: int) -> None:
        """Evaluate a version while no searcher samples, and record the result."""
        self._newest_eval = version
        self.run.weights.keep(version)
        if self.owner is not None:
            evaluations = self.owner.evaluations
            evaluations.request(version)
            is_done, left = lambda: not evaluations.versions, lambda: evaluations.num_missing
            self._until(is_done, "did not evaluate the policy", left)
            self.run.record_evaluations()

    def close(self) -> None:
        """End the search: notify all searchers, or let those of this process wait for the end."""
        if self.owner is not None:
            self.owner.has_ended = True
        elif self.run.parts:
            while not self._ended.wait(POLL_S):
                self.check()  # searchers work on evaluation shards until the owner has ended
