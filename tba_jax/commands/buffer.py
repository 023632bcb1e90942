# SPDX-License-Identifier: Apache-2.0
"""Command: contents of a run's replay buffer: counts, ages, rewards, texts, successful attacks.

    python -m tba_jax.buffer WORKDIR

Reads the newest checkpoint and changes nothing, so it can be used during a run. With --json the
last line of standard output is one object with the same numbers.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tba_jax.evaluation.attacks import Finds
    from tba_jax.run.host_state import HostState

_NUM_BARS = 10
_BAR_WIDTH = 40

Decode = Callable[[np.ndarray], str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.buffer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("workdir", help="work directory of a run")
    parser.add_argument("--num_texts", type=int, default=3, help="responses of each kind to print")
    parser.add_argument("--json", action="store_true", help="last line of output: a JSON object")
    args = parser.parse_args(argv)
    if args.num_texts < 0:
        parser.error(f"--num_texts={args.num_texts}: wanted 0 or more")
    # Imported here, so that --help and wrong flags answer at once.
    from tba_jax.config.schema import ConfigError
    from tba_jax.run.errors import CheckpointError, UserError
    from tba_jax.run.lock import run_folder
    from tba_jax.tasks.registry import entry_of

    try:
        workdir = run_folder(args.workdir, "WORKDIR", lambda line: print(line, file=sys.stderr))
        step, state = load(workdir)
    except (CheckpointError, ConfigError, UserError) as error:
        print(f"buffer: {error}", file=sys.stderr)
        return 1
    arrays, meta = state.parts["buffer"]
    pending = sum(
        group[0] + sum(group[1].values())
        for outbox in state.named("outbox_").values()
        for group in outbox.meta["groups"]
    )
    result = summarise(arrays, meta, step=step, pending=pending)
    config, note = _config(workdir)
    decode, note = _decoder(config, note)
    result["texts"] = texts(arrays, meta, decode, args.num_texts)
    if "task.name" in config and "attacks" in entry_of(config["task.name"]).metrics:
        result["attacks"] = found_attacks(arrays, meta)._asdict()
    _show(result, note)
    if args.json:
        print(json.dumps(result))
    return 0


def load(workdir: Path) -> tuple[int, "HostState"]:
    """Return the step and the host state of a run's newest checkpoint.

    Raises:
        CheckpointError: no readable checkpoint.
    """
    from tba_jax.run.checkpoint import load_host_state

    return load_host_state(str(workdir))


def found_attacks(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> "Finds":
    """Return counts of the successful attacks in a buffer snapshot."""
    from tba_jax.evaluation.attacks import finds
    from tba_jax.flow.records import ROW_FIELDS, SettingsTable, unflatten, unpack

    columns = [arrays[f"row_{name}"].tolist() for name, _ in ROW_FIELDS]
    return finds(
        unpack(
            list(zip(*columns, strict=True)),
            unflatten(arrays, "tokens"),
            unflatten(arrays, "extras"),
            SettingsTable(meta["settings"]),
        )
    )


def summarise(
    arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], *, step: int, pending: int
) -> dict[str, Any]:
    """Return statistics of a buffer snapshot.

    Args:
        pending: responses that wait in outboxes.
    """
    counts = arrays["row_count"]
    # Equal responses count separately.
    rewards, lengths, versions = (
        np.repeat(column, counts)
        for column in (
            arrays["row_reward"],
            arrays["tokens_sizes"] // 4,
            arrays["row_version_min"],
        )
    )
    counters = meta["counters"]
    received = counters["generated"] - sum(meta["rejected"].values())
    equal = counters["duplicate"] + counters["united"]
    unused = np.maximum(counts - arrays["row_uses"], 0).sum()
    return {
        "step": step,
        "num_prompts": len(arrays["store_sizes"]),
        "num_trajectories": len(rewards),
        "num_rows": len(counts),
        "num_tokens": int(lengths.sum()),
        "unique_fraction": 1 - equal / received if received else 1.0,
        "unused_fraction": float(unused / len(rewards)) if len(rewards) else 0.0,
        "ledger": {
            **counters,
            "outbox": pending,
            "stored": len(rewards),
            "rejected": meta["rejected"],
        },
        "quantiles": {
            "age": _quantiles(step - versions),
            "reward": _quantiles(rewards),
            "response tokens": _quantiles(lengths),
            "uses": _quantiles(np.repeat(arrays["row_uses"] / counts, counts)),
            "rows per prompt": _quantiles(arrays["store_sizes"]),
        },
        "reward_histogram": _histogram(rewards),
    }


def texts(
    arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], decode: Decode, count: int
) -> list[dict[str, Any]]:
    """Return the best, the worst and the newest responses with their prompts, without repeats.

    If a response is in several merges, its `count` and `uses` are those of the last merge.
    """
    from tba_jax.flow.records import unflatten

    rewards, ids = arrays["row_reward"], arrays["row_id"]
    prompt_of = np.repeat(np.arange(len(arrays["store_sizes"])), arrays["store_sizes"])
    tokens = unflatten(arrays, "tokens")
    # A response may be in several merges: take the newest.
    newest = {(int(prompt_of[i]), tokens[i]): i for i in np.argsort(ids).tolist()}
    rows = np.array(sorted(newest.values()), np.int64)
    shown: dict[int, str] = {}
    for kind, order in (
        ("highest reward", np.lexsort((-ids[rows], -rewards[rows]))),
        ("lowest reward", np.lexsort((-ids[rows], rewards[rows]))),
        ("newest", np.argsort(-ids[rows])),
    ):
        for index in rows[order[:count]].tolist():
            shown.setdefault(index, kind)
    out = []
    for index, kind in shown.items():
        out.append(
            {
                "kind": kind,
                "prompt": meta["prompts"]["texts"][prompt_of[index]],
                "response": decode(np.frombuffer(tokens[index], np.int32)),
                "reward": float(rewards[index]),
                "version": int(arrays["row_version_min"][index]),
                "count": int(arrays["row_count"][index]),
                "uses": int(arrays["row_uses"][index]),
            }
        )
    return out


def _quantiles(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
    return {
        "min": float(values.min()),
        "p05": low,
        "p50": middle,
        "p95": high,
        "max": float(values.max()),
        "mean": float(values.mean()),
    }


def _histogram(rewards: np.ndarray) -> list[list[float]]:
    """Return [from, to, count] of each bar; with few distinct values, one bar per value."""
    values, counts = np.unique(rewards, return_counts=True)
    if len(values) <= _NUM_BARS:
        return [[v, v, c] for v, c in zip(values.tolist(), counts.tolist(), strict=True)]
    bars, edges = np.histogram(rewards, _NUM_BARS)
    return [
        [low, high, count]
        for low, high, count in zip(
            edges[:-1].tolist(), edges[1:].tolist(), bars.tolist(), strict=True
        )
    ]


def _config(workdir: Path) -> tuple[Mapping[str, Any], str]:
    """Return (flat config of the run, ""), or ({}, reason why it cannot be read)."""
    from tba_jax.run.errors import UserError
    from tba_jax.run.workdir import saved_config

    try:
        return saved_config(workdir), ""
    except UserError as error:
        return {}, f"token ids, not text: {error}"


def _decoder(config: Mapping[str, Any], note: str) -> tuple[Decode, str]:
    """Return (function from token IDs to text, note).

    The function decodes with the tokenizer of the run, and the note is "". Without a tokenizer, the
    function lists the IDs, and the note has the reason.
    """
    from tba_jax.models.tokenizer import Tokenizer

    if not note:
        try:
            tokenizer = Tokenizer.load(config["model.path"] or "embedded:start_model")
            return lambda ids: tokenizer.decode(ids, skip_special=False), ""
        except (OSError, ValueError, KeyError) as error:
            note = f"token ids, not text: {error}"
    return lambda ids: " ".join(map(str, ids.tolist())), note


def _show(result: Mapping[str, Any], note: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(
        f"Replay buffer at step {result['step']}: {result['num_trajectories']:,} responses to "
        f"{result['num_prompts']:,} prompts, {result['num_tokens']:,} tokens; "
        f"{result['unique_fraction']:.1%} of the merged responses were new, "
        f"{result['unused_fraction']:.1%} of the stored responses were not drawn yet",
        highlight=False,
    )
    if found := result.get("attacks"):
        first = found["first_version"]
        console.print(
            f"{found['successes']:,} of {found['attacks']:,} different attacks succeed"
            + (f"; the first was sampled by version {first}" if first is not None else ""),
            highlight=False,
        )
    ledger = Table(title="Ledger (responses)", title_justify="left")
    ledger.add_column("where")
    ledger.add_column("count", justify="right")
    for name, value in result["ledger"].items():
        rows = value.items() if isinstance(value, Mapping) else [("", value)]
        for reason, count in rows:
            ledger.add_row(f"{name} {reason}".strip(), f"{count:,}")
    spread = Table(title="Spread", title_justify="left")
    spread.add_column("of")
    columns = ("min", "p05", "p50", "p95", "max", "mean")
    for column in columns:
        spread.add_column(column, justify="right")
    for name, row in result["quantiles"].items():
        if row:
            spread.add_row(name, *(f"{row[column]:,.4g}" for column in columns))
    histogram = Table(title="Rewards", title_justify="left")
    histogram.add_column("reward", justify="right")
    histogram.add_column("responses", justify="right")
    histogram.add_column("")
    most = max((count for *_, count in result["reward_histogram"]), default=1)
    for low, high, count in result["reward_histogram"]:
        label = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        histogram.add_row(label, f"{count:,}", "█" * round(_BAR_WIDTH * count / most))
    for table in (ledger, spread, histogram):
        console.print(table)
    if note:
        console.print(Text(f"({note})"))
    # Text, not markup, because a response may have square brackets.
    for item in result["texts"]:
        head = f"{item['kind']}: reward {item['reward']:.4g}, version {item['version']}"
        console.print(Text(f"{head}, drawn {item['uses']} times", style="bold"))
        console.print(Text(item["prompt"]), Text(item["response"], style="cyan"), sep="")


if __name__ == "__main__":
    sys.exit(main())
