# SPDX-License-Identifier: Apache-2.0
"""The main command: read the config, build, train, report.

    python -m tba_jax.main --config=math[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE]

The command resumes a run that the work directory has already. With --coordinator the same
command runs on every host, under jax.distributed.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tba_jax.commands.entry_point import make_parser
from tba_jax.commands.interruption import Interruption, surviving_closed_outputs
from tba_jax.config.advice import notes
from tba_jax.config.command_line import local_folder, override
from tba_jax.config.resolved import asked
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, flatten
from tba_jax.devices.cluster import Address, Cluster, PeerError, resolve_address
from tba_jax.devices.placement import divide
from tba_jax.remote.channel import HEARTBEAT_S
from tba_jax.run.errors import UserError, tell
from tba_jax.run.peers import start_cluster
from tba_jax.run.run import train
from tba_jax.run.workdir import begun_config
from tba_jax.storage.whole_files import is_address

# This runs before JAX is imported, so that times count from the start of the command.
_PROCESS_START = time.perf_counter()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = make_parser("main", __doc__)
    parser.epilog = "--dry_run prints every field of the config; docs/config.md explains them."
    add = parser.add_argument
    add("--config", help="a preset, math[:PRESET], or a file, FILE.py[:PRESET]")
    add("--workdir", help="work directory (default runs/FILE-PRESET-seedN); a run in it is resumed")
    add(
        "--coordinator",
        default=os.environ.get("JAX_COORDINATOR_ADDRESS") or None,
        help="several processes: HOST:PORT of process 0 (or JAX_COORDINATOR_ADDRESS); auto: on a "
        "TPU pod",
    )
    number, index = map(os.environ.get, ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
    add("--num_processes", type=int, default=number or None, help="or JAX_NUM_PROCESSES")
    add("--process_id", type=int, default=index or None, help="from 0; or JAX_PROCESS_ID")
    add(
        "--dry_run",
        action="store_true",
        help="print the config and its first problem on this machine; train nothing",
    )
    args, overrides = parser.parse_known_args(argv)
    if args.config is None:
        stray = f" ({overrides[0]} is no option)" if overrides else ""
        raise UserError(f"no --config given{stray}; try --config=math")
    config = override(None, [f"--config={args.config}", *overrides])
    validate(config)
    name = f"{config.name.replace('/', '-')}-seed{config.seed}"
    given = args.workdir or os.path.join("runs", name)
    workdir = given if is_address(given) else local_folder(given)
    job = resolve_address(args.coordinator, args.num_processes, args.process_id)
    from tba_jax.planning.choices import choose, lines

    try:
        begun = begun_config(workdir) if isinstance(workdir, Path) else {}
        config = choose(config, begun, is_job=job.num_processes != 1)
        validate(config)
    finally:  # after an error, without the settings that could not be chosen
        if args.dry_run:
            print(json.dumps({"workdir": str(given), **flatten(config)}, indent=1))
    for line in lines(config):
        print(line, file=sys.stderr if args.dry_run else sys.stdout)
    if args.dry_run:
        return _dry_run(config)
    with surviving_closed_outputs():
        is_alone, interrupted = job.num_processes == 1, Interruption()
        if not isinstance(workdir, Path) and not (is_alone and config.placement != "fleet"):
            raise UserError(
                f"--workdir={workdir} is an object store, and a run of several processes needs a "
                "folder. Give a folder that all hosts share"
            )
        if is_alone:
            return _run(config, workdir, interrupted)
        return _run_job(config, Path(workdir), interrupted, job)


def _dry_run(config: Config) -> int:
    """Check settings, data, model, rewards and devices of a run; return the exit code."""
    for line in notes(config):
        print(f"note: {line}", file=sys.stderr)
    preflight(config)
    return 0


def preflight(config: Config) -> None:
    """Check config, data, model, rewards and devices; raise the first problem. Reads no weights."""
    from tba_jax.models.hf import hf_weights
    from tba_jax.rewards.functions import try_functions
    from tba_jax.run import model_parts, shared
    from tba_jax.search.prompts import text_of

    validate(config)
    task = config.task.open()
    task.size("train")
    model = model_parts.describe_model(config, with_weights=False)
    path = config.model.path
    if path and os.path.isfile(os.path.join(os.path.expanduser(path), "config.json")):
        hf_weights.open_folder(model.folder)  # names and shapes
    model_parts.longest_sequence(config, model.config)
    tokenizer = model.load_tokenizer()
    text_of(task, tokenizer, "train", 0)
    try_functions(config, task)
    if environments := shared.make_environments(config, tokenizer):
        with contextlib.closing(environments):
            shared.check_environments(config, task, environments)
    if server := shared.make_server(config, model, tokenizer, Path()):
        server.check(loads=False)
    if config.placement != "hosts":  # the devices of other hosts are not known here
        start_cluster(config)
        import jax

        divide(config.placement, jax.local_devices(), asked(config), jax.process_index())


def _run(
    config: Config, workdir: Path | str, interrupted: Interruption, job: Cluster | None = None
) -> int:
    """Train, or report that the run is finished; return the exit code of a single process."""
    if not gc.isenabled():  # by `entry_point.run`
        importlib.import_module("tba_jax.run.conduct")
        gc.freeze()  # collections look at later objects only
        gc.enable()
    report = train(config, workdir, interrupted=interrupted, start_s=_PROCESS_START, job=job)
    if report is None:  # the first trainer process reports
        return 0
    workdir, number = str(workdir).rstrip("/"), interrupted.signal_number
    if report["steps"] < config.num_steps:
        cause = "a signal to another process" if number is None else signal.Signals(number).name
        print(
            f"Stopped by {cause} at step {report['steps']} of {config.num_steps}; saved. "
            "Run the same command again to continue."
        )
        return 128 + (number or signal.SIGINT)
    print(f"Report: {workdir}/report.html")
    return 0


def _run_job(config: Config, workdir: Path, interrupted: Interruption, job: Address) -> int:
    """Connect to the other processes of a job, and run; the owner locks the work directory.

    A pod that stops on SIGTERM exits with status 0.
    """
    from tba_jax.planning.choices import choose_together, lines

    everyone = start_cluster(config, job)
    try:
        given = len(config.chosen)
        config = choose_together(config, everyone, begun_config(workdir))
        validate(config)
        for line in lines(config)[given:] if everyone.is_primary else ():
            print(line, flush=True)
        code = _run(config, workdir, interrupted, everyone)
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
