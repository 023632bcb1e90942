# SPDX-License-Identifier: Apache-2.0
"""Policies that act in an environment, in episodes of several turns.

    python -m tba_jax.main --config=agent[:PRESET]

toy (default)
    Sums with a calculator, for the embedded start model, offline on 2 CPU cores. The start model
    calls the calculator in a quarter of its episodes and guesses in the others.
qwen3_1_7b
    GSM8K with the tool `python`, which runs code in a sandbox. Needs pip install
    'tba_jax[chat-tools]', Linux and libseccomp.
qwen3_4b
    Adapters on MATH with the same tool. Needs pip install 'tba_jax[chat-tools,math]', too.

The observations of calculator and tool are a function of the tokens before them, so the balance of
whole episodes is exact (docs/guide/environments.md).
"""

from tba_jax.presets.math import PRESETS as MATH

PRESETS = {
    "toy": {
        **MATH["arithmetic"],
        "task.environment": "tba_jax.tasks.arithmetic:Calculator",
        "task.num_eval_prompts": 128,
        "search.max_new_tokens": 24,
        "search.stop_strings": (":",),
        "search.max_turns": 4,
        "checkpoint.period": 50,
        "eval.period": 20,
    },
}


for _name, _task in (("qwen3_1_7b", "gsm8k"), ("qwen3_4b", "math")):
    PRESETS[_name] = {
        **MATH[_name],
        "task.name": _task,
        "task.environment": "tba_jax.environments.tools:python",
        "task.renderer": "qwen3",
        "batch.micro_batch_rows": 0,
        # Limits of an episode, with schemas, question and results. The caches of slots and of
        # waiting conversations share one device with the trainer.
        "search.max_new_tokens": 3072,
        "search.max_turns": 6,
        "search.num_slots": 32,
    }
