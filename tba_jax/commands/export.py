# SPDX-License-Identifier: Apache-2.0
"""Command: export of a run's policy as a Hugging Face folder that `transformers` loads.

python -m tba_jax.export --workdir=DIR --out=DIR

README.md in the folder describes the source model, the training and the evaluation. `hf upload`
uploads the folder to the Hugging Face hub.
"""

from collections.abc import Sequence

from tba_jax.commands.entry_point import make_parser
from tba_jax.commands.model_card import model_card
from tba_jax.config.command_line import local_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = make_parser("export", __doc__)
    parser.add_argument("--workdir", required=True, help="work directory of a run")
    parser.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    args = parser.parse_args(argv)
    from tba_jax.commands.saved import load_policy
    from tba_jax.models.hf import hf_weights
    from tba_jax.report.files import load_run
    from tba_jax.run.object_store import run_folder

    out = local_folder(args.out, "--out")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out={out}: the folder is not empty. Give a new one")
    workdir = run_folder(args.workdir, "--workdir")
    step, model_config, params, hf_config, source = load_policy(workdir)
    hf_weights.save(out, model_config, params, hf_config, tokenizer_files_from=source)
    card = model_card(load_run(workdir), step, str(out))
    (out / "README.md").write_text(card, encoding="utf-8")
    print(f"wrote the policy at step {step} of {args.workdir} to {out}")
    return 0
