# SPDX-License-Identifier: Apache-2.0
"""What a finished run leaves in its work directory."""

import json
from pathlib import Path

import numpy as np

from tba_jax.storage.whole_files import write_json

_WORKED = "3+9=12, 12-4=8, 8+7=15, 15-6=9. So the answer is 9."
# Prompt, answer, before, after, and both rewards; texts hold HTML on purpose.
SAMPLES = [
    ("3+9-4+7-6=", "9", "8", _WORKED, 0.0, 1.0),
    ("8-5+6-2+9=", "16", "16", "8-5=3, 9+7=16. So the answer is 16.", 1.0, 1.0),
    ("5+5+5-9+4=", "10", '<script>alert("x")</script> & <b>11', "It is 11.", 0.0, 0.0),
    ("7+2-8+6+1=", "8", "", "7+2=9, 7+1=8. So the answer is 8.\x1b[0m", None, 1.0),
]
NAMES = ("prompt", "answer", "before", "after", "before_reward", "after_reward")


def _evaluation(step, done, metric):
    return {
        "metric": metric,
        metric: round((212 + 226 * done) / 512, 6),
        "n": 512,
        "num_trials": 512,
        "kind_share": round(0.38 + 0.58 * done, 4),
        "response_length_mean": round(11.2 + 19 * done, 3),
        "version": step,
    }


def _step(step, done, rng):
    return {
        "train/loss": 0.1 * (1 - done),
        "train/tb_loss": 0.4 + 1.4 * (1 - done) + rng.normal(0, 0.1),
        "train/kl_reference": 6 * done + rng.normal(0, 0.2),
        "train/log_z": -2 + 3 * done + rng.normal(0, 0.1),
        "train/grad_norm": None if step == 7 else float(rng.gamma(8, 0.1)),
        "train/ess_fraction": 0.9 - 0.3 * done + rng.normal(0, 0.03),
        "stale_0/ess_fraction": 0.95 - 0.1 * done,
        "stale_4/ess_fraction": 0.8 - 0.5 * done,
        "stale_4/log_ratio_p50": -0.6 * done,
        "train/reward_mean": 0.36 + 0.4 * done + rng.normal(0, 0.03),
        "train/tokens_per_s": 11850.0,
        "train/response_tokens": 2000.0,
        "search/reward_mean": 0.34 + 0.4 * done + rng.normal(0, 0.04),
        "search/kind_share": min(1.0, 0.38 + 0.55 * done + rng.normal(0, 0.02)),
        "search/response_length_mean": 11 + 19 * done + rng.normal(0, 0.4),
        "search/tokens_per_s": 8120.0,
        "buffer/staleness_mean": 1.7 + rng.normal(0, 0.2),
        "buffer/staleness_max": 4 + step % 9,
        "buffer/staleness_histogram": [[0, 40], [1, 96], [2, 70], [int(4 + step % 9), 19]],
    }


def fake_workdir(
    path, *, num_steps=120, made_steps=None, report=True, metric="pass_at_1", changes=()
):
    """A work directory as a run of two searchers leaves it.

    Args:
        path: directory to fill.
        num_steps, made_steps: steps the run was asked for, and made; None: all.
        report: whether report.json was written.
        metric: the headline metric.
        changes: further config fields.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    made_steps = num_steps if made_steps is None else made_steps
    rng, clock, metrics, evaluations = np.random.default_rng(0), 9.0, [], []
    for step in range(made_steps + 1):
        done = 1 / (1 + np.exp(-6 * (step / num_steps - 0.45)))
        if step:
            clock += rng.uniform(0.85, 1.1)
            metrics.append({"step": step, "time_s": round(clock, 3), **_step(step, done, rng)})
        if step % 20 == 0:
            evaluations.append(_evaluation(step, done, metric))
            found = {f"eval/{name}": value for name, value in evaluations[-1].items()}
            metrics.append({"step": step, "time_s": round(clock, 3), **found})
    config = {"name": "math/arithmetic", "seed": 0, "driver": "async", "num_steps": num_steps}
    config |= {"task.name": "arithmetic", "objective.beta": 0.05, "replay.recency_prob": 0.5}
    versions = {"python": "3.12.1", "jax": "0.12.0"}
    resolved = {"config": config | dict(changes), "versions": versions, "run_id": "a"}
    write_json(path / "config.json", resolved)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    if not report:
        return
    generated = 300 * made_steps
    ledger = {"generated": generated, "waiting": 128, "stored": generated - 128 - 3000 - 17}
    ledger |= {"evicted_capacity": 3000, "evicted_bytes": 0, "used": 256 * made_steps}
    ledger |= {"rejected": {"reward_timeout": 14, "reward_error": 3}}
    warning = "only 62% of the merged groups have been trained on: use <less>"
    economy = {"trained_share": 0.62, "length_rank": 0.41, "effective_m": 0.5}
    facts = {
        "name": "math/arithmetic",
        "seed": 0,
        "economy": economy | {"warnings": [warning]},
        "driver": "async",
        "eval": {"before": evaluations[0], "after": {**evaluations[-1], "step": made_steps}},
        "steps": made_steps,
        "wall_s": clock + 3.0,
        "ledger": ledger | {"trained_unique": min(generated, 180 * made_steps)},
        "kinds": ["worked"],
        "samples": [dict(zip(NAMES, sample, strict=True)) for sample in SAMPLES],
        "hardware": "2 CPU cores",
        "versions": versions,
        "config_changes": ["num_steps: 100 -> 120", "objective.beta: 0.1 -> 0.05"],
    }
    write_json(path / "report.json", facts)
