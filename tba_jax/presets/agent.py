# SPDX-License-Identifier: Apache-2.0
"""Policies that act in an environment, in episodes of several turns.

    python -m tba_jax.main --config=agent[:PRESET]

toy (default)
    The task is sums with a calculator, for the embedded start model. Runs without network access
    on 2 CPU cores. The start model calls the calculator in a quarter of its episodes and guesses in
    the others. Episodes with a call have a higher mean reward.
qwen3_1_7b
    Qwen3-1.7B on GSM8K with the calculator of the package, at most six turns, on one accelerator.
    Needs pip install 'tba_jax[chat-tools]'. Not run by us.
qwen3_4b
    Qwen3-4B with adapters of rank 32 on MATH with the sandboxed Python of the package. Needs pip
    install 'tba_jax[chat-tools,math]', Linux and libseccomp. Not run by us.

The observations of both tools are a function of the tokens before them, so the balance of whole
episodes is exact (docs/guide/environments.md).
"""

from tba_jax.presets.math import PRESETS as MATH

_ARITHMETIC = MATH["arithmetic"]

PRESETS = {
    "toy": {
        **_ARITHMETIC,
        "num_steps": 40,
        "task": {
            **_ARITHMETIC["task"],
            "environment": "tba_jax.tasks.calculator:Calculator",
            "num_eval_prompts": 128,
        },
        "search": {
            **_ARITHMETIC["search"],
            "max_new_tokens": 24,
            "stop_strings": (":",),
            "max_turns": 4,
        },
        "checkpoint": {"period": 50},
        "eval": {"period": 20},
    },
}


for _name, _task, _tool in (("qwen3_1_7b", "gsm8k", "calculator"), ("qwen3_4b", "math", "python")):
    _of_model = MATH[_name]
    PRESETS[_name] = {
        **_of_model,
        "task": {
            **_of_model["task"],
            "name": _task,
            "environment": f"tba_jax.environments.tools:{_tool}",
            "renderer": "qwen3",
        },
        "batch": {"num_prompts": 32},
        # Limits of an episode, with schemas, question and results. The caches of slots and of
        # waiting conversations share one device with the trainer.
        "search": {
            **_of_model["search"],
            "max_new_tokens": 3072,
            "max_turns": 6,
            "num_slots": 32,
        },
    }
