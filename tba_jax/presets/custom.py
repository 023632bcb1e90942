# SPDX-License-Identifier: Apache-2.0
"""Your own model, prompts and reward.

    python -m tba_jax.main --config=custom --config.model.path=MODEL \\
        --config.task.data_path=train.jsonl --config.task.reward=my_rewards.py:score

MODEL is a folder or a name on the Hugging Face hub; docs/custom_task.md describes data and rewards.
The run derives lengths from the data and the model's context, and the learning rate from the number
of trained parameters. Without a test split it holds out a part of the rows.
"""

PRESETS = {
    "default": {
        "num_steps": 200,
        "sync_period": 2,
        "num_searchers": 0,
        "model.compute_dtype": "auto",
        "task.name": "custom",
        "task.max_prompt_tokens": 0,
        "task.num_eval_prompts": 256,
        "objective.group_size": 8,
        "objective.beta": "linear(0.2, 0.05)",
        "optimizer.learning_rate": 0.0,
        "search.samples_per_prompt": 8,
        "search.max_new_tokens": 256,
        "search.num_slots": 64,
        "search.initial_fill": 128,
        "replay.pace": "trainer",
        "replay.max_staleness": 4,
    },
}
