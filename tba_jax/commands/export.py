# SPDX-License-Identifier: Apache-2.0
"""Command: export of a run's policy as a Hugging Face folder that `transformers` loads.

python -m tba_jax.export --workdir=DIR --out=DIR [--published=newest] [--push=OWNER/NAME [--public]]
python -m tba_jax.export --workdir=DIR --push=OWNER/NAME --push_every=STEPS

README.md in the folder describes the source model, the training and the evaluation. --push uploads
the folder to the Hugging Face hub, to a private repository unless --public is given. --push_every
follows a run until it has finished, and uploads each new policy as one commit.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tba_jax.commands.hub import check_push, push
from tba_jax.commands.model_card import model_card
from tba_jax.config.command_line import local_folder
from tba_jax.storage.bucket import is_address

_LOOK_S, _RETRY_S = 5.0, 60.0


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def _write(workdir: str, published: str, out: Path, title: str) -> int:
    """Write the folder; return the step of the policy."""
    from tba_jax.commands.saved import load_policy
    from tba_jax.models.hf import hf_weights
    from tba_jax.report.files import load_run

    step, model_config, params, hf_config, source = load_policy(workdir, published, _note)
    hf_weights.save(out, model_config, params, hf_config, tokenizer_files_from=source)
    card = model_card(load_run(workdir), step, title)
    (out / "README.md").write_text(card, encoding="utf-8")
    return step


def _follow(workdir: Path, repo: str, every: int, *, is_public: bool) -> None:
    """Push the newest checkpoint periodically until the run has finished, then the last one.

    A push that fails is reported and tried again.
    """
    from tba_jax.commands.saved import load_run_config
    from tba_jax.run.checkpoint import Checkpoints
    from tba_jax.run.errors import CheckpointError
    from tba_jax.run.workdir import is_finished

    num_steps = load_run_config(str(workdir)).num_steps
    pushed = 0
    while True:
        has_ended = is_finished(workdir, num_steps)
        newest = Checkpoints(str(workdir / "checkpoints"), read_only=True).latest_step() or 0
        try:
            if newest >= pushed + every or (has_ended and newest > pushed):
                with tempfile.TemporaryDirectory() as folder:
                    step = _write(str(workdir), "", Path(folder), repo)
                    address = push(Path(folder), repo, is_public=is_public, step=step)
                pushed = step
                print(f"pushed step {step} to {address}", flush=True)
            if has_ended and newest <= pushed:
                return
        except (ValueError, OSError, CheckpointError) as error:
            _note(f"{error}. The next attempt is in {_RETRY_S:.0f} s")
            time.sleep(_RETRY_S)
        time.sleep(_LOOK_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workdir", required=True, help="work directory of a run")
    parser.add_argument(
        "--published",
        default="",
        help="a published version, or newest, instead of the newest checkpoint",
    )
    parser.add_argument("--out", default="", help="folder to write; must not exist or be empty")
    parser.add_argument("--push", default="", help="model repository on the hub, OWNER/NAME")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    parser.add_argument(
        "--push_every",
        type=int,
        default=0,
        help="follow a run: steps between two pushes of its newest checkpoint. 0: push once",
    )
    args = parser.parse_args(argv)
    from tba_jax.run.errors import CheckpointError, UserError
    from tba_jax.run.lock import run_folder
    from tba_jax.weights.versions import PublicationError

    try:
        if args.push_every < 0 or (args.push_every and not args.push):
            raise ValueError(
                f"--push_every={args.push_every}: wanted steps >= 1, and --push=OWNER/NAME"
            )
        if bool(args.out) == bool(args.push_every):
            raise ValueError("give either --out=DIR or --push_every=STEPS")
        if args.push_every and (args.published or is_address(args.workdir)):
            raise ValueError(
                "--push_every pushes checkpoints of a run in a local folder. Give "
                "--workdir=FOLDER, without --published"
            )
        if args.push:
            check_push(args.push)
        if args.push_every:
            folder = run_folder(args.workdir, "--workdir", _note)
            _follow(folder, args.push, args.push_every, is_public=args.public)
            return 0
        out = local_folder(args.out, "--out")
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"--out={out}: the folder is not empty. Give a new one")
        if args.public and not args.push:
            raise ValueError("--public is for a repository of the hub. Add --push=OWNER/NAME")
        workdir = str(run_folder(args.workdir, "--workdir", _note))
        step = _write(workdir, args.published, out, args.push or str(out))
        print(f"wrote the policy at step {step} of {args.workdir} to {out}")
        if args.push:
            print(f"pushed the policy to {push(out, args.push, is_public=args.public)}")
    except (ValueError, OSError, CheckpointError, PublicationError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
