# SPDX-License-Identifier: Apache-2.0
"""Hugging Face model folders in and out: config.json and safetensors, single or sharded.

Tensors are read one at a time into the stacked arrays of `transformer`, so that the peak is one
copy of the parameters. It does not know architectures beyond their tensor names (`families` does)
and reads no pickle. The invariant it owns: save(load(x)) == x, bit for bit.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tba_jax.models.families import transformer_config
from tba_jax.models.transformer import Params, TransformerConfig, abstract_params

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class _Tensor(NamedTuple):
    """Where a Hugging Face tensor lives in our tree, and how it lies there.

    Attributes:
        leaf: name in params (layer >= 0: in params["layers"]).
        layer: layer index, or -1.
        part: index into the axis of a fused matrix (keys/values, gate/up), or None.
        shape: the Hugging Face shape.
        is_matrix: a Linear weight [out, in], transposed here to [in, out...].
    """

    leaf: str
    layer: int
    part: int | None
    shape: tuple[int, ...]
    is_matrix: bool

    def view(self, leaf: np.ndarray) -> np.ndarray:
        """The part of our leaf that this tensor fills, as a view."""
        out = leaf if self.layer < 0 else leaf[self.layer]
        if self.part is None:
            return out
        return out[:, self.part] if self.is_matrix else out[self.part]

    def ours(self, theirs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return (theirs.T if self.is_matrix else theirs).reshape(shape)

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        return ours.reshape(self.shape[::-1]).T if self.is_matrix else ours.reshape(self.shape)


def load(
    path_or_hub_id: str | os.PathLike[str],
    *,
    param_dtype: Any = jnp.float32,
    shardings: Params | None = None,
) -> tuple[TransformerConfig, Params, dict[str, Any]]:
    """(architecture, parameters, contents of config.json) of a Hugging Face model.

    Args:
        path_or_hub_id: a folder with config.json and safetensors, or a hub id.
        param_dtype: storage dtype; the checkpoint's is converted.
        shardings: tree of shardings, one per leaf, to place the parameters; None: default device.

    Raises:
        ValueError: no such model, an unsupported setting, pickled weights, or tensors that are
            missing, unexpected or misshaped (all named in one message).
    """
    folder = resolve(path_or_hub_id)
    hf_config = load_config(folder)
    config = transformer_config(hf_config)
    files = _tensor_files(folder)
    wanted = _tensors(config)
    problems = _differences(files, wanted)
    if problems:
        raise ValueError(
            f"{folder}: the weights do not fit config.json ({hf_config['model_type']}):\n  "
            + "\n  ".join(problems)
            + "\nUse the config.json that belongs to these weights"
        )
    abstract = abstract_params(config, param_dtype)
    ends, layers = {k: v for k, v in abstract.items() if k != "layers"}, abstract["layers"]
    params = {}
    for tree, placed in ((ends, params), (layers, params.setdefault("layers", {}))):
        for leaf, spec in tree.items():
            host = np.empty(spec.shape, spec.dtype)
            for name, tensor in wanted.items():
                if tensor.leaf == leaf:
                    with safe_open(files[name], framework="np") as f:
                        view = tensor.view(host)
                        view[...] = tensor.ours(f.get_tensor(name), view.shape)
            sharding = None
            if shardings is not None:
                sharding = (shardings if tree is ends else shardings["layers"])[leaf]
            placed[leaf] = jax.device_put(host, sharding)
    return config, params, hf_config


def save(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    params: Params,
    hf_config: Mapping[str, Any],
    tokenizer_files_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write config.json and model.safetensors, which transformers loads as they are.

    Args:
        folder: made when absent.
        config: the architecture.
        params: parameters in our layout.
        hf_config: contents for config.json (from `load` or `families.hf_config`); its dtype is
            replaced by that of the parameters.
        tokenizer_files_from: model folder whose tokenizer files are copied.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    host = jax.tree.map(np.asarray, jax.device_get(dict(params)))
    arrays = {}
    for name, tensor in _tensors(config).items():
        leaf = host["layers"][tensor.leaf] if tensor.layer >= 0 else host[tensor.leaf]
        arrays[name] = np.ascontiguousarray(tensor.theirs(tensor.view(leaf)))
    # Under another name first: a reader never sees a half-written file as the model.
    unfinished = folder / (_SINGLE + ".unfinished")
    save_file(arrays, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)  # safetensors makes it readable by its owner only
    os.replace(unfinished, folder / _SINGLE)
    written = {k: v for k, v in hf_config.items() if k != "torch_dtype"}
    written["dtype"] = str(next(iter(arrays.values())).dtype)
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    if tokenizer_files_from is not None:
        source = resolve(tokenizer_files_from)
        for name in TOKENIZER_FILES:
            if (source / name).is_file() and (source / name) != folder / name:
                shutil.copyfile(source / name, folder / name)


def load_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Contents of config.json of a model folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: no config.json there. A model is a Hugging Face folder with config.json "
            "and *.safetensors; give the folder itself"
        )
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON: {error}. Download the file again") from error


def resolve(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """The folder of a model: the path itself, or a snapshot of the hub repository.

    Raises:
        ValueError: neither a folder nor a repository that can be fetched or is cached.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_hub_id)
    is_hub_id = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not path.exists()
    if not is_hub_id:
        raise ValueError(
            f"model path {name!r} is not a folder. Give a folder with config.json and "
            "*.safetensors, or a Hugging Face hub id such as Qwen/Qwen2.5-0.5B"
        )
    # Imported here: a run on a local folder needs neither the package nor its import time.
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
            )
        )
    except (OSError, HFValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"model {name!r} is neither a folder here nor a Hugging Face repository that can be "
            f"fetched ({reason}). Check the spelling, or download it first and give its folder"
        ) from error


def _tensors(config: TransformerConfig) -> dict[str, _Tensor]:
    """Hugging Face tensor name -> place in our tree, for Llama and Qwen2."""
    d, e, f = config.hidden_size, config.head_dim, config.mlp_size
    q, kv = config.num_heads * e, config.num_kv_heads * e
    table = (config.vocab_size, d)
    out = {
        "model.embed_tokens.weight": _Tensor("embed", -1, None, table, False),
        "model.norm.weight": _Tensor("final_norm", -1, None, (d,), False),
    }
    if not config.tie_embeddings:
        out["lm_head.weight"] = _Tensor("unembed", -1, None, table, False)
    for i in range(config.num_layers):
        named: dict[str, tuple[str, int | None, tuple[int, ...]]] = {
            "input_layernorm.weight": ("attn_norm", None, (d,)),
            "self_attn.q_proj.weight": ("q", None, (q, d)),
            "self_attn.k_proj.weight": ("kv", 0, (kv, d)),
            "self_attn.v_proj.weight": ("kv", 1, (kv, d)),
            "self_attn.o_proj.weight": ("o", None, (d, q)),
            "post_attention_layernorm.weight": ("mlp_norm", None, (d,)),
            "mlp.gate_proj.weight": ("gate_up", 0, (f, d)),
            "mlp.up_proj.weight": ("gate_up", 1, (f, d)),
            "mlp.down_proj.weight": ("down", None, (d, f)),
        }
        if config.qkv_bias:
            named["self_attn.q_proj.bias"] = ("q_bias", None, (q,))
            named["self_attn.k_proj.bias"] = ("kv_bias", 0, (kv,))
            named["self_attn.v_proj.bias"] = ("kv_bias", 1, (kv,))
        if config.o_bias:
            named["self_attn.o_proj.bias"] = ("o_bias", None, (d,))
        for name, (leaf, part, shape) in named.items():
            is_matrix = len(shape) == 2
            out[f"model.layers.{i}.{name}"] = _Tensor(leaf, i, part, shape, is_matrix)
    return out


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
        absent = sorted({f for f in weight_map.values() if not (folder / f).is_file()})
        if absent:
            raise ValueError(
                f"{folder}: {_INDEX} names {', '.join(absent)}, absent. Download the missing shards"
            )
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / _SINGLE
    if single.is_file():
        try:
            with safe_open(single, framework="np") as f:
                return dict.fromkeys(f.keys(), single)
        except SafetensorError as error:
            raise ValueError(
                f"{single}: not a complete safetensors file ({error}). Download it again"
            ) from error
    pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.pt*")
    )
    if pickled:
        raise ValueError(
            f"{folder}: only pickled weights ({', '.join(pickled)}), which can run code when "
            "opened and are refused. Convert them to safetensors"
        )
    raise ValueError(f"{folder}: no {_SINGLE} and no {_INDEX} there. Download the weights")


def _differences(files: Mapping[str, Path], wanted: Mapping[str, _Tensor]) -> list[str]:
    """One line per kind of disagreement between the files and the architecture."""
    # Buffers of old checkpoints, and the copy of a tied embedding: no parameters of ours.
    spare = {n for n in files if n.endswith(".inv_freq")}
    if "lm_head.weight" not in wanted:
        spare.add("lm_head.weight")
    missing = sorted(wanted.keys() - files.keys())
    unexpected = sorted(files.keys() - wanted.keys() - spare)
    misshaped = []
    for name in sorted(wanted.keys() & files.keys()):
        try:
            with safe_open(files[name], framework="np") as f:
                shape = tuple(f.get_slice(name).get_shape())
        except SafetensorError as error:
            misshaped.append(f"{name} (unreadable in {files[name].name}: {error})")
            continue
        if shape != wanted[name].shape:
            misshaped.append(f"{name} (got {list(shape)}, wanted {list(wanted[name].shape)})")
    return [
        f"{kind}: {', '.join(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshaped", misshaped),
        )
        if names
    ]
