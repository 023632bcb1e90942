# SPDX-License-Identifier: Apache-2.0
"""report.json: the closing figures of a run, added up over its hosts.

It reads the parts of a finished or interrupted run and changes nothing. What the figures look like
on a page is the business of `report`.
"""

import os
import platform
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tba_jax.config.command_line import versions
from tba_jax.config.schema import defaults, difference, flatten
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.economy import Economy
from tba_jax.report.jsonl import LogError, jsonable
from tba_jax.run.run import Run
from tba_jax.storage import sealed


def write_report_json(run: Run) -> dict[str, Any]:
    """WORKDIR/report.json: the figures that scripts may rely on; returns its contents."""
    trainer, clock = run.trainer, run.clock
    wall_s = clock()

    decoded = sum(searcher.decoded_tokens for searcher in run.search.searchers)
    counts = [outbox.counts for outbox in run.search.outboxes]
    device = jax.local_devices()[0]
    report = {
        "name": run.config.name,
        "seed": run.config.seed,
        "driver": run.config.driver,
        "eval": {
            "before": _figures(run.evaluated.before),
            "after": _figures(run.evaluated.after),
        },
        "steps": trainer.step_index,
        "num_steps": run.config.num_steps,
        "wall_s": wall_s,
        "time_to_first_step_s": run.clock.time_to_first_step_s,
        "tokens_per_s": {
            "decoded": decoded / wall_s,
            "trained": trainer.counters.trained_tokens / wall_s,
        },
        "idle_s": {
            "trainer": trainer.counters.wait_s,
            "searchers": [searcher.idle_s for searcher in run.search.searchers],
        },
        "staleness": staleness_summary(trainer.counters.staleness_counts),
        "ledger": {
            **run.buffer.ledger(),
            "generated": sum(count.generated for count in counts),
            "outbox": sum(count.pending for count in counts),
            "lost": sum(count.lost for count in counts),
        },
        "economy": economy_summary(
            run.buffer.economy, run.buffer.num_untouched_groups, run.config.replay
        ),
        "sync": {
            "count": trainer.counters.num_syncs,
            "mean_s": trainer.counters.sync_total_s / max(1, trainer.counters.num_syncs),
            "max_s": trainer.counters.sync_max_s,
        },
        "skipped_prompts": {
            "train": run.search.num_skipped,
            "eval": run.evaluator.num_skipped,
        },
        "compiled_decode_programs": run.search.num_compiled,
        "kinds": list(run.shared.task.response_kinds),
        "samples": _samples(run),
        "processes": jax.process_count(),
        "hardware": f"{jax.device_count()} x {device.device_kind}, "
        f"{os.cpu_count()} CPU cores, {platform.platform()}",
        "versions": versions(),
        "config_changes": difference(defaults(run.config.objective.name), flatten(run.config)),
    }
    report |= {key: section() for key, section in run.sections.items()}
    report = jsonable(report)
    path = run.shared.workdir / "report.json"
    try:
        sealed.write(path, report)
    except OSError as error:
        raise LogError(
            f"writing {path} failed: {error}. Make room or fix the storage, then run the same "
            "command again"
        ) from error
    return report


def _figures(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An evaluation without its texts."""
    if record is None:
        return None
    return {k: v for k, v in record.items() if k not in ("texts", "rewards")}


def _samples(run: Run) -> list[dict[str, Any]]:
    """The first few held-out prompts with a response from before and one from after."""
    before, after = run.evaluated.before, run.evaluated.after
    if before is None or after is None:
        return []
    prompts = run.evaluator.prompts
    if len(prompts) == 1:  # several of its responses are shown
        prompts = prompts * len(before["texts"])
    shown = zip(
        prompts, before["texts"], before["rewards"], after["texts"], after["rewards"], strict=False
    )
    return [
        {
            "prompt": prompt.text,
            "answer": prompt.columns.get("answer", ""),
            "before": old,
            "after": new,
            "before_reward": old_reward,
            "after_reward": new_reward,
        }
        for prompt, old, old_reward, new, new_reward in shown
    ]


def economy_summary(economy: Economy, waiting: int, settings: ReplaySettings) -> dict[str, Any]:
    """What became of the searchers' work, with what to change about it.

    Args:
        economy: of the buffer.
        waiting: groups of which nothing was drawn.
        settings: of the buffer.
    """
    figures = economy.stats(waiting, settings.max_staleness)
    return {
        **{name.removeprefix("buffer/"): value for name, value in figures.items()},
        "warnings": economy.warnings(waiting, settings),
    }


def staleness_summary(counts: Mapping[int, int]) -> dict[str, float]:
    """Mean, median, 95th percentile and maximum over all uses of trajectories; {} for none."""
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
