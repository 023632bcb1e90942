# SPDX-License-Identifier: Apache-2.0
"""Adapters as folders in the format of the library peft, which inference servers load.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Invariant: adapters that are
written and read again are unchanged, bit for bit.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from tba_jax.models.architecture import Adapters, lora_names, num_input_axes
from tba_jax.models.config import MATRICES
from tba_jax.models.hf import families, safetensors_file
from tba_jax.models.hf.folders import read_json
from tba_jax.models.hf.tensors import HFTensor
from tba_jax.models.transformer import Params, TransformerConfig, abstract_params

_SETTINGS = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def check(config: TransformerConfig) -> None:
    """Refuse an architecture with adapters that these files cannot hold.

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
    check(config)
    own = config.adapters
    assert own is not None
    layers = {name: np.asarray(x) for name, x in adapters["layers"].items()}
    arrays: dict[str, np.ndarray] = {}
    targets: dict[str, None] = {}
    for name, tensor in _matrices(config):
        if tensor.leaves[0] not in own.modules:
            continue
        a, b = (layers[leaf][tensor.layer] for leaf in lora_names(tensor.leaves[0]))
        module = name.removesuffix(".weight")
        targets[module.rpartition(".")[2]] = None
        arrays[f"{_PREFIX}{module}.lora_A.weight"] = a.reshape(-1, own.rank).T
        arrays[f"{_PREFIX}{module}.lora_B.weight"] = b.reshape(own.rank, -1).T
    folder.mkdir(parents=True)
    header = {name: (x.dtype, x.shape) for name, x in arrays.items()}
    safetensors_file.write(folder / _WEIGHTS, header, arrays.values())
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": own.rank,
        "lora_alpha": own.alpha,
        "target_modules": list(targets),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    (folder / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def read(folder: Path, config: TransformerConfig) -> tuple[TransformerConfig, Params]:
    """Return the architecture with the adapters of a folder, and their tree of host arrays.

    Args:
        folder: written by `write`, or by peft for the same matrices of every layer.
        config: the architecture of the base model, without adapters.

    Raises:
        ValueError: no adapters, or adapters that do not fit the model.
    """
    if not (folder / _SETTINGS).is_file() or not (folder / _WEIGHTS).is_file():
        raise ValueError(f"{folder}: no {_SETTINGS} with {_WEIGHTS} there. Give a folder of both")
    settings = read_json(folder / _SETTINGS)
    if settings.get("peft_type") != "LORA" or settings.get("use_rslora"):
        kind, scales = settings.get("peft_type"), settings.get("use_rslora", False)
        raise ValueError(
            f"{folder / _SETTINGS}: peft_type={kind!r} with use_rslora={scales} is not supported. "
            "Give adapters with peft_type='LORA' and use_rslora=False"
        )
    entries = safetensors_file.entries(folder / _WEIGHTS)
    mapped = safetensors_file.map_file(folder / _WEIGHTS)
    rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    shapes = {name: x.shape for name, x in abstract_params(config)["layers"].items()}
    rows: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in _matrices(config):
        leaf, module = tensor.leaves[0], name.removesuffix(".weight")
        ins = 1 + num_input_axes(leaf)
        wanted = (*shapes[leaf][1:ins], rank), (rank, *shapes[leaf][ins:])
        for part, own, shape in zip("AB", lora_names(leaf), wanted, strict=True):
            entry = entries.pop(f"{_PREFIX}{module}.lora_{part}.weight", None)
            if entry is None:
                continue
            array = safetensors_file.view(mapped, entry)
            if array.size != math.prod(shape):
                raise ValueError(
                    f"{folder}: the adapter of {name} has {array.size} entries, wanted "
                    f"{math.prod(shape)}. Give an adapter of this model"
                )
            rows.setdefault(own, {})[tensor.layer] = array.T.reshape(shape)
    modules = tuple(name for name in shapes if lora_names(name)[0] in rows)
    is_whole = all(
        len(rows.get(own, ())) == shapes[name][0] for name in modules for own in lora_names(name)
    )
    if entries or not modules or not is_whole:
        raise ValueError(
            f"{folder}: the adapters do not fit this model ({config.family}). Give adapters of "
            "matrices that checkpoints of the model hold, and of every layer"
        )
    layers = {
        own: jnp.asarray(np.stack([x for _, x in sorted(of_layers.items())]))
        for own, of_layers in rows.items()
    }
    adapted = dataclasses.replace(config, adapters=Adapters(rank, alpha, modules))
    return adapted, {"layers": layers}


def _matrices(config: TransformerConfig) -> Iterator[tuple[str, HFTensor]]:
    """Yield the tensors that are one matrix of a layer with outputs first, as torch stores them."""
    for name, tensor in families.tensors(config).items():
        is_alone = len(tensor.leaves) == 1 and not (tensor.num_experts or tensor.is_mxfp4)
        is_torch = tensor.order != tuple(range(len(tensor.order)))
        if is_alone and is_torch and tensor.leaves[0] in MATRICES:
            yield name, tensor
