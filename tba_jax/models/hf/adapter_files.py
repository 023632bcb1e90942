# SPDX-License-Identifier: Apache-2.0
"""Adapters as folders in the format of the library peft, which inference servers load.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Invariant: the files have the
adapters bit for bit.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tba_jax.models.architecture import lora_names
from tba_jax.models.config import MATRICES
from tba_jax.models.hf import families
from tba_jax.models.hf.hf_weights import write_file
from tba_jax.models.hf.tensors import HFTensor
from tba_jax.models.transformer import Params, TransformerConfig

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."


def check(config: TransformerConfig) -> None:
    """Refuse an architecture with adapters that these files cannot hold.

    Raises:
        ValueError: an adapted matrix is only a part of a tensor of the family's checkpoints.
    """
    assert config.adapters is not None
    found = {tensor.leaves[0] for _, tensor in matrices(config)}
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
    for name, tensor in matrices(config):
        if tensor.leaves[0] not in own.modules:
            continue
        a, b = (layers[leaf][tensor.layer] for leaf in lora_names(tensor.leaves[0]))
        module = name.removesuffix(".weight")
        targets[module.rpartition(".")[2]] = None
        arrays[f"{PREFIX}{module}.lora_A.weight"] = a.reshape(-1, own.rank).T
        arrays[f"{PREFIX}{module}.lora_B.weight"] = b.reshape(own.rank, -1).T
    folder.mkdir(parents=True)
    write_file(folder / WEIGHTS, arrays)
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
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def matrices(config: TransformerConfig) -> Iterator[tuple[str, HFTensor]]:
    """Yield the tensors that are one matrix of a layer with outputs first, as torch stores them."""
    for name, tensor in families.tensors(config).items():
        is_alone = len(tensor.leaves) == 1 and not (tensor.num_experts or tensor.is_mxfp4)
        if is_alone and tensor.is_transposed and tensor.leaves[0] in MATRICES:
            yield name, tensor
