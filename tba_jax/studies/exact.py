# SPDX-License-Identifier: Apache-2.0
"""Command: objectives on problems whose every response is known, exactly.

    python -m tba_jax.studies.exact STUDY [--only="tb;grpo"] [--seeds=10] [--out=DIR]

STUDY is one of `sweeps.STUDIES`: optimum (who ends at pi_ref exp(r / beta)?), staleness (data
exactly 0, 8 or 32 steps old), staleness_resets (its control), group (K), recency (m), sync (k),
beta, centring, reset, samples (S), priority, searchers, capacity (what is drawn and kept),
diversity (at the same success), stops (of responses that end). All rates, seeds and cases of an
objective that have the same shapes are one program. Every objective and case is a line of
OUT/STUDY.jsonl as soon as it is known and is not computed again; a table and a figure are made of
all. docs/results/claims.md has the protocols. It knows objectives and problems, no run.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.commands.entry_point import run_command
from tba_jax.config.command_line import local_folder
from tba_jax.config.schema import ConfigError
from tba_jax.report.jsonl import JsonlWriter, read_jsonl
from tba_jax.studies import exact_report, exact_runs_report
from tba_jax.studies.enumerated import Look
from tba_jax.studies.enumerated_runs import Batches, train
from tba_jax.studies.named import settings_of
from tba_jax.studies.sweeps import STUDIES, Study


def rows(
    study: Study, name: str, labels: Sequence[str], num_seeds: int
) -> Iterator[exact_report.Row]:
    """Run some cases of an objective; yields each program's rows when it is done."""
    settings = settings_of(name, study.beta)
    objective, beta = settings.built, settings.beta.start
    by_shape: dict[Any, list[str]] = {}
    for label in labels:
        by_shape.setdefault(study.settings(name, label), []).append(label)
    for shape, same in by_shape.items():
        start = time.monotonic()
        conditions = [study.condition(label) for label in same]
        if beta != study.beta:  # its own
            conditions = [c._replace(beta=beta, beta_final=beta) for c in conditions]
        looks, batches = train(
            objective, study.problem(), shape, conditions, seeds=range(num_seeds), rates=study.rates
        )
        wall_s = (time.monotonic() - start) / len(same)
        for i, label in enumerate(same):
            shown = Look(*(x[i] for x in looks))
            yield exact_report.Row(name, label, shown, wall_s, Batches(*(x[i] for x in batches)))


def to_line(row: exact_report.Row) -> dict[str, Any]:
    """Return a row as a line of the log, to five digits."""
    figures = row.looks._asdict() | row.batches._asdict()
    rounded = {k: np.round(v.astype(float), 5) for k, v in figures.items()}
    return {"objective": row.objective, "case": row.case, "wall_s": row.wall_s, **rounded}


def from_line(line: Mapping[str, Any]) -> exact_report.Row:
    """Return the row of a line; null and unmeasured values are nan."""
    shape = np.shape(line["success"])

    def of(field: str) -> np.ndarray:
        return np.array(line[field], float) if field in line else np.full(shape, np.nan)

    looks, batches = Look(*map(of, Look._fields)), Batches(*map(of, Batches._fields))
    return exact_report.Row(line["objective"], line["case"], looks, line["wall_s"], batches)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.studies.exact")
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=10, help="how many, 2 or more")
    parser.add_argument("--only", default="", help="objectives, with ; between; default: all")
    parser.add_argument("--out", default="", help="folder; default runs/exact")
    args = parser.parse_args(argv)
    study = STUDIES[args.study]
    names = [name.strip() for name in args.only.split(";") if name.strip()] or list(study.names)
    try:
        out = local_folder(args.out or "runs/exact", "--out")
        for name in names:
            if name not in study.names:
                raise ConfigError(f"--only={name}: want some of {'; '.join(study.names)}")
        if args.seeds < 2:
            raise ConfigError(f"--seeds={args.seeds}: want 2, one to choose the rate by")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    key = {"seeds": args.seeds, "rates": list(study.rates), "num_steps": study.num_steps}
    with contextlib.closing(JsonlWriter(out / f"{args.study}.jsonl")) as log:
        for name in names:
            known = {line["case"] for line in _lines(log, key, [name])}
            for row in rows(study, name, [x for x in study.cases if x not in known], args.seeds):
                log.append(key | to_line(row))
                success = np.nanmax(row.looks.success[..., -1].mean(-1))
                print(f"{name}, {row.case}: success {success:.3f}, {row.wall_s:.0f} s", flush=True)
    found = [from_line(line) for line in _lines(log, key, study.names)]
    report = exact_report if study.shows == "ends" else exact_runs_report
    text = report.table(args.study, study, found)
    (out / f"{args.study}.md").write_text(text + "\n")
    (out / f"{args.study}.png").write_bytes(report.figure(args.study, study, found))
    print(text)
    return 0


def _lines(log: JsonlWriter, key: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Those of the log that are of this study and of these objectives, in their order."""
    lines = [line for line in read_jsonl(log.path) if key.items() <= line.items()]
    return [line for name in names for line in lines if line["objective"] == name]


if __name__ == "__main__":
    sys.exit(run_command(main))
