# SPDX-License-Identifier: Apache-2.0
"""Command: export of a run's policy as a Hugging Face folder that `transformers` loads.

python -m tba_jax.export --workdir=DIR --out=DIR

README.md in the folder describes the run. Adapters are merged into the weights, and in the folder
`adapter` in the format of the library peft. `hf upload` uploads the folder to the Hugging Face hub.
"""

from collections.abc import Sequence

from tba_jax.commands.entry_point import make_parser
from tba_jax.commands.model_card import hub_id, model_card
from tba_jax.config.command_line import local_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = make_parser("export", __doc__)
    parser.add_argument("--workdir", required=True, help="work directory of a run")
    parser.add_argument("--out", required=True, help="folder to write; must not exist or be empty")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="default: that of the source model")
    args = parser.parse_args(argv)
    from tba_jax.commands.saved import load_policy
    from tba_jax.models.hf import adapter_files, hf_weights
    from tba_jax.report.files import load_run
    from tba_jax.run.workdir import run_folder

    out = local_folder(args.out, "--out")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out={out}: the folder is not empty. Give a new one")
    workdir = run_folder(args.workdir, "--workdir")
    step, config, params, hf_config, source, adapters = load_policy(workdir)
    declared = hf_config.get("dtype") or hf_config.get("torch_dtype")
    hf_weights.save(out, config, params, hf_config, source, args.dtype or declared)
    run = load_run(workdir)
    if adapters is not None:
        base = hub_id(str(run.config["model.path"])) or source
        try:
            adapter_files.write(out / "adapter", adapters[0], adapters[1], base)
        except ValueError as error:
            print(f"note: the adapters are only in the merged weights: {error}")
    (out / "README.md").write_text(model_card(run, step, str(out)), encoding="utf-8")
    print(f"wrote the policy at step {step} of {args.workdir} to {out}")
    return 0
