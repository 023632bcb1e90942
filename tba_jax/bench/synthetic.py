# SPDX-License-Identifier: Apache-2.0
"""Artificial responses and checkpoints for benchmarks."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax.flow.trajectory import Trajectory
from tba_jax.models import transformer
from tba_jax.models.hf import config_json, hf_weights


def response(prompt_id: int, tokens: np.ndarray, reward: float, **fields: Any) -> Trajectory:
    """Return a response of version 0 with log-probs of -1; `fields` replace other values."""
    given: dict[str, Any] = {
        "prompt_id": prompt_id,
        "response_tokens": tokens,
        "reward": reward,
        "reward_parts": {},
        "behavior_token_logprobs": np.full(len(tokens), -1, np.float32),
        "version_min": 0,
        "version_max": 0,
        "searcher": 0,
        "ticket": 0,
        "sampling_temperature": 1.0,
        "finish_reason": "length",
    }
    return Trajectory(**given | fields)


def write_checkpoint(
    folder: str | Path, config: transformer.TransformerConfig, dtype: str = "float32"
) -> None:
    """Write a model folder of random weights, without a tokenizer."""
    params = transformer.init_params(config, jax.random.key(0), np.dtype(dtype))
    hf_weights.save(folder, config, params, config_json.hf_config(config, dtype=dtype))
