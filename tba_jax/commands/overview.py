# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax`: the list of commands."""

COMMANDS = {
    "main": "train: --config=PRESET, or continue the run in --workdir",
    "report": "report.html of a run",
    "compare": "one page for several runs",
    "evaluate": "held-out figures of a run",
    "generate": "responses of a run's policy to prompts",
    "export": "a folder that transformers loads, or --push to the hub",
    "buffer": "what the replay buffer of a run holds",
    "sft": "supervised fine-tuning",
    "plan": "memory and time of a run on TPUs or GPUs that are not here",
    "study": "several runs, and a table of their outcomes",
    "launch_processes": "several processes of a run on this machine",
}


def main() -> int:
    """Print the commands; the exit code."""
    print("usage: python -m tba_jax.COMMAND --help\n")
    for name, meaning in COMMANDS.items():
        print(f"  {name:17} {meaning}")
    print("\nTo begin: python -m tba_jax.main --config=math")
    return 0
