# SPDX-License-Identifier: Apache-2.0
"""A run from its config to its report, for the command and for whoever calls from Python.

It claims the work directory and joins the processes; `conduct` does the rest. Imports nothing
heavy before there is something to do. Flags, and what is printed, belong to the command.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from tba_jax.config.schema import Config
from tba_jax.devices.placement import MODES
from tba_jax.run.errors import UserError
from tba_jax.run.peers import start_cluster
from tba_jax.run.workdir import (
    Outcome,
    begin_or_continue,
    claim,
    finished_before,
    holds_run,
    is_finished,
)

if TYPE_CHECKING:
    from tba_jax.run.schedule_replay import Schedule


def train(
    config: Config,
    workdir: Path,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    accept_changed: Collection[str] = (),
    schedule: "Schedule | None" = None,
    start_s: float | None = None,
) -> Outcome:
    """Train in this process: begin a run, or continue the one in the work directory.

    Args:
        config: validated; its placement is not pod.
        workdir: is created, or holds a run with this config.
        interrupted: checked between steps; an interrupted run can be continued.
        accept_changed: of `identity.KINDS`, what may have changed since the run was saved.
        schedule: schedule to replay; the directory must not hold a run.
        start_s: `time.perf_counter` at the start of the run's time; None: now.

    Raises:
        UserError: the directory holds another run, or another process holds it; model, data or
            another kind of KINDS changed; or the reward function cannot be used.
        ValueError, RuntimeError, OSError: as `build` and the drivers.
    """
    start_s = time.perf_counter() if start_s is None else start_s
    if schedule is not None and holds_run(workdir, config):
        raise UserError(f"{workdir} holds a run; a replay needs a --workdir of its own")
    if MODES[config.placement].searches_elsewhere:
        return _train_fleet(config, workdir, interrupted, accept_changed, schedule)
    hold = claim(workdir, config)
    if hold is None:
        return finished_before(config, workdir)
    with hold:
        cluster = start_cluster(config)
        from tba_jax.run.conduct import conduct, replaying

        return conduct(
            config,
            workdir,
            cluster,
            interrupted,
            hold=hold,
            accept_changed=accept_changed,
            start_s=start_s,
            drive=None if schedule is None else replaying(schedule),
        )


def train_in_bucket(
    config: Config,
    address: str,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    accept_changed: Collection[str] = (),
    start_s: float | None = None,
) -> Outcome:
    """Train as `train` does, with a work directory in an object store.

    Args:
        config: validated, for one process.
        address: gs://BUCKET/FOLDER or s3://BUCKET/FOLDER.
        interrupted, accept_changed, start_s: as `train`.

    Raises:
        StorageError: the store cannot be used, or fails for too long.
        UserError, ValueError, RuntimeError, OSError: as `train`.
    """
    from tba_jax.run.lock import BucketSlots, Hold, Mirroring, folder_of
    from tba_jax.run.workdir import check_bucket
    from tba_jax.storage.bucket import Bucket, StorageError
    from tba_jax.storage.mirror import Mirror

    start_s = time.perf_counter() if start_s is None else start_s
    bucket, folder = Bucket(address), folder_of(address)
    try:
        bucket.require_create()
    except OSError as error:
        raise StorageError(f"{bucket} cannot be used: {error}") from error
    try:
        check_bucket(bucket, bucket.names(), bucket.read("config.json"))
    except OSError as error:
        raise StorageError(f"{bucket} cannot be read: {error}") from error
    with Hold(BucketSlots(bucket)) as hold:
        mirror = Mirror(bucket, folder, hold.number)
        try:
            mirror.fetch(lambda line: print(line, flush=True))
        except OSError as error:
            raise StorageError(f"{bucket} cannot be read: {error}") from error
        if begin_or_continue(folder, config) and is_finished(folder, config.num_steps):
            return finished_before(config, folder)
        mirroring = Mirroring(mirror, hold, patience_s=config.checkpoint.timeout_s)
        hold.companion = mirroring
        from tba_jax.run.conduct import conduct

        try:
            outcome = conduct(
                config,
                folder,
                start_cluster(config),
                interrupted,
                hold=hold,
                accept_changed=accept_changed,
                start_s=start_s,
            )
        except BaseException:
            mirroring.abandon()
            raise
        mirroring.finish()
        return outcome


def _train_fleet(
    config: Config,
    workdir: Path,
    interrupted: Callable[[], bool],
    accept_changed: Collection[str],
    schedule: "Schedule | None",
) -> Outcome:
    """Train with placement=fleet: processes that Ray starts do the work."""
    if schedule is not None:
        raise UserError("a schedule is replayed in one process; give another placement")
    from tba_jax.run.conduct import make_display
    from tba_jax.run.ray_cluster import train_fleet

    display = make_display(config, workdir)
    try:
        return train_fleet(
            config,
            workdir,
            interrupted=interrupted,
            accept_changed=accept_changed,
            display=display,
        )
    finally:
        display.close()
