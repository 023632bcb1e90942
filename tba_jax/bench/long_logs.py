# SPDX-License-Identifier: Apache-2.0
"""Command: cost of the logs of a long run: resume, report, and reading of the schedule.

    python -m tba_jax.bench.long_logs --steps=100000 --searchers=8 --json

The logs are synthetic, with the fields and line lengths of an asynchronous run. Each part is
measured in its own process, whose peak memory is compared with a process that only imports the same
modules. A resume opens both logs, removes the last steps (the 200 after the checkpoint) and fills
the display.
"""

import argparse
import contextlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import reporting
from tba_jax.storage import sealed

_AFTER_CHECKPOINT = 200  # steps whose lines a resume removes
_STEP_S = 0.5
_GROUPS, _SIZE = 16, 16  # prompts and responses of a batch
_METRICS = tuple(
    f"{area}/{name}"
    for area, names in {
        "train": "loss tb_loss kl_reference log_z grad_norm ess_fraction reward_mean reward_std "
        "residual_std sampler_gap response_tokens lr beta nll_per_token log_ratio_p05 "
        "log_ratio_p50 log_ratio_p95 response_length_mean wait_batch_s draw_s step_s tokens_per_s "
        "padding_share skipped_steps",
        "buffer": "staleness_mean staleness_max fresh_fraction repeat_fraction num_prompts "
        "num_trajectories num_bytes reward_mean age_mean uses_mean unique_fraction replay_ratio "
        "trained_share length_rank effective_m",
        "sync": "publish_s merge_s",
        "search": "rounds tokens_per_s reward_mean response_length_mean kind_share "
        "unique_fraction under_way idle_s slot_use",
    }.items()
    for name in names.split()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = reporting.make_parser("long_logs", __doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the run")
    parser.add_argument("--searchers", type=int, default=8)
    parser.add_argument(
        "--workdir",
        default="",
        help="folder of the logs, which is kept; default: a temporary folder",
    )
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    args, _ = parser.parse_known_args(argv)
    if args.part:
        print(json.dumps(_in_this_process(args.part, Path(args.workdir))))
        return 0
    return reporting.run_command(parser, argv, _measured, _table)


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    if args.steps <= _AFTER_CHECKPOINT or args.searchers < 1:
        raise ValueError(
            f"--steps={args.steps} --searchers={args.searchers}: too few. Set "
            f"--steps={_AFTER_CHECKPOINT + 1} or more and --searchers=1 or more"
        )
    with contextlib.ExitStack() as stack:
        folder = args.workdir or stack.enter_context(tempfile.TemporaryDirectory())
        workdir = Path(folder)
        if not (workdir / "saved.json").is_file():
            make_workdir(workdir, args.steps, args.searchers)
        return measure(workdir)


def measure(workdir: Path) -> dict[str, Any]:
    """Return seconds and peak memory of each part, and the lengths of the logs.

    Args:
        workdir: folder written by `make_workdir`; the resume truncates its logs.
    """
    result: dict[str, Any] = {
        f"{path.stem}_bytes": path.stat().st_size for path in sorted(workdir.glob("*.jsonl"))
    }
    for part in ("imports", "replay", "resume", "report"):
        command = [sys.executable, "-m", "tba_jax.bench.long_logs", f"--part={part}"]
        done = subprocess.run(
            [*command, f"--workdir={workdir}"], capture_output=True, text=True, timeout=3600
        )
        if done.returncode:
            raise ValueError(f"{part} failed: {done.stderr.strip()[-500:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        result |= {f"{part}_{name}": value for name, value in found.items()}
    for part in ("replay", "resume", "report"):
        result[f"{part}_added_mb"] = result[f"{part}_peak_mb"] - result["imports_peak_mb"]
    return result


def _in_this_process(part: str, workdir: Path) -> dict[str, float]:
    from tba_jax.report import build, plots  # noqa: F401  # what every part has imported
    from tba_jax.run import run, schedule_replay  # noqa: F401

    start, cpu = time.perf_counter(), time.process_time()
    PARTS[part](workdir)
    return {
        "s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _resume(workdir: Path) -> None:
    """Open and truncate the logs, as a resumed run does."""
    from tba_jax.devices.cluster import Cluster
    from tba_jax.flow.state import PartState
    from tba_jax.report.writers import ProgressDisplay
    from tba_jax.run.conduct import resume_display
    from tba_jax.run.run import open_logs

    saved = json.loads((workdir / "saved.json").read_text())
    progress = ProgressDisplay(saved["step"], title="long")
    logs = open_logs(workdir, Cluster(), progress, [])
    logs.restore(PartState({}, saved["logs"]))
    logs.cut_back(
        saved["step"], lambda r: r["step"] <= saved["step"], lambda e: e.get("step", -1) < 0
    )
    resume_display(progress, workdir)
    logs.close()


def _report(workdir: Path) -> None:
    """Build the report of the run."""
    from tba_jax.report.build import build_report

    build_report(workdir)


def _replay(workdir: Path) -> None:
    """Read a schedule as a replay does, without executing it."""
    from tba_jax.run.schedule_replay import read_schedule

    schedule = read_schedule(workdir / "schedule.jsonl")
    for searcher in schedule.admissions:
        for _ in schedule.chunks(searcher):
            pass
    for _ in schedule.events("sync", "round", "step"):
        pass


PARTS: Mapping[str, Callable[[Path], None]] = {
    "imports": lambda workdir: None,
    "replay": _replay,
    "resume": _resume,
    "report": _report,
}


def make_workdir(workdir: Path, num_steps: int, num_searchers: int) -> None:
    """Write the logs of a run that was killed some steps after its newest checkpoint.

    Also writes saved.json: the step of that checkpoint and the lengths of the logs.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    config = {"name": "long", "num_steps": num_steps, "num_searchers": num_searchers}
    sealed.write(workdir / "config.json", {"config": config})
    rng = random.Random(0)
    with (
        open(workdir / "metrics.jsonl", "w") as metrics,
        open(workdir / "schedule.jsonl", "w") as schedule,
    ):
        for step in range(num_steps):
            if step == num_steps - _AFTER_CHECKPOINT:
                saved = {"metrics.jsonl": metrics.tell(), "schedule.jsonl": schedule.tell()}
                facts = {"step": step, "logs": saved}
            schedule.writelines(map(_line, _events(step, num_searchers, rng)))
            metrics.writelines(map(_line, _records(step + 1, rng)))
    (workdir / "saved.json").write_text(json.dumps(facts))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def _records(step: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the records of one step; every hundredth step also has an evaluation."""
    record: dict[str, Any] = {"step": step, "time_s": step * _STEP_S}
    record |= {name: rng.random() for name in _METRICS}
    record["buffer/staleness_histogram"] = [[i, rng.randrange(100)] for i in range(6)]
    yield record
    if step % 100 == 0:
        shares = {"eval/pass_at_1": rng.random(), "eval/kind_share": rng.random()}
        facts = {"eval/metric": "pass_at_1", "eval/n": 512, "eval/num_trials": 512}
        yield {"step": step, "time_s": step * _STEP_S, **facts, **shares, "eval/version": step}


def _events(step: int, num_searchers: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the log lines of a step."""
    now = step * _STEP_S
    yield {"event": "sync", "step": step, "version": step, **_times(now, rng.random() / 100)}
    for searcher in range(num_searchers):
        head = {"event": "chunk", "searcher": searcher, "chunk": 3 * step, "begins": step == 0}
        yield {**head, "version": step, "tickets": [2 * step, 2 * step + 1]}
    for i in range(num_searchers + num_searchers // 2):
        searcher, number = i % num_searchers, 2 * step + i // num_searchers
        yield {
            **{"event": "round", "searcher": searcher, "round": number, "version": step},
            **{"prompt_ids": [rng.randrange(65_536)], "generated": _SIZE, "rejected": {}},
            "merge_step": step,
            **_times(now - rng.random(), 0.9 + rng.random() / 10),
            **{"decode_s": rng.random() / 2, "reward_s": rng.random() / 100},
            **{"reference_s": rng.random() / 50, "tokens": rng.randrange(400)},
            **{"reward_mean": rng.random(), "response_length_mean": 20 * rng.random()},
            **{"unique_fraction": rng.random(), "kind_share": rng.random()},
        }
    first = _GROUPS * _SIZE * step
    ids = [[first + _SIZE * g + i for i in range(1 + g % 3)] for g in range(_GROUPS)]
    yield {
        "event": "step",
        "step": step,
        **_times(now + 0.02, 0.4 + rng.random() / 20),
        "wait_s": rng.random() / 50,
        "trajectory_ids": ids,
        "weights": [[_SIZE - len(group) + 1, *[1] * (len(group) - 1)] for group in ids],
        "bucket": [256, 12, 16],
    }


def _times(start: float, seconds: float) -> dict[str, float]:
    return {"start_s": start, "end_s": start + seconds}


def _table(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"metrics.jsonl {result['metrics_bytes'] / 1e6:.0f} MB, "
        f"schedule.jsonl {result['schedule_bytes'] / 1e6:.0f} MB"
    ]
    for part in ("resume", "report", "replay"):
        lines.append(
            f"{part:7} {result[f'{part}_s']:7.2f} s ({result[f'{part}_cpu_s']:.2f} s of CPU), "
            f"{result[f'{part}_added_mb']:6.0f} MB above the imports"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
