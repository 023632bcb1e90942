# SPDX-License-Identifier: Apache-2.0
"""Command: time for which publishing weights stops the trainer, in memory and through Orbax.

    python -m tba_jax.bench.weight_sync --json

Runs real train steps with a publication after each step, and the weight poller on its thread, as in
the asynchronous driver; trainer and reader have one CPU device each. `pause_share` is the time of
publications on the trainer thread, divided by the time of the loop; the first publication, which
compiles, is reported separately. Without spare cores the poller also slows the steps: `cost_share`
is the increase of the time of the loop over the same steps without publications. Two models: the
embedded one with the batches of the preset `arithmetic`, and one with more than 1 GB of weights.
Each of the four cases runs in a fresh process.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.bench import processes, reporting

MODELS = ("embedded", "large")
TRANSPORTS = ("memory", "checkpoint")
_AIMS = {"memory": 0.01, "checkpoint": 0.05}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.bench.weight_sync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", default=",".join(MODELS), help="models to measure")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="transports to measure")
    parser.add_argument("--steps", type=int, default=50, help="steps of the embedded model")
    parser.add_argument("--large_steps", type=int, default=4, help="steps of the large model")
    with tempfile.TemporaryDirectory(prefix="bench_weight_sync_") as folder:
        return reporting.run_command(parser, argv, lambda args: measure(args, Path(folder)), _table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures by name.

    Args:
        args: arguments of the command line.
        folder: empty folder for weights and messages between processes.

    Raises:
        ValueError: an option that cannot be measured; a side failed.
    """
    chosen = {}
    for option, known in (("models", MODELS), ("transports", TRANSPORTS)):
        chosen[option] = getattr(args, option).split(",")
        for name in chosen[option]:
            if name not in known:
                raise ValueError(f"got --{option} with {name!r}; wanted some of {', '.join(known)}")
    for option in ("steps", "large_steps"):
        if getattr(args, option) < 1:
            raise ValueError(f"got --{option}={getattr(args, option)}; wanted at least 1")
    cases: dict[str, dict[str, Any]] = {}
    for model in chosen["models"]:
        for transport in chosen["transports"]:
            side, steps = f"{model}_{transport}", args.steps
            if model == "large":
                steps = args.large_steps
            (folder / side).mkdir()
            job = {"model": model, "transport": transport, "steps": steps}
            command = (sys.executable, "-m", "tba_jax.bench.weight_sync_side")
            job |= {"workdir": str(folder / side)}
            cases[side] = processes.run_side(side, job, folder, command=command)
            print(f"{side}: {_in_words(cases[side])}", file=sys.stderr)
    worst = {
        transport: max(x["pause_share"] for name, x in cases.items() if name.endswith(transport))
        for transport in chosen["transports"]
    }
    return {
        "pause_share": worst,
        "within_aims": all(share <= _AIMS[name] for name, share in worst.items()),
        "cases": cases,
        "hardware": processes.hardware(next(iter(cases.values()))),
    }


def _in_words(x: Mapping[str, Any]) -> str:
    return f"pause {100 * x['pause_share']:.2f} %, first {x['first_pause_s']:.3f} s"


def _table(result: Mapping[str, Any]) -> list[str]:
    """Return the results as text."""
    hw = result["hardware"]
    rows = [
        f"{hw['processor']}, {hw['num_cores']} cores",
        "",
        f"{'':>20} {'weights':>9} {'step':>9} {'pause':>10} {'share':>8} {'first':>9} "
        f"{'delivered':>10} {'cost':>7} {'publications':>13}",
    ]
    for name, x in result["cases"].items():
        rows.append(
            f"{name:>20} {x['num_bytes'] / 1e6:>6.0f} MB {x['step_s']:>7.3f} s "
            f"{1e3 * x['pause_s']:>7.2f} ms {100 * x['pause_share']:>6.2f} % "
            f"{x['first_pause_s']:>7.3f} s {x['delivery_s']:>8.3f} s "
            f"{100 * x['cost_share']:>5.1f} % {x['num_delivered']:>6} of {x['num_published']:>3}"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
