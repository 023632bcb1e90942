# SPDX-License-Identifier: Apache-2.0
"""Command: the policy of a run as a Hugging Face folder that `transformers` loads.

python -m tba_jax.export --workdir=DIR --out=DIR
"""

import argparse
import sys
from collections.abc import Sequence

from tba_jax.config.command_line import local_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.export", description=__doc__)
    parser.add_argument("--workdir", required=True, help="directory of a run")
    parser.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    args = parser.parse_args(argv)
    from tba_jax.models.hf import hf_weights
    from tba_jax.run.checkpoint import CheckpointError
    from tba_jax.run.saved import load_policy

    try:
        out = local_folder(args.out, "--out")
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty; give a new --out folder")
        step, model_config, params, hf_config, source = load_policy(args.workdir)
        hf_weights.save(out, model_config, params, hf_config, tokenizer_files_from=source)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote the policy at step {step} of {args.workdir} to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
