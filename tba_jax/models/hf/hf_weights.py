# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of weights in Hugging Face model folders: safetensors, single or sharded.

Tensors are read as views of mapped files, whose pages the system can drop. No pickle is read, and
no code of a checkpoint runs. Invariant: weights that are read and saved again are unchanged, bit
for bit.
"""

import functools
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Int32
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tba_jax.models.hf import families, folders
from tba_jax.models.hf.tensors import HFTensor
from tba_jax.models.transformer import Params, TransformerConfig, abstract_params

_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "generation_config.json"),
)
# Storage dtypes of parameters. Integers and 8-bit floats have scales in other tensors, so their
# values alone would be wrong.
DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
}
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHOWN_NAMES = 20  # maximum number of listed tensors per kind of problem
_MAX_FILE_BYTES = 5 * 10**9  # larger weights are split into several files, as the hub requires
# Blocks of this size stay in the caches of a CPU while they are transposed, which takes 2.4 times
# as long with blocks of 32 MiB.
_BLOCK_BYTES = 2 * 2**20
# Values of a four-bit float of MXFP4: sign, two bits of exponent, one of mantissa.
_FP4 = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        code: dtype code in the file; `DTYPES` has the codes of floating point.
        array: values, a view of the mapped file; bytes if the dtype cannot be read.
        scales: exponents of the values in MXFP4, of which a byte of `array` has two; else None.
    """

    code: str
    array: np.ndarray
    scales: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        shape = self.array.shape
        return shape if self.scales is None else (*shape[:-2], 2 * shape[-2] * shape[-1])

    def values(self) -> np.ndarray:
        """Return the values; MXFP4 [e out in/32 16] becomes bfloat16 [e out in], which is exact."""
        if self.scales is None:
            return self.array
        out = np.empty(self.shape, jnp.bfloat16)
        pairs = np.stack([_FP4[np.arange(256) % 16], _FP4[np.arange(256) // 16]], axis=-1)
        for i, blocks in enumerate(self.array):  # one expert at a time, to bound memory
            exponents = self.scales[i].astype(np.int32)[..., None] - 127
            values = pairs[blocks].reshape(*blocks.shape[:-1], -1)
            out[i] = np.ldexp(values, exponents).reshape(out.shape[1:])
        return out


def open_folder(folder: Path) -> dict[str, Stored]:
    """Return the tensors in a folder by name, without reading them.

    Raises:
        ValueError: no safetensors, or a damaged index or file.
    """
    index, files = folder / _INDEX, [_SINGLE]
    if index.is_file():
        weight_map = folders.read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index}: wanted a weight_map of tensors to files. Download it again")
        files = sorted({Path(str(x)).name for x in weight_map.values()})
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder}: no {', '.join(absent)} there. Download the weights as safetensors; "
            "pickled weights are not read, because they can run code when opened"
        )
    found = {name: x for file in files for name, x in open_file(folder / file).items()}
    for name in [x for x in found if x.endswith("_scales")]:
        if (blocks := name.removesuffix("_scales") + "_blocks") in found:
            scales = found.pop(name).array
            found[blocks] = found[blocks]._replace(code="MXFP4", scales=scales)
    return found


def open_file(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file by name, as views of the mapped file.

    The library safetensors copies every tensor that it reads.

    Raises:
        ValueError: the file is truncated or is not in the format.
    """
    try:
        with safe_open(path, framework="np"):
            pass  # the library checks header and file size when it opens a file
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a complete safetensors file ({error}). Download it again"
        ) from error
    data = np.asarray(np.memmap(path, np.uint8, mode="r"))
    start = 8 + int(data[:8].view("<u8")[0])
    found = {}
    for name, x in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__":
            first, end = x["data_offsets"]
            array = data[start + first : start + end]
            if x["dtype"] in ("U8", *DTYPES):
                array = array.view(DTYPES.get(x["dtype"], np.uint8)).reshape(x["shape"])
            found[name] = Stored(x["dtype"], array)
    return found


def load(
    folder: Path, config: TransformerConfig, param_dtype: Any, shardings: Params | None = None
) -> Params:
    """Return the parameters in a folder.

    Args:
        param_dtype: storage dtype, to which the checkpoint is converted.
        shardings: tree of shardings, one per leaf; None: default device.

    Raises:
        ValueError: as `open_folder` and `read`; or the files have an output matrix that is not the
            embedding to which config.json ties it. transformers would use this matrix.
    """
    named = ((families.written_name(name, config), x) for name, x in open_folder(folder).items())
    stored = {name: x for name, x in named if name is not None}
    tensors = families.tensors(config, stored)
    if config.tie_embeddings and not config.num_labels:
        head = stored.pop(families.FAMILIES[config.family].head, None)
        (table,) = (name for name, x in tensors.items() if x.leaves == ("embed",))
        if head is not None and not np.array_equal(head.array, stored.get(table, head).array):
            raise ValueError(
                f"{folder}: config.json has tie_word_embeddings = true, but the output matrix in "
                "the files is not the embedding. Set it to false to use this matrix, or remove it "
                "from the files"
            )
    return read(stored, tensors, abstract_params(config, param_dtype), folder, shardings)


def read(
    stored: Mapping[str, Stored],
    tensors: Mapping[str, HFTensor],
    abstract: Params,
    folder: Path,
    shardings: Params | None = None,
) -> Params:
    """Return parameters, for any architecture.

    Each process reads the parts that its own devices store. Besides the parameters, host memory has
    these parts of one leaf (all layers of a matrix), and of four-bit experts one tensor.

    Args:
        stored: tensors in the files, by the names in `tensors`.
        tensors: required tensors, by name.
        abstract: the tree to fill, with the leaves of layers under "layers".
        folder: name of the files in errors.
        shardings: as in `load`.

    Raises:
        ValueError: missing, unexpected or misshaped tensors, all named in one message.
    """
    _check(stored, tensors, folder)
    pieces: dict[tuple[bool, str], list[tuple[Stored, HFTensor]]] = {}
    for name, tensor in tensors.items():
        for leaf in tensor.leaves:
            pieces.setdefault((bool(tensor.at), leaf), []).append((stored[name], tensor))

    def of_leaf(path: Any, spec: jax.ShapeDtypeStruct, sharding: Any = None) -> Array:
        """Return a leaf, put together on the host."""
        leaf = path[-1].key
        whole = np.empty(spec.shape, spec.dtype)  # parts of no device of this process use no memory
        regions = {"": (slice(None),) * len(spec.shape)}
        if sharding is not None:
            # Devices with equal parts share them.
            indices = sharding.addressable_devices_indices_map(spec.shape).values()
            regions = {str(index): index for index in indices}
        for tensor, layout in pieces[len(path) > 1, leaf] if regions else ():
            part = layout.split(tensor.values())[layout.leaves.index(leaf)]
            for region in regions.values():
                rows = zip(layout.at, region, spec.shape, strict=False)
                if all(i in range(*rows_of.indices(size)) for i, rows_of, size in rows):
                    inner = region[len(layout.at) :]
                    _copy(whole[layout.at][inner], part[inner])
        if sharding is None:
            return jax.device_put(whole)
        return jax.make_array_from_callback(spec.shape, sharding, whole.__getitem__)

    trees = (abstract,) if shardings is None else (abstract, shardings)
    return jax.tree_util.tree_map_with_path(of_leaf, *trees)


def _check(stored: Mapping[str, Stored], tensors: Mapping[str, HFTensor], folder: Path) -> None:
    """Name every disagreement between the files and the architecture in one ValueError."""
    both = sorted(stored.keys() & tensors.keys())
    kinds = {
        "missing": sorted(tensors.keys() - both),
        "unexpected": sorted(stored.keys() - both),
        "other values": [
            f"{name} (got {stored[name].code} {list(stored[name].shape)}, wanted floats "
            f"{list(tensors[name].shape)})"
            for name in both
            if stored[name].code not in (*DTYPES, "MXFP4")
            or stored[name].shape != tensors[name].shape
        ],
    }
    problems = [
        f"{kind}: {', '.join(names[:_SHOWN_NAMES])}"
        + f", {len(names) - _SHOWN_NAMES:,} more" * (len(names) > _SHOWN_NAMES)
        for kind, names in kinds.items()
        if names
    ]
    if problems:
        raise ValueError(
            f"{folder}: the weights do not fit config.json: {'; '.join(problems)}. Use the "
            "config.json that belongs to these weights, or download them again"
        )


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy an array block by block."""
    rows = max(1, _BLOCK_BYTES // max(1, target[:1].nbytes))
    for start in range(0, len(target), rows):
        target[start : start + rows] = source[start : start + rows]


def save(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    params: Params,
    hf_config: Mapping[str, Any],
    tokenizer_files_from: str | os.PathLike[str] | None = None,
    dtype: Any = None,
) -> None:
    """Write config.json and safetensors that transformers can load.

    With several processes, all must call this function, and process 0 writes. The host holds the
    tensors of one file, at most 5 GB, or one tensor if it is larger.

    Args:
        folder: created if missing. A folder without weights; readers find none before all are
            written.
        params: in our layout, on any devices, gathered by matrix; or host arrays, lists in layers.
        hf_config: contents for config.json, from a source model; `dtype` replaces its dtype.
        tokenizer_files_from: model folder whose tokenizer files are copied.
        dtype: dtype of the written tensors, except `config.float32_leaves`; None: that of params.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    folder, is_writer = Path(folder), jax.process_index() == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
    target = params if dtype is None else abstract_params(config, dtype)

    @functools.lru_cache(maxsize=4)  # a tensor has up to three leaves, of one layer for all experts
    def row(leaf: str, layer: int) -> np.ndarray:
        """Return a leaf, or its row of a layer, gathered from all devices."""
        array = params["layers"][leaf] if layer >= 0 else params[leaf]
        if layer >= 0:
            is_host = isinstance(array, np.ndarray | list)
            array = array[layer] if is_host else _row(array, np.int32(layer))
        if isinstance(array, Array) and not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.asarray(array).astype(dtype_of(leaf, layer >= 0), copy=False)

    def dtype_of(leaf: str, is_of_layer: Any) -> np.dtype:
        return np.dtype((target["layers"] if is_of_layer else target)[leaf].dtype)

    tensors = families.tensors(config)
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda x: math.prod(x.shape) * dtype_of(x.leaves[0], x.at).itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_MAX_FILE_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        arrays = {}
        for name in names:  # every process must take part in the gathering
            x = tensors[name]
            layer, expert = (*x.at[:1], -1)[0], x.at[1:]
            arrays[name] = x.join([row(leaf, layer)[expert] for leaf in x.leaves])
        if is_writer:
            write_file(folder / file, arrays)
    if not is_writer:
        return
    # Weights are written as they are in memory, not quantised, and not to the source's folder.
    dropped = ("torch_dtype", "quantization_config", "_name_or_path")
    written = {k: v for k, v in hf_config.items() if k not in dropped}
    _write_json(folder / "config.json", {**written, "dtype": str(dtype_of("embed", False))})
    if tokenizer_files_from is not None:
        source = folders.resolve(tokenizer_files_from)
        for path in (path for name in _TOKENIZER_FILES for path in source.glob(name)):
            shutil.copyfile(path, folder / path.name)
    if split.is_sharded:  # last, because several files without an index are no model
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / _INDEX, index)


def write_file(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write tensors to a file, which is readable as other files of the user are."""
    path.touch()
    mode = path.stat().st_mode
    arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    save_file(arrays, path, metadata={"format": "pt"})
    path.chmod(mode)  # the library makes a new file that only its owner may read


@jax.jit
def _row(leaf: Array, row: Int32[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(leaf, row, keepdims=False)


def _write_json(path: Path, contents: Any) -> None:
    path.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")
