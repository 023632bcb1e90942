# SPDX-License-Identifier: Apache-2.0
"""Command: compare objectives on problems with 256 possible responses, with exact measures.

    python -m tba_jax.studies.exact STUDY [--only="tb;grpo"] [--seeds=10] [--out=DIR]

STUDY is one of `sweeps.STUDIES`: optimum (which objectives reach pi_ref exp(r / beta)), staleness
(data exactly 0, 8 or 32 steps stale), group (K), recency (m), sync (k), beta. All rates, seeds and
cases of an objective with equal shapes run in one program; a study takes minutes. OUT/STUDY.md has
the table, OUT/STUDY.png a figure. Protocols: docs/lab/claims.md.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tba_jax.commands.entry_point import make_parser
from tba_jax.devices.platform import prepare_process
from tba_jax.studies import exact_report
from tba_jax.studies.exact_report import Row
from tba_jax.studies.problems import Measures
from tba_jax.studies.sweeps import STUDIES, Study, settings_of
from tba_jax.studies.training import Settings, train


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parser = make_parser("studies.exact", __doc__)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, at least 4")
    parser.add_argument("--only", default="", help="objectives separated by ;, default: all")
    parser.add_argument("--out", default="runs/exact", type=Path, help="output folder")
    args = parser.parse_args(argv)
    study = STUDIES[args.study]
    names = [name.strip() for name in args.only.split(";") if name.strip()] or list(study.names)
    for name in names:
        if name not in study.names:
            parser.error(f"--only={name}: unknown objective; there are {'; '.join(study.names)}")
    if args.seeds < 4:
        parser.error(
            f"--seeds={args.seeds}: need at least 4, because the first half selects the learning "
            "rate and the second half gives an interval. Set --seeds=10"
        )
    prepare_process()
    args.out.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    for name in names:
        for row in rows(study, name, args.seeds):
            found.append(row)
            success = np.nanmax(row.measures.success[..., -1].mean(-1))
            print(f"{name}, {row.case}: success {success:.3f}, {row.wall_s:.0f} s", flush=True)
    text = exact_report.table(study, found)
    (args.out / f"{args.study}.md").write_text(text + "\n")
    (args.out / f"{args.study}.png").write_bytes(exact_report.figure(study, found))
    print(text)
    return 0


def rows(study: Study, name: str, num_seeds: int) -> Iterator[Row]:
    """Run the cases of an objective; yield the rows of each program when it is done."""
    objective = settings_of(name, study.beta)
    beta = objective.beta.start
    by_shape: dict[Settings, list[str]] = {}
    for label in study.cases:
        by_shape.setdefault(study.settings(name, label), []).append(label)
    for shape, same in by_shape.items():
        start = time.monotonic()
        conditions = [study.condition(label) for label in same]
        if beta != study.beta:  # the objective has its own beta
            conditions = [c._replace(beta=beta, beta_final=beta) for c in conditions]
        seeds, problem = range(num_seeds), study.problem()
        measures = train(
            objective.built, problem, shape, conditions, seeds=seeds, rates=study.rates
        )
        wall_s = (time.monotonic() - start) / len(same)
        for i, label in enumerate(same):
            yield Row(name, label, Measures(*(x[i] for x in measures)), wall_s)


if __name__ == "__main__":
    sys.exit(main())
