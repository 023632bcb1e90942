# SPDX-License-Identifier: Apache-2.0
"""What digests add to saving and restoring a checkpoint.

    python -m tba_jax.bench.checkpoint --json

A tree of float32 arrays is saved and restored as a run does it, through Orbax, on this machine's
disk; digests are made and compared by the functions that a run calls. Random bits, which nothing
can compress, as of real weights. Shares are of the whole save (until it is visible) and of the
whole restore (until the arrays are there); medians of several rounds. What a save takes of the
trainer's own time is the first part only: the rest is in the background.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import reporting


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.bench.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gib", type=float, default=1.0, help="of the train state")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of save and restore")
    parser.add_argument("--folder", default="", help="where to write; default: a temporary folder")
    return reporting.run_command(parser, argv, _measured, _table)


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    if not 0 < args.gib <= 1024:
        raise ValueError(f"got --gib={args.gib}; wanted above 0 and at most 1024")
    if args.repeats < 1:
        raise ValueError(f"got --repeats={args.repeats}; wanted at least 1")
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        return measure(Path(folder), int(args.gib * 2**30), args.repeats)


def measure(folder: Path, num_bytes: int, repeats: int) -> dict[str, Any]:
    """Medians in seconds, by name.

    Args:
        folder: an empty one.
        num_bytes: of the train state.
        repeats: rounds.
    """
    import jax
    import jax.numpy as jnp

    from tba_jax.run.checkpoint import Checkpoints
    from tba_jax.run.host_state import Facts, HostState

    rows = max(1, num_bytes // (16 * 4 * 1024))
    keys = jax.random.split(jax.random.key(0), 16)
    state = {f"w{i}": jax.random.normal(key, (rows, 1024)) for i, key in enumerate(keys)}
    jax.block_until_ready(state)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    checkpoints = Checkpoints(str(folder / "checkpoints"), keep=1)
    times: dict[str, list[float]] = {name: [] for name in ("save", "list", "restore", "compare")}
    for step in range(repeats):
        start = time.perf_counter()
        checkpoints.save(step, state, HostState(Facts(0, 1, 1), {}))
        checkpoints.wait()
        times["save"].append(time.perf_counter() - start)
        times["list"].append(checkpoints.list_s)
        start = time.perf_counter()
        assert checkpoints.damage(step) == []
        times["compare"].append(time.perf_counter() - start)
        start = time.perf_counter()
        _, restored, _ = checkpoints.restore(target, step)
        jax.block_until_ready(restored)
        times["restore"].append(time.perf_counter() - start)
        assert all(bool(jnp.array_equal(restored[name], x)) for name, x in state.items())
        del restored
    checkpoints.close()
    median = {name: statistics.median(found) for name, found in times.items()}
    return {
        "num_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
        **{f"{name}_s": value for name, value in median.items()},
        "save_share": median["list"] / (median["save"] - median["list"]),
        "restore_share": median["compare"] / median["restore"],
    }


def _table(result: Mapping[str, Any]) -> list[str]:
    """The figures for a reader."""
    return [
        f"{result['num_bytes'] / 1e9:.2f} GB",
        f"save    {result['save_s']:7.2f} s, of them listing  {result['list_s']:6.2f} s: "
        f"{100 * result['save_share']:.1f} % on top",
        f"restore {result['restore_s']:7.2f} s, and comparing    {result['compare_s']:6.2f} s: "
        f"{100 * result['restore_share']:.1f} % on top",
    ]


if __name__ == "__main__":
    sys.exit(main())
