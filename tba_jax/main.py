# SPDX-License-Identifier: Apache-2.0
"""The command: flags -> config -> wiring -> drive -> report.

    python -m tba_jax.main --config=configs/math.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE]

Running it again on a work directory that holds a run resumes it. Nothing heavy is imported at
module level: reward processes import this module again when they start.
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

from tba_jax import config as config_lib
from tba_jax.command_line import parse_flags
from tba_jax.config import Config

if TYPE_CHECKING:
    from tba_jax.wiring import Run

# Before jax is imported, so that times count from the command.
_PROCESS_START = time.perf_counter()

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, FILE.py[:PRESET].")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run lives; default runs/FILE-PRESET-seedN. Again: resume."
)
_REPLAY_SCHEDULE = flags.DEFINE_string(
    "replay_schedule", None, "schedule.jsonl of an asynchronous run: do it again in one thread."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Resolve and check the config, print it, touch nothing, exit."
)


class UserError(Exception):
    """A mistake of the user's: printed as one line, without a traceback."""


class Interruption:
    """Turns SIGINT and SIGTERM into a flag that the drivers look at between steps.

    A second signal of the same kind has its usual effect.
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


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    import importlib.metadata
    import platform

    names = ("tba_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def _setup_jax(config: Config) -> None:
    """Settings that must precede the first use of a device."""
    import jax

    if config.num_cpu_devices > 1:
        jax.config.update("jax_num_cpu_devices", config.num_cpu_devices)


def _writers(config: Config, workdir: Path) -> list[Any]:
    from tba_jax.metrics import TensorBoardWriter, WandbWriter

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
    interrupted: Interruption,
    events: Sequence[Mapping[str, Any]] | None = None,
) -> int:
    """Build, drive, evaluate at the end, write the report.

    Args:
        config: validated.
        workdir: claimed.
        interrupted: looked at between steps.
        events: schedule to replay; None: the configured driver.

    Returns:
        Process exit code.
    """
    _setup_jax(config)
    from tba_jax import drivers
    from tba_jax.metrics import ProgressDisplay, read_jsonl
    from tba_jax.parts import make_task
    from tba_jax.schedule_replay import drive_schedule
    from tba_jax.wiring import RunClock, build

    clock = RunClock(time.perf_counter, _PROCESS_START)
    task = make_task(config)
    progress = ProgressDisplay(
        config.num_steps,
        title=workdir.name,
        kind=task.response_kinds[0] if task.response_kinds else "",
        metric=task.metric,
    )
    try:
        run = build(
            config,
            workdir,
            clock=clock,
            progress=progress,
            extra_writers=_writers(config, workdir),
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
            if run.before is None:
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
        if run.before is None and finished:
            run.evaluate_start_model()
        if finished and run.last_eval_step < config.num_steps:
            progress.phase("evaluating the final policy")
            start = clock()
            run.trainer.publish()
            run.transport.poll()
            published = run.transport.latest(0)
            assert published is not None
            run.record_evaluation(published.version, run.evaluator.run(published.params), start)
        progress.phase("saving")
        run.checkpoints.wait()
    except BaseException:
        run.abort()
        raise
    run.close()
    write_report_json(run)
    if not finished and events is not None and not interrupted():
        print(f"The schedule ends at step {run.trainer.step_index} of {config.num_steps}.")
        return 0
    if not finished:
        print(
            f"Stopped by {signal.Signals(interrupted.signal_number or 2).name} at step "
            f"{run.trainer.step_index} of {config.num_steps}; saved. Run the same command again "
            "to continue."
        )
        return 128 + (interrupted.signal_number or 2)
    from tba_jax.report import build_report

    print(f"Report: {build_report(workdir)}")
    return 0


def _check_reward(run: "Run") -> None:
    """Refuse a reward function that cannot be used while nothing has been computed yet."""
    try:
        run.rewards.check()
        if run.gold is not None:
            run.gold.check()
    except (RuntimeError, TimeoutError) as error:
        raise UserError(str(error)) from error


def write_report_json(run: "Run") -> None:
    """WORKDIR/report.json: the figures that scripts may rely on."""
    import platform

    import jax

    from tba_jax.metrics import jsonable

    trainer, clock = run.trainer, run.clock
    wall_s = clock()

    def evaluation(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if record is None:
            return None
        return {k: v for k, v in record.items() if k not in ("texts", "rewards")}

    samples = []
    if run.before is not None and run.after is not None:
        for prompt, before, before_reward, after, after_reward in zip(
            run.evaluator.prompts,
            run.before["texts"],
            run.before["rewards"],
            run.after["texts"],
            run.after["rewards"],
            strict=False,  # the report shows the first few prompts only
        ):
            samples.append(
                {
                    "prompt": prompt.text,
                    "answer": prompt.columns.get("answer", ""),
                    "before": before,
                    "after": after,
                    "before_reward": before_reward,
                    "after_reward": after_reward,
                }
            )
    decoded = sum(s.decoded_tokens for s in run.searchers)
    device = jax.local_devices()[0]
    report = {
        "name": run.config.name,
        "seed": run.config.seed,
        "driver": run.config.driver,
        "eval": {"before": evaluation(run.before), "after": evaluation(run.after)},
        "steps": trainer.step_index,
        "num_steps": run.config.num_steps,
        "wall_s": wall_s,
        "time_to_first_step_s": run.time_to_first_step_s,
        "tokens_per_s": {"decoded": decoded / wall_s, "trained": trainer.trained_tokens / wall_s},
        "idle_s": {
            "trainer": trainer.wait_s,
            "searchers": [run.searcher_idle_s.get(s.index, 0.0) for s in run.searchers],
        },
        "staleness": staleness_summary(trainer.staleness_counts),
        "ledger": {
            **run.buffer.ledger(),
            "generated": sum(outbox.counts.generated for outbox in run.outboxes),
            "outbox": sum(outbox.counts.pending for outbox in run.outboxes),
        },
        "sync": {
            "count": len(trainer.sync_s),
            "mean_s": sum(trainer.sync_s) / max(1, len(trainer.sync_s)),
            "max_s": max(trainer.sync_s, default=0.0),
        },
        "skipped_prompts": {
            "train": sum(stream.num_skipped for stream in run.streams),
            "eval": run.evaluator.num_skipped,
        },
        "compiled_decode_programs": run.decoder.compile_count,
        "kinds": list(run.task.response_kinds),
        "samples": samples,
        "hardware": f"{len(jax.local_devices())} x {device.device_kind}, "
        f"{os.cpu_count()} CPU cores, {platform.platform()}",
        "versions": versions(),
        "config_changes": config_lib.difference(
            config_lib.flatten(config_lib.default_config()), config_lib.flatten(run.config)
        ),
    }
    (run.workdir / "report.json").write_text(json.dumps(jsonable(report), indent=1))


def staleness_summary(counts: Mapping[int, int]) -> dict[str, float]:
    """Mean, median, 95th percentile and maximum over all uses of trajectories; {} for none."""
    import numpy as np

    if not counts:
        return {}
    values = np.array(sorted(counts))
    weights = np.array([counts[v] for v in values.tolist()])
    reached = np.cumsum(weights) / weights.sum()
    return {
        "mean": float((values * weights).sum() / weights.sum()),
        "p50": int(values[np.searchsorted(reached, 0.5)]),
        "p95": int(values[np.searchsorted(reached, 0.95)]),
        "max": int(values[-1]),
    }


def main(argv: Sequence[str]) -> int:
    """absl entry point."""
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; options begin with --")
    config = _CONFIG.value
    if config is None:
        raise UserError("no --config given; try --config=configs/math.py")
    config_lib.validate(config)
    workdir = Path(_WORKDIR.value or default_workdir(config))
    if _DRY_RUN.value:
        print(json.dumps({"workdir": str(workdir), **config_lib.flatten(config)}, indent=1))
        return 0
    events = None
    if _REPLAY_SCHEDULE.value:
        from tba_jax.schedule_replay import read_schedule

        events = read_schedule(_REPLAY_SCHEDULE.value)
        workdir = Path(_WORKDIR.value or f"{default_workdir(config)}-replay")
    interrupted = Interruption()
    if claim_workdir(workdir, config):
        if events is not None:
            raise UserError(f"{workdir} holds a run; a replay needs a --workdir of its own")
        if _is_finished(workdir, config.num_steps):
            print(f"This run is finished. Report: {workdir / 'report.html'}")
            return 0
    return run_config(config, workdir, interrupted, events)


def cli(argv: Sequence[str] | None = None) -> int:
    """Run the command; what a user can mend becomes one line on standard error."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's chatter on standard error
    from tba_jax.background import WorkerError

    argv = sys.argv if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n{flags.FLAGS.main_module_help()}")
        print("--dry_run prints every field; tba_jax/config.py says what each means.")
        return 0
    try:
        return main(parse_flags(argv, flags.FLAGS))
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.__cause__ is not None and not _is_mendable(error.__cause__):
            traceback.print_exception(error.__cause__)
        return 1
    except (UserError, ValueError, RuntimeError, OSError) as error:
        if not _is_mendable(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError | ValueError) else 1


def _is_mendable(error: BaseException) -> bool:
    """Whether the message tells a user what to do, so that a traceback would only hide it.

    That holds for our named errors, and for a ValueError that this package raised itself; one that
    comes out of numpy or jax is a defect of ours and keeps its traceback.
    """
    from tba_jax.checkpointing import CheckpointError
    from tba_jax.metrics import LogError
    from tba_jax.rewards.pool import RewardFailure
    from tba_jax.trainer import NonFiniteError
    from tba_jax.weight_sync import PublicationError

    named = (UserError, CheckpointError, LogError, PublicationError, RewardFailure, NonFiniteError)
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
