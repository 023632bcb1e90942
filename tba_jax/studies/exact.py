# SPDX-License-Identifier: Apache-2.0
"""Command: compare objectives on problems with 256 possible responses, with exact measures.

    python -m tba_jax.studies.exact STUDY [--only="tb;grpo"] [--seeds=10] [--out=DIR]

STUDY is one of `sweeps.STUDIES`: optimum (which objectives reach pi_ref exp(r / beta)), staleness
(data exactly 0, 8 or 32 steps stale), group (K), recency (m), sync (k), beta. All rates, seeds and
cases of an objective with equal shapes run in one program. Each finished objective and case is a
line of OUT/STUDY.jsonl and is not computed again; a table and a figure show all lines. Protocols:
docs/lab/claims.md.
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
from tba_jax.studies import exact_report
from tba_jax.studies.enumerated import Measures
from tba_jax.studies.enumerated_runs import Batches, train
from tba_jax.studies.named import settings_of
from tba_jax.studies.sweeps import STUDIES, Study


def rows(
    study: Study, name: str, labels: Sequence[str], num_seeds: int
) -> Iterator[exact_report.Row]:
    """Run some cases of an objective; yield the rows of each program when it is done."""
    settings = settings_of(name, study.beta)
    objective, beta = settings.built, settings.beta.start
    by_shape: dict[Any, list[str]] = {}
    for label in labels:
        by_shape.setdefault(study.settings(name, label), []).append(label)
    for shape, same in by_shape.items():
        start = time.monotonic()
        conditions = [study.condition(label) for label in same]
        if beta != study.beta:  # The case has its own beta.
            conditions = [c._replace(beta=beta, beta_final=beta) for c in conditions]
        measures, batches = train(
            objective, study.problem(), shape, conditions, seeds=range(num_seeds), rates=study.rates
        )
        wall_s = (time.monotonic() - start) / len(same)
        for i, label in enumerate(same):
            shown = Measures(*(x[i] for x in measures))
            yield exact_report.Row(name, label, shown, wall_s, Batches(*(x[i] for x in batches)))


def to_line(row: exact_report.Row) -> dict[str, Any]:
    """Return a row as a line of the log, rounded to five digits."""
    figures = row.measures._asdict() | row.batches._asdict()
    rounded = {k: np.round(v.astype(float), 5) for k, v in figures.items()}
    return {"objective": row.objective, "case": row.case, "wall_s": row.wall_s, **rounded}


def from_line(line: Mapping[str, Any]) -> exact_report.Row:
    """Return the row of a line of the log; null and missing values become nan."""
    shape = np.shape(line["success"])

    def of(field: str) -> np.ndarray:
        return np.array(line[field], float) if field in line else np.full(shape, np.nan)

    measures, batches = Measures(*map(of, Measures._fields)), Batches(*map(of, Batches._fields))
    return exact_report.Row(line["objective"], line["case"], measures, line["wall_s"], batches)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.studies.exact")
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, at least 2")
    parser.add_argument("--only", default="", help="objectives separated by ;, default: all")
    parser.add_argument("--out", default="", help="output folder (default: runs/exact)")
    args = parser.parse_args(argv)
    study = STUDIES[args.study]
    names = [name.strip() for name in args.only.split(";") if name.strip()] or list(study.names)
    try:
        out = local_folder(args.out or "runs/exact", "--out")
        for name in names:
            if name not in study.names:
                raise ConfigError(
                    f"--only={name}: unknown objective; objectives: {'; '.join(study.names)}"
                )
        if args.seeds < 2:
            raise ConfigError(
                f"--seeds={args.seeds}: need at least 2, because the first half selects the "
                "learning rate. Set --seeds=10"
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    key = {"seeds": args.seeds, "rates": list(study.rates), "num_steps": study.num_steps}
    with contextlib.closing(JsonlWriter(out / f"{args.study}.jsonl")) as log:
        for name in names:
            known = {line["case"] for line in _lines(log, key, [name])}
            for row in rows(study, name, [x for x in study.cases if x not in known], args.seeds):
                log.append(key | to_line(row))
                success = np.nanmax(row.measures.success[..., -1].mean(-1))
                print(f"{name}, {row.case}: success {success:.3f}, {row.wall_s:.0f} s", flush=True)
    found = [from_line(line) for line in _lines(log, key, study.names)]
    text = exact_report.table(args.study, study, found)
    (out / f"{args.study}.md").write_text(text + "\n")
    (out / f"{args.study}.png").write_bytes(exact_report.figure(args.study, study, found))
    print(text)
    return 0


def _lines(log: JsonlWriter, key: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the lines of this study and these objectives, in the order of the log."""
    lines = [line for line in read_jsonl(log.path) if key.items() <= line.items()]
    return [line for name in names for line in lines if line["objective"] == name]


if __name__ == "__main__":
    sys.exit(run_command(main))
