# SPDX-License-Identifier: Apache-2.0
"""Command: objectives on problems whose every response is known, exactly.

    python -m tba_jax.studies.exact optimum   [--only="tb;rloo"] [--seeds=10] [--out=DIR]
    python -m tba_jax.studies.exact staleness [--only="tb;grpo"] [--seeds=10] [--out=DIR]

optimum: one prompt, data drawn uniformly, by the reference, or by the policy of 16 steps ago; who
ends at pi_ref exp(r / beta)? staleness: 32 prompts, one network, data exactly 0, 8 or 32 steps old;
whose success falls, and whose run collapses? All seeds and rates of an objective and a lag are one
program. docs/results/claims.md has the protocol. It knows objectives and problems, and no run.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.config.methods import METHODS, fields_of
from tba_jax.config.schema import make_config
from tba_jax.studies.enumerated import Behavior, Look, Problem, Settings, few_modes, sums, train
from tba_jax.train.objectives.registry import make_objective, objective_names

# Settings beside those of a preset or a name; those of policy gradients without a KL are at 0.
OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "tb": {},
    "tb, learned log Z": {"log_z": "learned"},
    "tba_prime": {},
    "oapl": {},
    "kimi_pmd": {},
    # Of rewards over their deviation and log-ratios over their tokens.
    "flowrl": {"beta": 1 / 15},
    "topr": {},
    "asymre": {},
    "rloo": {},
    "rloo, beta 0": {"beta": 0.0},
    "proximal_rloo": {},
    "grpo": {"beta": 0.0},
    "dr_grpo": {},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "ppo": {},
    "online_dpo": {},
}
RATES = {"optimum": (0.03, 0.1), "staleness": (1e-3, 3e-3, 1e-2, 3e-2)}
LAGS = (0, 8, 32)
SAMPLERS: Mapping[str, tuple[Behavior, int]] = {
    "uniform": ("uniform", 0),
    "reference": ("reference", 0),
    "16 steps old": ("policy", 16),
    "policy": ("policy", 0),
}
BETA = {"optimum": 0.1, "staleness": 0.05}
# A run has collapsed that ends below so much of its own best.
COLLAPSED = 0.5
CONFIDENCE = 0.9


class Row(NamedTuple):
    """An objective on one kind of data: arrays [rates, seeds, looks]."""

    objective: str
    data: str
    looks: Look
    wall_s: float


def objective_of(name: str, beta: float) -> tuple[Any, float]:
    """(the objective, its beta) of a name in `OBJECTIVES`."""
    changes = dict(OBJECTIVES[name])
    base = name.split(",")[0]
    is_preset = base in METHODS and base not in objective_names()
    fields: dict[str, Any] = {"objective.name": base}
    if is_preset:
        fields = {k: v for k, v in fields_of(base).items() if k.startswith("objective.")}
    beta = changes.pop("beta", beta)
    fields |= {"objective.beta": beta, "objective.beta_schedule": "constant"}
    fields |= {f"objective.{k}": v for k, v in changes.items()}
    return make_objective(make_config(fields).objective), beta


def rows(study: str, names: Sequence[str], seeds: Sequence[int]) -> Iterator[Row]:
    """Every objective on every kind of data of a study."""
    problem: Problem = few_modes() if study == "optimum" else sums()
    stale: Mapping[str, tuple[Behavior, int]] = {str(lag): ("policy", lag) for lag in LAGS}
    samplers = SAMPLERS if study == "optimum" else stale
    for name in names:
        objective, beta = objective_of(name, BETA[study])
        for data, (behavior, lag) in samplers.items():
            steps = 1000 if study == "optimum" else 400
            settings = Settings(beta, lag, behavior, steps, target_beta=BETA[study])
            start = time.monotonic()
            looks = train(objective, problem, settings, seeds=seeds, rates=RATES[study])
            yield Row(name, data, looks, time.monotonic() - start)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean, and the half width of its Student interval; nan of one value."""
    from scipy import stats

    n = len(values)
    if n < 2:
        return float(np.mean(values)), float("nan")
    half = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * np.std(values, ddof=1) / np.sqrt(n)
    return float(np.mean(values)), float(half)


def optimum_table(found: Sequence[Row]) -> str:
    """Distance to the target at the better rate, and what the policy became."""
    lines = [
        "| objective | data | KL(target, policy) at the start | at the end, worst seed | expected "
        "reward | entropy | most likely response | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        kl = row.looks.target_kl
        best = int(np.argmin(kl[:, :, -1].mean(1)))
        at = [x[best, :, -1].mean() for x in row.looks[1:]]
        lines.append(
            f"| {row.objective} | {row.data} | {kl[best, :, 0].mean():.2f} | "
            f"{kl[best, :, -1].max():.2g} | {at[0]:.3f} | {at[1]:.2f} | {at[2]:.3f} | "
            f"{row.wall_s:.0f} |"
        )
    return "\n".join(lines)


def staleness_table(found: Sequence[Row]) -> str:
    """Success by lag, its slope, and how many runs collapsed.

    The rate of each objective is chosen at both ends by the first half of the seeds, and what is
    shown is of the others; with one seed it is that.
    """
    columns = " | ".join(f"success at lag {lag} (rate)" for lag in LAGS)
    lines = [
        f"| objective | {columns} | slope per 10 steps of lag, 90 % interval | "
        "collapsed, any rate | s |",
        "|---|" + "---|" * (len(LAGS) + 3),
    ]
    for name in dict.fromkeys(row.objective for row in found):
        mine = [row for row in found if row.objective == name]
        cells, ends, collapsed = [], [], []
        for row in mine:
            success = np.nan_to_num(row.looks.success)
            half = success.shape[1] // 2
            tuning = success[:, :half] if half else success
            rate = int(np.argmax(tuning[:, :, -1].mean(1)))
            ends.append(success[rate, half:, -1])
            mean, width = interval(ends[-1])
            cells.append(f"{mean:.3f} ± {width:.3f} ({RATES['staleness'][rate]:g})")
            collapsed.append(success[:, :, -1] < COLLAPSED * success.max(-1))
        lags = np.array([int(row.data) for row in mine])
        slopes = np.polyfit(lags / 10, np.stack(ends), 1)[0]
        mean, width = interval(slopes)
        lines.append(
            f"| {name} | {' | '.join(cells)} | {mean:+.3f} ± {width:.3f} | "
            f"{np.mean(collapsed):.0%} | {sum(row.wall_s for row in mine):.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.studies.exact", description=__doc__)
    parser.add_argument("study", choices=sorted(RATES))
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--only", default="", help="objectives, with ; between; default: all")
    parser.add_argument("--out", default="", help="folder; default runs/exact-STUDY")
    args = parser.parse_args(argv)
    names = [name.strip() for name in args.only.split(";") if name.strip()] or list(OBJECTIVES)
    unknown = [name for name in names if name not in OBJECTIVES]
    if unknown or args.seeds < 1:
        what = f"--only={unknown[0]}: want one of {'; '.join(OBJECTIVES)}" if unknown else "--seeds"
        print(f"error: {what}; want at least one seed", file=sys.stderr)
        return 2
    out = Path(args.out or f"runs/exact-{args.study}")
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for row in rows(args.study, names, range(args.seeds)):
        found.append(row)
        end = {k: np.round(v[..., -1].mean(-1), 4).tolist() for k, v in row.looks._asdict().items()}
        print(json.dumps({"objective": row.objective, "data": row.data, **end}), flush=True)
    text = (optimum_table if args.study == "optimum" else staleness_table)(found)
    (out / f"{args.study}.md").write_text(text + "\n")
    np.savez(
        out / f"{args.study}.npz",
        **{
            f"{row.objective}|{row.data}|{k}": v
            for row in found
            for k, v in row.looks._asdict().items()
        },
    )
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
