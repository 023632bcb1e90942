# SPDX-License-Identifier: Apache-2.0
"""The command: flags -> config -> wiring -> drive -> report.

    python -m tba_jax.main --config=math[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE]

Running it again on a work directory that holds a run resumes it. With --config.placement=pod the
same command runs on every host, under jax.distributed. Nothing heavy is imported at module level:
reward processes import this module again when they start.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import config_flags

from tba_jax.config import schema as config_lib
from tba_jax.config.command_line import local_folder, parse_flags, versions
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, freeze

if TYPE_CHECKING:
    from tba_jax.devices.cluster import Cluster
    from tba_jax.run.run import Run

# Before jax is imported, so that times count from the command.
_PROCESS_START = time.perf_counter()

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "A preset, math[:PRESET], or a file, FILE.py[:PRESET]."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run lives; default runs/FILE-PRESET-seedN. Again: resume."
)
_REPLAY_SCHEDULE = flags.DEFINE_string(
    "replay_schedule", None, "schedule.jsonl of an asynchronous run: do it again in one thread."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "pod: HOST:PORT of process 0 (or JAX_COORDINATOR_ADDRESS)."
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "pod: processes of the run (or JAX_NUM_PROCESSES)."
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "pod: which of them this is, from 0 (or JAX_PROCESS_ID)."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Resolve and check the config, print it, touch nothing, exit."
)


class UserError(Exception):
    """A mistake of the user's: printed as one line, without a traceback."""


class Interruption:
    """Turns SIGINT and SIGTERM into a flag that the drivers look at between steps.

    A second signal of the same kind has its usual effect. In a pod SIGTERM goes to JAX's preemption
    service instead, which takes it over when the processes join.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        self.signal_number = number
        signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> bool:
        return self.signal_number is not None


def default_workdir(config: Config) -> str:
    """runs/NAME-seedN."""
    return os.path.join("runs", f"{config.name.replace('/', '-')}-seed{config.seed}")


def claim_workdir(workdir: Path, config: Config) -> bool:
    """Create the directory, or check that the run in it has this very config.

    Returns:
        Whether it holds a run already.

    Raises:
        UserError: it holds a run with another config; the difference is shown.
    """
    path = workdir / "config.json"
    flat = config_lib.flatten(config)
    # What failed before it left anything may be corrected in place.
    if path.exists() and _is_begun(workdir):
        try:
            old = json.loads(path.read_text())["config"]
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise UserError(
                f"{path} is not readable as the config of a run ({error}); give another --workdir"
            ) from error
        lines = config_lib.difference(old, json.loads(json.dumps(flat)))
        if lines:
            raise UserError(
                f"{workdir} holds a run with another config: " + "; ".join(lines) + ". Give "
                "another --workdir, or the old values to resume"
            )
        return True
    unfinished = path.with_name("config.json.unfinished")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({"config": flat, "versions": versions()}, indent=1))
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"cannot write to the work directory {workdir}: {error}") from error
    return False


def _is_begun(workdir: Path) -> bool:
    """Whether a run has left anything there; one that failed before its first step has not."""
    metrics = workdir / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any(
        any((workdir / name).glob("*")) for name in ("checkpoints", "weights")
    )


def _is_finished(workdir: Path, num_steps: int) -> bool:
    """Whether the run has made its last step, evaluated the outcome and written the report."""
    path = workdir / "report.json"
    if not path.is_file() or not (workdir / "report.html").is_file():
        return False
    after = json.loads(path.read_text())["eval"]["after"]
    return after is not None and after["step"] == num_steps


def _setup_jax(config: Config) -> "Cluster":
    """Settings that must precede the first use of a device; joins the other processes of a pod."""
    import jax

    from tba_jax.devices import cluster

    if config.placement == "pod":
        address = cluster.resolve_address(
            _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, os.environ
        )
        if address.num_processes != 1:
            return cluster.start(
                address,
                num_cpu_devices=config.num_cpu_devices,
                heartbeat_s=config.pod.heartbeat_s,
                shutdown_s=int(config.log.watchdog_s),
            )
    if config.num_cpu_devices > 1:
        jax.config.update("jax_num_cpu_devices", config.num_cpu_devices)
    return cluster.Cluster()


def _writers(config: Config, workdir: Path) -> list[Any]:
    from tba_jax.report.writers import TensorBoardWriter, WandbWriter

    writers: list[Any] = []
    if config.log.tensorboard:
        writers.append(TensorBoardWriter(workdir / "tensorboard"))
    if config.log.wandb_project:
        writers.append(
            WandbWriter(
                config.log.wandb_project,
                name=workdir.name,
                workdir=workdir,
                config=config_lib.flatten(config),
            )
        )
    return writers


def run_config(
    config: Config,
    workdir: Path,
    cluster: "Cluster",
    interrupted: Interruption,
    events: Sequence[Mapping[str, Any]] | None = None,
) -> int:
    """Build, drive, evaluate at the end, write the report.

    Args:
        config: validated.
        workdir: claimed.
        cluster: the processes of the run; every one of them calls this.
        interrupted: looked at between steps.
        events: schedule to replay; None: the configured driver.

    Returns:
        Process exit code.
    """
    from rich.console import Console

    from tba_jax.report.writers import ProgressDisplay, read_jsonl
    from tba_jax.run import drivers
    from tba_jax.run.build import build
    from tba_jax.run.closing import host_counts, write_report_json
    from tba_jax.run.rewarding import make_task
    from tba_jax.run.run import RunClock
    from tba_jax.run.schedule_replay import drive_schedule

    clock = RunClock(time.perf_counter, _PROCESS_START)
    task = make_task(config)
    progress = ProgressDisplay(
        config.num_steps,
        title=workdir.name,
        kind=task.response_kinds[0] if task.response_kinds else "",
        metric=task.metric,
        console=None if cluster.is_primary else Console(quiet=True, force_terminal=False),
    )
    try:
        run = build(
            config,
            workdir,
            cluster=cluster,
            clock=clock,
            progress=progress,
            extra_writers=_writers(config, workdir) if cluster.is_primary else (),
        )
    except BaseException:
        progress.close()
        raise
    try:
        _check_reward(run)
        begun = run.trainer.step_index
        if begun:
            progress.resume(read_jsonl(workdir / "metrics.jsonl"))
            progress.note(f"resumed {workdir} at step {begun} of {config.num_steps}")
            if run.before is None and cluster.is_primary:
                run.evaluate_start_model()
        if events is not None:
            drive_schedule(run, events, interrupted)
        elif begun < config.num_steps:
            drive = drivers.drive_sync if config.driver == "sync" else drivers.drive_async
            drive(run, interrupted)
        # Before the final evaluation, which may take long or fail. It is in no checkpoint: a run
        # that is killed in it evaluates again.
        run.save()
        finished = run.trainer.step_index >= config.num_steps
        if finished:
            _evaluate_at_the_end(run)
        progress.phase("saving")
        run.checkpoints.wait()
        counts = cluster.gather_json(host_counts(run))
    except BaseException:
        run.abort()
        raise
    run.close()
    if not cluster.is_primary:
        return 0
    write_report_json(run, counts)
    if not finished and events is not None and not interrupted():
        print(f"The schedule ends at step {run.trainer.step_index} of {config.num_steps}.")
        return 0
    if not finished:
        number = interrupted.signal_number
        cause = "a signal to another process" if number is None else signal.Signals(number).name
        if cluster.num_processes > 1 and number is None:
            cause = "preemption (SIGTERM to one of the processes)"
        print(
            f"Stopped by {cause} at step {run.trainer.step_index} of {config.num_steps}; saved. "
            "Run the same command again to continue."
        )
        # A pod that was told to go and went in order has not failed.
        return 128 + (number or 2) if cluster.num_processes == 1 else 0
    from tba_jax.report.build import build_report

    print(f"Report: {build_report(workdir)}")
    return 0


def _evaluate_at_the_end(run: "Run") -> None:
    """What the report compares; the publication is a call of all hosts, the rest of process 0."""
    is_primary = run.cluster.is_primary
    if run.before is None and is_primary:
        run.evaluate_start_model()
    is_due = run.last_eval_step < run.config.num_steps
    if not run.cluster.broadcast_json(is_due):
        return
    run.progress.phase("evaluating the final policy")
    run.trainer.publish()
    run.transport.poll()
    published = run.transport.latest(0)
    assert published is not None
    if is_primary:
        run.evaluate(published.version, published.params)


def _check_reward(run: "Run") -> None:
    """Refuse a reward function that cannot be used while nothing has been computed yet."""
    try:
        run.rewards.check()
        if run.gold is not None:
            run.gold.check()
    except (RuntimeError, TimeoutError) as error:
        raise UserError(str(error)) from error


def main(argv: Sequence[str]) -> int:
    """absl entry point."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; options begin with --")
    if _CONFIG.value is None:
        raise UserError("no --config given; try --config=math")
    config = freeze(_CONFIG.value)
    validate(config)
    workdir = local_folder(_WORKDIR.value or default_workdir(config))
    if _DRY_RUN.value:
        print(json.dumps({"workdir": str(workdir), **config_lib.flatten(config)}, indent=1))
        return 0
    events = None
    if _REPLAY_SCHEDULE.value:
        from tba_jax.run.schedule_replay import read_schedule

        events = read_schedule(_REPLAY_SCHEDULE.value)
        workdir = Path(_WORKDIR.value or f"{default_workdir(config)}-replay")
    if config.placement == "pod":
        if events is not None:
            raise UserError("a schedule is replayed in one process; give another placement")
        return _run_pod(config, workdir)
    interrupted = Interruption()
    if claim_workdir(workdir, config):
        if events is not None:
            raise UserError(f"{workdir} holds a run; a replay needs a --workdir of its own")
        if _is_finished(workdir, config.num_steps):
            print(f"This run is finished. Report: {workdir / 'report.html'}")
            return 0
    return run_config(config, workdir, _setup_jax(config), interrupted, events)


def _run_pod(config: Config, workdir: Path) -> int:
    """`main` in a process of a pod: join the others, let process 0 claim the work directory."""
    from tba_jax.devices.cluster import LastWords, PeerError, peer_errors

    interrupted = Interruption()
    cluster = _setup_jax(config)
    last_words = LastWords(cluster)
    try:
        is_finished = _claim_together(cluster, config, workdir)
        if is_finished:
            if cluster.is_primary:
                print(f"This run is finished. Report: {workdir / 'report.html'}")
            code = 0
        else:
            with peer_errors(cluster):
                code = run_config(config, workdir, cluster, interrupted)
        cluster.close()
        last_words.unsay()
        return code
    except BaseException as error:
        if cluster.num_processes == 1:
            raise
        # Not by way of the interpreter's end: leaving jax.distributed would wait for the others,
        # who wait for this process. They notice that it is gone.
        code = _tell(error)
        if not isinstance(error, PeerError):
            print(
                f"error: process {cluster.process_id} of {cluster.num_processes} failed, which "
                f"ends the others within {config.pod.heartbeat_s} s (config.pod.heartbeat_s)",
                file=sys.stderr,
            )
        last_words.unsay()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _claim_together(cluster: "Cluster", config: Config, workdir: Path) -> bool:
    """Check that every process has the same command; process 0 claims the directory for all.

    Returns:
        Whether the run in it is finished.

    Raises:
        UserError: configs differ, or the directory is refused; the same in all processes.
    """
    flat = json.loads(json.dumps(config_lib.flatten(config)))
    mine = {**flat, "workdir": str(workdir), "version": versions()}
    theirs = cluster.broadcast_json(mine)
    lines = [
        f"{field}: {theirs[field]!r} there, {mine[field]!r} here"
        for field in sorted(mine)
        if theirs.get(field) != mine[field]
    ]
    for host, wrong in enumerate(cluster.gather_json(lines)):
        if wrong:
            raise UserError(
                f"process {host} was started with another command than process 0: "
                f"{'; '.join(wrong)}. Start the same command on every host"
            )
    answer: dict[str, Any] = {}
    if cluster.is_primary:
        try:
            is_begun = claim_workdir(workdir, config)
            answer = {"finished": is_begun and _is_finished(workdir, config.num_steps)}
        except UserError as error:
            answer = {"refused": str(error)}
    answer = cluster.broadcast_json(answer)
    if "refused" in answer:
        raise UserError(answer["refused"])
    if not workdir.is_dir():
        raise UserError(
            f"process {cluster.process_id} does not see the work directory {workdir} that process "
            "0 made: a pod needs a directory that all hosts share"
        )
    return answer["finished"]


def cli(argv: Sequence[str] | None = None) -> int:
    """Run the command; what a user can mend becomes one line on standard error."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's chatter on standard error
    from tba_jax.devices.worker import WorkerError

    argv = sys.argv if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n{flags.FLAGS.main_module_help()}")
        print("--dry_run prints every field; docs/config.md says what each means.")
        return 0
    try:
        return main(parse_flags(argv, flags.FLAGS))
    except (WorkerError, UserError, ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, WorkerError) and not _is_mendable(error):
            raise
        return _tell(error)


def _tell(error: BaseException) -> int:
    """Print an error, with its traceback where that may help; the exit code."""
    from tba_jax.devices.worker import WorkerError

    if isinstance(error, WorkerError):
        print(f"error: {error}", file=sys.stderr)
        if error.__cause__ is not None and not _is_mendable(error.__cause__):
            traceback.print_exception(error.__cause__)
        return 1
    if _is_mendable(error):
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError | ValueError) else 1
    traceback.print_exception(error)
    return 1


def _is_mendable(error: BaseException) -> bool:
    """Whether the message tells a user what to do, so that a traceback would only hide it.

    That holds for our named errors, and for a ValueError that this package raised itself; one that
    comes out of numpy or jax is a defect of ours and keeps its traceback.
    """
    from tba_jax.devices.cluster import PeerError
    from tba_jax.devices.turns import TurnError
    from tba_jax.report.writers import LogError
    from tba_jax.rewards.pool import RewardFailure
    from tba_jax.run.checkpoint import CheckpointError
    from tba_jax.train.trainer import NonFiniteError
    from tba_jax.weights.transport import PublicationError

    named = (
        UserError,
        CheckpointError,
        LogError,
        PeerError,
        PublicationError,
        RewardFailure,
        NonFiniteError,
        TurnError,
    )
    if isinstance(error, named):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = Path(frames[-1].filename) if frames else Path()
    return isinstance(error, ValueError) and Path(__file__).parent in raised_in.parents


def _exit(code: int) -> None:
    """Leave, also while a searcher is in the middle of a round that nobody needs any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(t.daemon and t.name.startswith("searcher-") for t in threading.enumerate()):
        os._exit(code)  # a thread in native code must not meet the end of the interpreter
    sys.exit(code)


if __name__ == "__main__":
    _exit(cli())
