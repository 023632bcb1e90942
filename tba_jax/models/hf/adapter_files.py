# SPDX-License-Identifier: Apache-2.0
"""Adapters as folders in the format of the library peft, which inference servers load.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Invariant: the files have the
adapters bit for bit.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models import lora
from tba_jax.models.architecture import Adapters, lora_names
from tba_jax.models.config import MATRICES
from tba_jax.models.hf import families
from tba_jax.models.hf.folders import ADAPTER_SETTINGS, read_json
from tba_jax.models.hf.hf_weights import open_file, write_file
from tba_jax.models.hf.tensors import HFTensor
from tba_jax.models.transformer import Params, TransformerConfig

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings of peft with which the files would mean something else.
_COVERED = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(
    ("fan_in_fan_out", "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern")
)


def check(config: TransformerConfig) -> Adapters:
    """Return the adapters of an architecture, if these files can hold them.

    Raises:
        ValueError: an adapted matrix is only a part of a tensor of the family's checkpoints.
    """
    assert config.adapters is not None
    found = {tensor.leaves[0] for _, tensor in _matrices(config)}
    if missing := [name for name in config.adapters.modules if name not in found]:
        raise ValueError(
            f"lora.modules has {', '.join(missing)}, which the checkpoints of {config.family} "
            "hold in one tensor with other matrices, so an inference server cannot load their "
            f"adapters. Give modules of {', '.join(sorted(found)) or 'another model'}"
        )
    return config.adapters


def write(folder: Path, config: TransformerConfig, adapters: Params, base: str) -> None:
    """Write adapters to a new folder.

    Args:
        folder: folder to create.
        config: the architecture, with adapters.
        adapters: the tree of `lora.init_adapters`, on any devices of this process.
        base: name or folder of the model that the adapters adapt.

    Raises:
        ValueError: as `check`.
    """
    own = check(config)
    layers = {name: np.asarray(x) for name, x in adapters["layers"].items()}
    arrays: dict[str, np.ndarray] = {}
    targets: dict[str, None] = {}
    for name, tensor in _matrices(config):
        if tensor.leaves[0] not in own.modules:
            continue
        a, b = (layers[leaf][tensor.at] for leaf in lora_names(tensor.leaves[0]))
        targets[name.rpartition(".")[2]] = None
        arrays[f"{_PREFIX}{name}.lora_A.weight"] = a.reshape(-1, own.rank).T
        arrays[f"{_PREFIX}{name}.lora_B.weight"] = b.reshape(own.rank, -1).T
    folder.mkdir(parents=True)
    write_file(folder / WEIGHTS, arrays)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": own.rank,
        "lora_alpha": own.alpha,
        "target_modules": list(targets),
        "inference_mode": True,
    }
    (folder / ADAPTER_SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def read(folder: Path, config: TransformerConfig) -> tuple[TransformerConfig, Params]:
    """Return the architecture with the adapters of a folder, and the adapters in float32.

    Layers that the folder leaves out get adapters of zeros.

    Args:
        config: architecture of the base.

    Raises:
        ValueError: a setting that is not implemented, or a tensor that does not fit the base.
    """
    settings = read_json(folder / ADAPTER_SETTINGS)
    for name, covered in _COVERED.items():
        if (settings.get(name, covered) or None) != covered:
            raise ValueError(
                f"{folder / ADAPTER_SETTINGS} has {name} = {settings[name]!r}; wanted "
                f"{covered or 'none'}. Merge these adapters with peft and give the merged model"
            )
    rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    # rslora divides by the root of the rank.
    alpha *= math.sqrt(rank) if settings.get("use_rslora") else 1
    places = {
        f"{_PREFIX}{name}.lora_{part}.weight": (tensor, part)
        for name, tensor in _matrices(config)
        for part in "AB"
    }
    stored = open_file(folder / WEIGHTS)
    if unknown := sorted(stored.keys() - places.keys()):
        raise ValueError(
            f"{folder / WEIGHTS} has {', '.join(unknown[:5])}, which is no adapter of a matrix of "
            f"the base ({config.family}). Give the adapters of this model"
        )
    found = {places[name][0].leaves[0] for name in stored}
    modules = [name for name in MATRICES if name in found]
    config = lora.with_adapters(config, rank, alpha, modules)
    shapes = lora.abstract_adapters(config)["layers"]
    layers = {leaf: np.zeros(x.shape, x.dtype) for leaf, x in shapes.items()}
    for name, x in stored.items():
        tensor, part = places[name]
        row = layers[lora_names(tensor.leaves[0])["AB".index(part)]][tensor.at]
        row[...] = x.array.T.reshape(row.shape)
    return config, {"layers": jax.tree.map(jnp.asarray, layers)}


def _matrices(config: TransformerConfig) -> Iterator[tuple[str, HFTensor]]:
    """Yield the modules that are one matrix of a layer, outputs first, as torch stores them."""
    for name, tensor in families.tensors(config).items():
        is_alone = len(tensor.leaves) == len(tensor.at) == 1
        if is_alone and tensor.is_transposed and tensor.leaves[0] in MATRICES:
            yield name.removesuffix(".weight"), tensor
