# SPDX-License-Identifier: Apache-2.0
"""Make the embedded attacker of task redteam: the start model, fine-tuned to write sums.

    python -m tba_jax.assets.make_attacker_model --out=DIR [--seed=0] [--num_steps=300]

A small version of the supervised stage before red-teaming: maximum likelihood on problems of the
arithmetic task, each after the beginning-of-sequence token.

Invariant: the same seed on the same machine writes the same folder.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tba_jax.commands import sft
from tba_jax.run.model_parts import START_MODEL
from tba_jax.tasks import arithmetic

NUM_ROWS = 20_000
# Other problems than the ones the arithmetic task trains on, though these could be met as well.
FIRST_PROBLEM = 64 * arithmetic.TRAIN_SIZE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of rows")
    parser.add_argument("--num_steps", type=int, default=300, help="optimiser steps")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "sums.jsonl"
        problems = (arithmetic.problem(FIRST_PROBLEM + i, "train") for i in range(NUM_ROWS))
        data.write_text("".join(json.dumps({"response": text}) + "\n" for text, _ in problems))
        return sft.main(
            [
                f"--model={START_MODEL}",
                f"--data={data}",
                f"--out={args.out}",
                f"--config.num_steps={args.num_steps}",
                f"--config.seed={args.seed}",
                "--config.batch.num_prompts=256",
                "--config.optimizer.learning_rate=cosine(2e-3, 0, warmup=20)",
            ]
        )


if __name__ == "__main__":
    raise SystemExit(main())
