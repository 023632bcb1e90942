# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders of random models, and how their parameters may lie on devices."""

import jax
import numpy as np
from fakes import random_params, tiny_config
from jax.sharding import NamedSharding, PartitionSpec

from tba_jax.models import model as models
from tba_jax.models import transformer
from tba_jax.models.hf import config_json, hf_weights


def make_folder(path, **changes):
    config = tiny_config(**changes)
    params = random_params(config)
    hf_weights.save(path, config, params, config_json.hf_config(config, eos_token_id=2))
    return config, params


def load_folder(path, **settings):
    """(architecture, parameters, contents of config.json) of a folder that may lack a tokenizer."""
    found = models.describe(path)
    return found.config, found.load_params(**settings), found.hf_config


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def shardings_of(config, mesh, rules):
    """A sharding per leaf: `rules` maps logical axes to mesh axes."""
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*(rules.get(name) for name in axes))),
        transformer.param_axes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
