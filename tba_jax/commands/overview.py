# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax`: the list of commands."""

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


def main() -> int:
    """Print the commands; return the exit code."""
    print("usage: python -m tba_jax.COMMAND --help\n")
    for name, meaning in COMMANDS.items():
        print(f"  {name:17} {meaning}")
    print("\nFor example: python -m tba_jax.main --config=math")
    return 0
