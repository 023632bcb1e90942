# SPDX-License-Identifier: Apache-2.0
"""Shapes of the models of a planned run from their config.json, without weights.

The shapes of the models that the shipped presets name come with the package, so that a preset can
be planned without network. Other models need a local folder, or a hub ID that can be fetched.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tba_jax.config.schema import Config
from tba_jax.models import encoder
from tba_jax.models.hf import families, folders
from tba_jax.models.transformer import abstract_params
from tba_jax.planning.estimates import shard_bytes
from tba_jax.rewards.functions import reward_models
from tba_jax.tasks.registry import task_class

_EMBEDDER = "sentence embedder"  # on the trainer's first device


def config_of(path_or_hub_id: str) -> dict[str, Any]:
    """Return the contents of config.json of a model folder, a preset's model, or a hub ID.

    Raises:
        ValueError: the model cannot be found.
    """
    if path_or_hub_id in (known := _preset_models()):
        return known[path_or_hub_id]
    return folders.load_config(folders.resolve(path_or_hub_id, with_weights=False))


@functools.cache
def _preset_models() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("preset_models.json").read_text())


def judge_paths(config: Config) -> dict[str, str]:
    """Return role -> model folder or hub ID of every model that computes rewards or metrics."""
    task = task_class(config.task.name)
    named = {
        **reward_models(config, task.reward),
        "gold reward model": config.eval.gold_model,
        _EMBEDDER: config.eval.embedding_path if task.metric == "success_rate" else "",
    }
    return {role: path for role, path in named.items() if path}


def judge_bytes(
    config: Config, models: Mapping[str, Mapping[str, Any]], group_size: int
) -> dict[str, dict[str, float]]:
    """Return group -> role -> bytes of the parameters on the device that has the most.

    A searcher divides reward models over its devices. Its first device has the victim and the
    classifier, and the trainer's first device has the sentence embedder. Programs and caches of
    these models are not counted.

    Args:
        models: role -> contents of config.json.
        group_size: number of devices of a searcher.
    """
    held: dict[str, dict[str, float]] = {"trainer": {}, "searcher": {}}
    for role, model in models.items():
        dtype = jnp.dtype("float32" if role == _EMBEDDER else "bfloat16")
        if model["model_type"] in ("bert", "roberta"):
            tree = encoder.abstract_params(encoder.encoder_config(model), dtype)
        else:
            tree = abstract_params(families.transformer_config(model), dtype)
        parts = group_size if role.endswith("reward model") else 1
        group = "trainer" if role == _EMBEDDER else "searcher"
        held[group][role] = shard_bytes(tree) / parts
    return held
