# SPDX-License-Identifier: Apache-2.0
"""Looking at a run from outside: its config and its policy, for the commands that read a run.

It does not start, continue or change one.
"""

import json
from pathlib import Path
from typing import Any

import jax

from tba_jax.checkpointing import Checkpoints
from tba_jax.config import Config, default_config
from tba_jax.models import families, hf_weights
from tba_jax.parts import abstract_state, model_path, reading_mesh


def load_run_config(workdir: str) -> Config:
    """The config a run was made with.

    Raises:
        ValueError: the folder holds no run.
    """
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{workdir} holds no run: there is no {path}; give a run's --workdir")
    config = default_config()
    for field, value in json.loads(path.read_text())["config"].items():
        value = float("inf") if value == "inf" else value
        *sections, name = field.split(".")
        section = config
        for part in sections:
            section = section[part]
        section[name] = value
    return config


def load_policy(workdir: str) -> tuple[int, Any, Any, dict[str, Any], str]:
    """Policy of the newest checkpoint of a run, divided over the devices of `parts.reading_mesh`.

    Returns:
        step, model config, params, the source model's config.json, the source model's folder.

    Raises:
        ValueError: no run there. CheckpointError: no readable checkpoint.
    """
    config = load_run_config(workdir)
    folder = hf_weights.resolve(model_path(config))
    hf_config = hf_weights.load_config(folder)
    model_config = families.transformer_config(hf_config)
    mesh = reading_mesh(model_config, jax.local_devices())
    checkpoints = Checkpoints(str(Path(workdir) / "checkpoints"), read_only=True)
    step, state, _ = checkpoints.restore(abstract_state(config, model_config, mesh))
    return step, model_config, state.params, hf_config, str(folder)
