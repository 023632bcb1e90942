# SPDX-License-Identifier: Apache-2.0
"""Build: a validated config becomes the parts of a run, connected and not yet moving.

The chapters are `open_shared`, `open_start`, `build_searchers`, `build_evaluator`, `build_trainer`
and `restore`; sections of the config end in them, as arguments of the parts. No thread is started
except the reward processes' own and the one that compiles what the run will call.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tba_jax.config.resolved import is_gang
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.evaluation.service import EvaluationService
from tba_jax.report.relay import Display
from tba_jax.run.clock import RunClock
from tba_jax.run.compiling import PUBLICATION, compile_ahead
from tba_jax.run.evaluating import build_evaluator
from tba_jax.run.fleet.gang import make_gang_search
from tba_jax.run.host_state import HostState
from tba_jax.run.logs import Logs, open_logs
from tba_jax.run.modeling import make_publication_program
from tba_jax.run.repartition import repartition
from tba_jax.run.run import COMPILED_S, Run, forget_after
from tba_jax.run.searching import Search, build_searchers, make_transport
from tba_jax.run.shared import Shared, open_shared
from tba_jax.run.start import open_start
from tba_jax.run.training import build_trainer, make_buffer, make_step_program
from tba_jax.run.whole_hosts.remote_search import RemoteSearch
from tba_jax.run.whole_hosts.team import Team, make_remote_search
from tba_jax.weights.transport import Transport


def build(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    cluster: Cluster,
    clock: RunClock,
    progress: Display,
    extra_writers: Sequence[Any] = (),
    accept_changed: Collection[str] = (),
    team: Team | None = None,
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
        team, confirm: as in `conduct` and in `open_shared`.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError: model folder, data or reward function are not usable; says which and why.
        UserError, CheckpointError: as `open_start`.
    """
    shared = open_shared(
        config, workdir, cluster=cluster, clock=clock, note=progress.note, confirm=confirm
    )
    step = make_step_program(shared)
    publish = make_publication_program(config, shared.model.config, shared.sites.publication.mesh)
    ahead = compile_ahead(shared, step, publish)
    with contextlib.ExitStack() as undo:
        undo.callback(ahead.close, COMPILED_S)
        start = open_start(shared, progress.phase, progress.note, accept_changed)
        logs = open_logs(shared.workdir, cluster, progress, list(extra_writers), confirm)
        publish = ahead.after(PUBLICATION, publish)
        remote = _searched_elsewhere(shared, team, publish, logs, lambda: evaluations.wanted)
        search: Search | RemoteSearch
        if remote is None:
            search = build_searchers(
                shared,
                transport=_transport(shared, start.base, publish, confirm),
                references=start.references,
                # All are taken before the first step, whatever became of the file since.
                wants_given=start.step == 0,
                note=progress.note,
            )
            decoders, first = search.decoders, search.searchers
        else:
            search, decoders, first = remote, {}, ()
        graders = [searcher.parts.grader for searcher in first]
        evaluator = build_evaluator(shared, decoders, graders, start.references, progress.note)
        buffer = make_buffer(shared)
        trainer = build_trainer(
            shared,
            step=step,
            ahead=ahead,
            state=start.state,
            base=start.base,
            buffer=buffer,
            outboxes=search.outboxes,
            transport=search.transport,
            log_event=logs.schedule.append,
        )
        evaluations = EvaluationService(
            evaluator,
            clock,
            host=shared.share,
            num_hosts=shared.num_shares if team is None else len(team.hosts),
            is_divided=config.driver == "async" or shared.num_shares > 1 or team is not None,
        )
        run = Run(shared, search, buffer, trainer, evaluator, evaluations, logs, ahead)
        restore(run, start.host_states)
        search.open(progress.phase)
        undo.pop_all()
        return run


def _transport(
    shared: Shared, base: Any, publish: Callable[[Any], Any], confirm: Callable[[], None]
) -> Transport:
    config, sites = shared.config, shared.sites
    return make_transport(
        config, shared.policy, sites, shared.workdir, base, publish, confirm=confirm
    )


def _searched_elsewhere(
    shared: Shared,
    team: Team | None,
    publish: Callable[[Any], Any],
    logs: Logs,
    kept: Callable[[], Collection[int]],
) -> RemoteSearch | None:
    """The searchers of a run of several trainer hosts, none of which searches; else None."""
    if is_gang(shared.config):
        return make_gang_search(shared, publish, kept)
    if team is None:
        return None
    return make_remote_search(shared, team, publish, logs.schedule.append)


def restore(run: Run, saved: Sequence[HostState]) -> None:
    """Put back what this host had, or its share of what other hosts had; drop later log lines.

    Args:
        run: its train state is restored already.
        saved: host states as `Checkpoints.restore` gives them; none for a new run.
    """
    shared = run.shared
    now = shared.num_shares, shared.num_searchers
    if saved and shared.is_follower:
        run.last_saved_step = run.trainer.step_index
    elif saved and (saved[0].facts.num_processes, saved[0].facts.num_searchers) == now:
        run.restore(saved[0])
    elif saved:
        run.restore(
            repartition(
                saved,
                host=shared.share,
                num_hosts=shared.num_shares,
                num_searchers=shared.num_searchers,
                make_buffer=lambda: make_buffer(run.shared),
            )
        )
    forget_after(run, run.trainer.step_index)
