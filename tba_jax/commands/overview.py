# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax`: the list of commands, or one of them."""

import difflib
from collections.abc import Sequence

from tba_jax.commands.entry_point import run, run_command
from tba_jax.run.errors import UserError

COMMANDS = {
    "main": "train: --config=PRESET, or continue the run in --workdir",
    "report": "write report.html of a run",
    "compare": "write one page that compares several runs",
    "evaluate": "evaluate a model or a run on held-out prompts",
    "generate": "print responses of a model to a prompt",
    "serve": "serve a model or a run to OpenAI clients",
    "export": "write a folder that transformers loads",
    "sft": "fine-tune a model on given responses, before RL",
    "plan": "predict memory and time of a run on TPUs or GPUs that this machine does not have",
    "sweep": "train every combination of some settings and seeds, and compare the runs",
    "launch_processes": "start several processes of a run on this machine",
}


def main(argv: Sequence[str]) -> int:
    """Run the command that the first argument names; without one, print the commands."""
    name, *others = argv or ["--help"]
    if name in COMMANDS:
        run(name, others)
    return run_command(lambda: _print_commands(name))


def _print_commands(name: str) -> int:
    if name not in ("--help", "-h"):
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        text = f"there is no command {name!r}; there are {', '.join(COMMANDS)}.{meant}"
        raise UserError(f"{text} `python -m tba_jax` says what each does, and `main` trains")
    print("usage: python -m tba_jax COMMAND --help\n")
    for command, meaning in COMMANDS.items():
        print(f"  {command:17} {meaning}")
    print("\nFor example: python -m tba_jax main --config=math")
    return 0
