# SPDX-License-Identifier: Apache-2.0
"""Command: measure this machine's accelerator in ten minutes, most important parts first.

    python -m tba_jax.bench.accelerator --out=DIR [--budget_s=600] [--parts=NAME,...] [--dry_run]

Parts: device, versions and measured rates; results of every program against CPU; planned against
measured memory; decoding against the memory rate; the train step against the matmul rate; the main
job with the asynchronous and the synchronous driver. Each part runs in its own process with a time
limit and writes its result to DIR when it ends, so a part that fails, hangs or exceeds its limit
does not affect the other parts. DIR contains results.json, page.md and the output of every part.
--dry_run runs all parts at tiny sizes on CPU in a minute or two.
"""

import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.bench.reporting import make_parser

_PROBE = ("tba_jax.bench.accelerator_probe",)
_DECODE = ("tba_jax.bench.decode", "--repeats=1", "--json")
_STEP = ("tba_jax.bench.train_step", "--repeats=1", "--json")
_TRAIN = ("tba_jax.main", "--config=math:arithmetic", "--config.num_steps=200")
_DRY = ("--config.num_steps=2", "--config.task.num_eval_prompts=8")
_SMALL_STEP = ("--num_prompts=2", "--group_size=2", "--prompt_tokens=8", "--response_tokens=8")
_DRY_PATIENCE = 10


class Part(NamedTuple):
    """One part of the measurement.

    Attributes:
        name: stem of the part's files.
        question: question that the part answers.
        limit_s: time limit of the part's process.
        module: module and arguments, as after `python -m`; {out} stands for the part's folder.
        dry: arguments of a dry run; later arguments override earlier ones.
    """

    name: str
    question: str
    limit_s: float
    module: tuple[str, ...]
    dry: tuple[str, ...] = ("--dry_run",)


PARTS = (
    Part(
        "device",
        "Which device, which versions, and which measured rates?",
        60,
        (*_PROBE, "device"),
    ),
    Part("parity", "Do programs give the same results as on CPU?", 120, (*_PROBE, "parity")),
    Part(
        "memory",
        "Does the device use as much memory as planned?",
        120,
        (*_PROBE, "memory"),
    ),
    Part(
        "decode",
        "How close is decoding to the memory rate (1.5B, 128 responses, bfloat16)?",
        150,
        (
            *_DECODE,
            "--shape=1.5b",
            "--dtype=bfloat16",
            "--num_prompts=128",
            "--prompt_tokens=256",
        ),
        ("--shape=tiny", "--num_prompts=2", "--prompt_tokens=8", "--max_new_tokens=8"),
    ),
    Part(
        "train_step",
        "How close is the train step to the matmul rate (1.5B, bfloat16)?",
        150,
        (*_STEP, "--model_shape=1.5b", "--dtype=bfloat16"),
        ("--model_shape=tiny", "--steps=1", *_SMALL_STEP),
    ),
    Part(
        "async",
        "How long does the main job take with the asynchronous driver?",
        120,
        (*_TRAIN, "--config.driver=async", "--workdir={out}"),
        _DRY,
    ),
    Part(
        "sync",
        "How long does the main job take with the synchronous driver?",
        120,
        (*_TRAIN, "--config.driver=sync", "--workdir={out}"),
        _DRY,
    ),
)


def run_part(part: Part, out: Path, limit_s: float, *, is_dry: bool) -> dict[str, Any]:
    """Run one part in its own process and return its result.

    Args:
        part: the part.
        out: folder for the part's files.
        limit_s: seconds after which the process and its children are ended.
        is_dry: run at tiny sizes on CPU.
    """
    folder = out / part.name
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [x.replace("{out}", str(folder / "run")) for x in part.module]
    command = ["-m", *arguments, *(part.dry if is_dry else ())]
    environment = os.environ | ({"JAX_PLATFORMS": "cpu"} if is_dry else {})
    start = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        # The part gets its own session, so that its children end with it.
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
            status = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"ended after its {limit_s:.0f} s"
    return {
        "question": part.question,
        "command": shlex.join(["python", *command]),
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "figures": _figures(out / f"{part.name}.log", folder / "run" / "report.json"),
    }


def _figures(log: Path, report: Path) -> dict[str, Any]:
    """Return the result of a part: the last JSON object in its log, or the report of a run."""
    if report.exists():
        return json.loads(report.read_text())
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:  # the last object is incomplete
                continue
    return {}


def measure(
    parts: Sequence[Part], out: Path, budget_s: float, *, is_dry: bool
) -> dict[str, dict[str, Any]]:
    """Run the parts one after the other, and write each result when the part ends.

    Args:
        parts: parts, most important first.
        out: folder of the results.
        budget_s: time limit of all parts together; after it, no part is started.
        is_dry: run at tiny sizes on CPU.
    """
    results: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + budget_s
    for part in parts:
        left = end - time.monotonic()
        if left <= 0:
            results[part.name] = {
                "question": part.question,
                "status": f"not started within {budget_s:.0f} s (--budget_s)",
                "figures": {},
            }
        else:
            # A dry run must also pass on slow machines.
            limit_s = part.limit_s * (_DRY_PATIENCE if is_dry else 1)
            results[part.name] = run_part(part, out, min(left, limit_s), is_dry=is_dry)
        print(f"{part.name}: {results[part.name]['status']}", flush=True)
        write(out, parts, results, is_dry=is_dry)
    return results


def write(
    out: Path, parts: Sequence[Part], results: Mapping[str, dict[str, Any]], *, is_dry: bool
) -> None:
    """Write results.json and page.md with the results so far."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {"date": now, "dry_run": is_dry, "parts": dict(results)}
    (out / "results.json").write_text(json.dumps(found, indent=1))
    (out / "page.md").write_text("\n".join(page(parts, results, now, is_dry=is_dry)) + "\n")


def page(
    parts: Sequence[Part], results: Mapping[str, dict[str, Any]], date: str, *, is_dry: bool
) -> Iterable[str]:
    """Return the results as text."""
    yield "# One accelerator"
    yield ""
    if is_dry:
        yield "**A dry run on CPU at tiny sizes. Nothing here was measured on an accelerator.**"
        yield ""
    yield f"`python -m tba_jax.bench.accelerator`, {date}"
    for part in parts:
        if part.name not in results:
            continue
        found = results[part.name]
        yield f"\n## {part.name}: {found['status']}\n"
        yield part.question
        if "command" in found:
            yield f"\n    {found['command']}\n\n{found['seconds']} s; it printed {part.name}.log"
        rows = list(_rows(found["figures"]))
        if rows:
            yield "\n| | |\n|---|---|"
            yield from (f"| {name} | {value} |" for name, value in rows)


def _rows(figures: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    """Yield names and values of nested figures; long lists are only in results.json."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{before}{name}.")
        elif isinstance(value, float):
            yield before + name, f"{value:,.4g}"
        elif not isinstance(value, list) or len(value) <= 8:
            yield before + name, str(value).replace("|", "\\|")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every part succeeded."""
    parser = make_parser("accelerator", __doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--out", required=True, type=Path, help="folder for results")
    parser.add_argument(
        "--budget_s", type=float, default=600.0, help="time limit of all parts together"
    )
    parser.add_argument("--parts", default=",".join(names), help="parts to run, with commas")
    parser.add_argument("--dry_run", action="store_true", help="run at tiny sizes on CPU")
    args = parser.parse_args(argv)
    wanted = args.parts.split(",")
    if strays := [n for n in wanted if n not in names]:
        print(
            f"accelerator: --parts: no {strays[0]!r}; there are {', '.join(names)}", file=sys.stderr
        )
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if part.name in wanted]
    results = measure(parts, args.out.absolute(), args.budget_s, is_dry=args.dry_run)
    print(args.out / "page.md")
    return 0 if all(found["status"] == "done" for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
