# SPDX-License-Identifier: Apache-2.0
"""The main command: parse flags, build, train, report.

    python -m tba_jax.main --config=math[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE]

The command resumes a run that the work directory has already. With --coordinator the same
command runs on every host, under jax.distributed.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from tba_jax.commands.interruption import Interruption, surviving_closed_outputs
from tba_jax.config import schema as config_lib
from tba_jax.config.command_line import OPEN, local_folder, parse_flags
from tba_jax.config.methods import written_out
from tba_jax.config.notes import notes
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, freeze
from tba_jax.devices.cluster import Address, PeerError, resolve_address
from tba_jax.remote.channel import HEARTBEAT_S
from tba_jax.run.errors import UserError, tell
from tba_jax.run.peers import start_cluster
from tba_jax.run.run import run_job, train
from tba_jax.run.workdir import Outcome, begun_config, default_workdir
from tba_jax.storage.whole_files import is_address

# This runs before JAX is imported, so that times count from the start of the command.
_PROCESS_START = time.perf_counter()

# Argument of the config flag, filled in by `main`.
_GIVEN: list[str] = []
_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "A preset, math[:PRESET], or a file, FILE.py[:PRESET].",
    sys_argv=_GIVEN,
    **OPEN,
)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Work directory (default runs/FILE-PRESET-seedN). A run in it is resumed.",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "Several processes: HOST:PORT of process 0 (or JAX_COORDINATOR_ADDRESS); auto: on a TPU pod.",
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Number of processes of the run (or JAX_NUM_PROCESSES)."
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Index of this process, from 0 (or JAX_PROCESS_ID)."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the config and its first problem on this machine; train nothing."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    argv = sys.argv if argv is None else [sys.argv[0], *argv]
    if "--help" in argv or "-h" in argv:
        return _help()
    others = _parsed(argv)[1:]
    if others:
        raise UserError(f"unexpected argument {others[0]!r}; options begin with --")
    if _CONFIG.value is None:
        raise UserError("no --config given; try --config=math")
    config = freeze(_CONFIG.value)
    validate(config)
    given = _WORKDIR.value or default_workdir(config)
    address = given if is_address(given) else ""
    workdir = Path(given) if address else local_folder(given)
    job = resolve_address(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, os.environ)
    is_job = job.num_processes != 1
    from tba_jax.planning.choices import choose, lines

    try:
        config = choose(config, {} if address else begun_config(workdir), is_job=is_job)
    except Exception:
        if _DRY_RUN.value:  # print the given settings, without those that could not be chosen
            _print_settings(given, config)
        raise
    validate(config)
    for line in lines(config):
        print(line, file=sys.stderr if _DRY_RUN.value else sys.stdout)
    if _DRY_RUN.value:
        _print_settings(given, config)
        for line in notes(config):
            print(f"note: {line}", file=sys.stderr)
        from tba_jax.run.task_parts import preflight

        preflight(config)
        if config.model.path and (line := _tokenizer_difference(config.model.path)):
            print(f"note: {line}", file=sys.stderr)
        return 0
    with surviving_closed_outputs():
        return _run(config, workdir, address, job if is_job else None)


def _tokenizer_difference(model_path: str) -> str:
    from tba_jax.models.hf import folders, tokenizer_files

    return tokenizer_files.difference(folders.resolve(model_path, with_weights=False))


def _print_settings(workdir: str, config: Config) -> None:
    print(json.dumps({"workdir": workdir, **config_lib.flatten(config)}, indent=1))


def _run(config: Config, workdir: Path, address: str, job: Address | None) -> int:
    """Train, or report that the run is finished; return the exit code.

    Args:
        address: address of the work directory in an object store; "" for a local folder.
        job: address of the other processes of the run; None: there are none.
    """
    if address and (job or config.placement == "fleet"):
        raise UserError(
            "a run of several processes needs a work directory that is a folder, shared by all "
            f"hosts; --workdir={address} is an object store"
        )
    if job:
        return _run_job(config, workdir, job)
    interrupted = Interruption()
    outcome = train(
        config,
        address or workdir,
        interrupted=interrupted,
        start_s=_PROCESS_START,
    )
    return _say(outcome, config, address.rstrip("/") or workdir, interrupted.signal_number)


def _say(
    outcome: Outcome,
    config: Config,
    workdir: object,
    signal_number: int | None,
    *,
    is_job: bool = False,
) -> int:
    """Print the outcome of a run; return the exit code of a single process."""
    if outcome.is_finished:
        before, after = "", ""
        if outcome.was_finished:
            before, after = "This run is finished. ", " (--workdir=DIR begins another run)"
        print(f"{before}Report: {workdir}/report.html{after}")
        return 0
    cause = "a signal to another process"
    if signal_number is not None:
        cause = signal.Signals(signal_number).name
    elif is_job:
        cause = "preemption (SIGTERM to one of the processes)"
    print(
        f"Stopped by {cause} at step {outcome.step} of {config.num_steps}; saved. "
        "Run the same command again to continue."
    )
    return 128 + (signal_number or 2)


def _run_job(config: Config, workdir: Path, job: Address) -> int:
    """Connect to the other processes of a job, and run; the owner locks the work directory."""

    interrupted = Interruption()
    everyone = start_cluster(config, job)
    held = contextlib.ExitStack()
    try:
        from tba_jax.planning.choices import choose_together, lines

        given = len(config.chosen)
        config = choose_together(config, everyone, begun_config(workdir))
        validate(config)
        for line in lines(config)[given:] if everyone.is_primary else ():
            print(line, flush=True)

        cluster, outcome = run_job(
            config,
            workdir,
            everyone,
            interrupted,
            start_s=_PROCESS_START,
            held=held,
        )
        code = 0
        if outcome is not None and cluster.is_primary:
            code = _say(outcome, config, workdir, interrupted.signal_number, is_job=True)
        everyone.close()  # the others may still request steps or tickets
        held.close()
        # A pod that stops on SIGTERM exits with status 0.
        return code if everyone.num_processes == 1 else 0
    except BaseException as error:
        if everyone.num_processes == 1:
            raise
        # Exit without the interpreter's shutdown: leaving jax.distributed would wait for the other
        # processes, which wait for this process. They detect its end by the heartbeat timeout.
        code = tell(error)
        if not isinstance(error, PeerError):
            print(
                f"error: process {everyone.process_id} of {everyone.num_processes} failed, which "
                f"ends the others within {HEARTBEAT_S} s",
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _help() -> int:
    _, _, own = flags.FLAGS.module_help(__name__).partition(":\n")
    print(f"{__doc__}\n{own}")
    print("--dry_run prints every field; docs/config.md explains them.")
    return 0


def _parsed(argv: Sequence[str]) -> list[str]:
    """Return the arguments that are not flags.

    Raises:
        ConfigError: a flag is malformed.
    """
    _GIVEN[:] = written_out(argv)
    rest = parse_flags(_GIVEN, flags.FLAGS)
    if _CONFIG.value is not None:
        freeze(_CONFIG.value)  # reads the schedules
    return rest
