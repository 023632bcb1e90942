# SPDX-License-Identifier: Apache-2.0
"""Tasks by their settings."""

from tba_jax.tasks.config import TaskSettings


def get_task(name, data_path="", num_held_out=0, **settings):
    values = {"name": name, "data_path": data_path, "num_eval_prompts": num_held_out}
    return TaskSettings(**values, **settings).open()
