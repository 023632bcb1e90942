# SPDX-License-Identifier: Apache-2.0
"""Build: a validated config becomes the parts of a run, connected and not yet moving.

The chapters are `open_shared`, `open_start`, `build_searchers`, `build_evaluator`, `build_trainer`
and `restore`; sections of the config end in them, as arguments of the parts. No thread is started
except the reward processes' own and the one that compiles what the run will call.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tba_jax.config.resolved import writes_versions
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.evaluation.service import EvaluationService
from tba_jax.report.relay import Display
from tba_jax.run.clock import RunClock
from tba_jax.run.compiling import PUBLICATION, compile_ahead
from tba_jax.run.evaluating import build_evaluator
from tba_jax.run.host_state import HostState
from tba_jax.run.logs import open_logs
from tba_jax.run.modeling import make_publication_program
from tba_jax.run.other_searchers import with_searchers
from tba_jax.run.peers import Follower, Link
from tba_jax.run.preflight import all_problems
from tba_jax.run.run import COMPILED_S, Run, forget_after
from tba_jax.run.searching import (
    Search,
    build_searchers,
    make_transport,
    make_version_writer,
    remote_searchers,
)
from tba_jax.run.shared import Shared, open_shared
from tba_jax.run.start import Start, open_start
from tba_jax.run.training import build_trainer, make_buffer, make_step_program, own_batches
from tba_jax.train.step_plan import Batches, NoPeers, ReceivedBatches


def build(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    cluster: Cluster,
    clock: RunClock,
    progress: Display,
    extra_writers: Sequence[Any] = (),
    accept_changed: Collection[str] = (),
    link: Link | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> Run:
    """Make every part and restore the newest checkpoint of the work directory, if there is one.

    Args:
        config: validated.
        workdir: exists.
        cluster: the processes of the run, all of which call this.
        clock: started when the process did.
        progress: the display that phases are announced on.
        extra_writers: more metric sinks.
        accept_changed: of `identity.KINDS`, what may have changed since the run was saved.
        link, confirm: as in `conduct` and in `open_shared`.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError: model folder, data or reward function are not usable; says which and why.
        UserError, CheckpointError: as `open_start`.
    """
    with all_problems(config):
        shared = open_shared(
            config, workdir, cluster=cluster, clock=clock, note=progress.note, confirm=confirm
        )
    step = make_step_program(shared)
    publish = make_publication_program(config, shared.model.config, shared.sites.publication.mesh)
    ahead = compile_ahead(shared, step, publish)
    with contextlib.ExitStack() as undo:
        undo.callback(ahead.close, COMPILED_S)
        with all_problems(config):  # before weights are read, while programs are compiled
            shared.rewards.check()
        start = open_start(shared, progress.phase, progress.note, accept_changed)
        logs = open_logs(shared.workdir, cluster, progress, list(extra_writers), confirm)
        search = _build_search(
            shared,
            start,
            ahead.after(PUBLICATION, publish),
            lambda: evaluations.wanted,
            confirm,
            progress.note,
        )
        graders = [searcher.parts.grader for searcher in search.local]
        evaluator = build_evaluator(
            shared, search.decoders, graders, start.references, progress.note
        )
        buffer = make_buffer(config)
        batches: Batches
        if isinstance(link, Follower):
            batches = ReceivedBatches(link.receive)
        else:
            batches = own_batches(shared, buffer, NoPeers() if link is None else link)
        trainer = build_trainer(
            shared,
            step=step,
            ahead=ahead,
            state=start.state,
            base=start.base,
            buffer=buffer,
            batches=batches,
            outboxes=() if shared.is_follower else search.outboxes,
            transport=search.transport,
            log_event=logs.schedule.append,
        )
        is_alone = not search.remote and not shared.is_follower
        evaluations = EvaluationService(
            evaluator, clock, is_divided=config.driver == "async" or not is_alone
        )
        run = Run(shared, search, buffer, trainer, evaluator, evaluations, logs, ahead, link=link)
        restore(run, start.host_state)
        undo.pop_all()
        return run


def _build_search(
    shared: Shared,
    start: Start,
    publish: Callable[[Any], Any],
    kept: Callable[[], Collection[int]],
    confirm: Callable[[], None],
    note: Callable[[str], None],
) -> Search:
    """The searchers of this process, and counters of those of other processes."""
    config, cluster = shared.config, shared.cluster
    if writes_versions(config):
        writer = make_version_writer(shared, publish, kept)
        indices = range(shared.num_searchers if cluster.is_primary else 0)
        return Search(writer, remote=remote_searchers(config, indices))
    search = build_searchers(
        shared,
        transport=make_transport(
            config,
            shared.policy,
            shared.sites,
            shared.workdir,
            start.base,
            publish,
            confirm=confirm,
        ),
        references=start.references,
        # All are taken before the first step, whatever became of the file since.
        wants_given=start.step == 0,
        note=note,
    )
    if cluster.num_processes > 1 and cluster.is_primary:
        indices = range(len(search.local), shared.num_searchers)
        return dataclasses.replace(search, remote=remote_searchers(config, indices))
    return search


def restore(run: Run, saved: HostState | None) -> None:
    """Put back what the checkpoint holds, and drop later log lines.

    Args:
        run: its train state is restored already.
        saved: as `Checkpoints.restore` gives it; None for a new run.
    """
    shared = run.shared
    if shared.is_follower:
        run.last_saved_step = run.trainer.step_index if saved is not None else -1
    elif saved is not None:
        if saved.facts.num_searchers != shared.num_searchers:
            saved = with_searchers(saved, shared.num_searchers, lambda: make_buffer(shared.config))
        run.restore(saved)
    # Every process keeps the weights of the versions that the owner evaluates.
    run.evaluated.last_eval_step = shared.cluster.broadcast_json(run.evaluated.last_eval_step)
    forget_after(run, run.trainer.step_index)
