# SPDX-License-Identifier: Apache-2.0
"""Reader of the adapter folders that the package writes for inference servers."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from tba_jax.models.architecture import Adapters, lora_names, num_input_axes
from tba_jax.models.hf.adapter_files import PREFIX, SETTINGS, WEIGHTS, matrices
from tba_jax.models.transformer import abstract_params


def read_adapters(folder, config):
    """The architecture with the adapters of a folder, and their tree; of every layer."""
    settings = json.loads((folder / SETTINGS).read_text())
    arrays = load_file(folder / WEIGHTS)
    rank = settings["r"]
    shapes = {name: x.shape for name, x in abstract_params(config)["layers"].items()}
    rows = {}
    for name, tensor in matrices(config):
        leaf, module = tensor.leaves[0], name.removesuffix(".weight")
        ins = 1 + num_input_axes(leaf)
        wanted = (*shapes[leaf][1:ins], rank), (rank, *shapes[leaf][ins:])
        for part, own, shape in zip("AB", lora_names(leaf), wanted, strict=True):
            array = arrays.pop(f"{PREFIX}{module}.lora_{part}.weight", None)
            if array is not None:
                rows.setdefault(own, {})[tensor.layer] = array.T.reshape(shape)
    assert not arrays
    modules = tuple(name for name in shapes if lora_names(name)[0] in rows)
    layers = {
        own: jnp.asarray(np.stack([x for _, x in sorted(found.items())]))
        for own, found in rows.items()
    }
    adapters = Adapters(rank, float(settings["lora_alpha"]), modules)
    return dataclasses.replace(config, adapters=adapters), {"layers": layers}
