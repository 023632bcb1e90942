# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of weights in Hugging Face model folders: safetensors, single or sharded.

Parameters are read one leaf and saved one tensor at a time, so that little memory is needed besides
them. No pickle is read, and no code of a checkpoint runs. Invariant: weights that are read and
saved again are unchanged, bit for bit.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Int32

from tba_jax.models.hf import families, folders, safetensors_file
from tba_jax.models.hf.folders import read_json
from tba_jax.models.hf.safetensors_file import Entry
from tba_jax.models.hf.tensors import HFTensor
from tba_jax.models.transformer import Params, TransformerConfig

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
_UNFINISHED = ".unfinished"
_SHOWN_NAMES = 20  # maximum number of listed tensors per kind of problem
_MAX_FILE_BYTES = 5 * 10**9  # larger weights are split into several files, as the hub requires
# Blocks of this size stay in the caches of a CPU while they are transposed, which takes 2.4 times
# as long with blocks of 32 MiB.
_BLOCK_BYTES = 2 * 2**20

# Unsigned integer of each dtype's width, and the bits of its exponent.
_EXPONENTS: dict[np.dtype, tuple[type[np.unsignedinteger], Any]] = {
    np.dtype(np.float32): (np.uint32, np.uint32(0x7F800000)),
    np.dtype(np.float16): (np.uint16, np.uint16(0x7C00)),
    np.dtype(jnp.bfloat16): (np.uint16, np.uint16(0x7F80)),
}


def read(
    folder: Path,
    tensors: Mapping[str, HFTensor],
    abstract: Params,
    *,
    shardings: Params | None = None,
    family: str,
    aliases: Callable[[str], tuple[str, ...]] = lambda name: (),
    is_spare: Callable[[str], bool] = lambda name: False,
) -> Params:
    """Return the parameters in a folder, for any architecture.

    Each process reads the parts that its own devices store. Besides the parameters, host memory has
    these parts of one leaf (all layers of a matrix). If the files have a tensor for each expert, or
    four-bit experts, it also has one matrix of a layer's experts.

    Args:
        folder: folder with safetensors.
        tensors: required tensors, by name.
        abstract: the tree to fill, with the leaves of layers under "layers"; its dtypes are storage
            dtypes, to which the checkpoint is converted.
        shardings: tree of shardings, one per leaf; None: default device.
        family: name of the architecture in errors.
        aliases: function that returns other names of a tensor.
        is_spare: whether a tensor that is not in `tensors` may be present.

    Raises:
        ValueError: pickled weights, a damaged file, missing, unexpected or misshaped tensors (all
            named in one message), or values that are not finite.
    """
    sources = _sources(folder, tensors, family, aliases, is_spare)
    mapped: dict[Path, np.ndarray] = {}
    pieces: dict[tuple[bool, str], list[tuple[list[Entry], HFTensor]]] = {}
    for parts, tensor in sources:
        mapped |= {x.path: safetensors_file.map_file(x.path) for x in parts if x.path not in mapped}
        for leaf in tensor.leaves:
            pieces.setdefault((tensor.layer >= 0, leaf), []).append((parts, tensor))

    def load(path: Any, spec: jax.ShapeDtypeStruct, sharding: Any = None) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return _load(name, spec, sharding, pieces[len(path) > 1, path[-1].key], mapped)

    return jax.tree_util.tree_map_with_path(
        load, abstract, *([] if shardings is None else [shardings])
    )


def _load(
    name: str,
    spec: jax.ShapeDtypeStruct,
    sharding: Any,
    pieces: Sequence[tuple[list[Entry], HFTensor]],
    mapped: Mapping[Path, np.ndarray],
) -> Array:
    """Return a leaf, put together on the host.

    Args:
        name: path of the leaf in the tree.
        spec: shape and dtype.
        sharding: sharding of the leaf; None: the default device.
        pieces: tensors with the layers of the leaf, or with the whole leaf.
        mapped: bytes of the files.
    """

    shape, leaf = spec.shape, name.rpartition("/")[2]
    if sharding is None:
        indices: Mapping[Any, Any] = {None: (slice(None),) * len(shape)}
    else:
        indices = sharding.addressable_devices_indices_map(shape)
    bounds = {
        device: tuple(x.indices(n)[:2] for x, n in zip(index, shape, strict=True))
        for device, index in indices.items()
    }
    # Devices with equal parts share them.
    shards = {
        at: np.empty([end - first for first, end in at], spec.dtype)
        for at in dict.fromkeys(bounds.values())
    }
    for parts, tensor in pieces if shards else ():
        arrays = tensor.leaf_arrays([safetensors_file.view(mapped[x.path], x) for x in parts])
        array, layer = arrays[tensor.leaves.index(leaf)], tensor.layer
        for at, shard in shards.items():
            slices = tuple(slice(*x) for x in at)
            if layer < 0:
                is_finite = _copy(shard, array[slices])
            elif at[0][0] <= layer < at[0][1]:
                is_finite = _copy(shard[layer - at[0][0]], array[slices[1:]])
            else:
                continue
            if not is_finite:
                where = "" if layer < 0 else f" of layer {layer}"
                raise ValueError(
                    f"{parts[0].path}: {name}{where} has values that are not finite. Download the "
                    "file again, or use an earlier checkpoint of these weights"
                )
    if sharding is None:
        return jax.device_put(*shards.values())
    arrays = [jax.device_put(shards[at], device) for device, at in bounds.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=spec.dtype)


def save(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    params: Params,
    hf_config: Mapping[str, Any],
    tokenizer_files_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write config.json and safetensors that transformers can load.

    Readers find the old weights, the new weights, or (while several files are replaced) no weights.
    With several processes, all must call this function, and process 0 writes.

    Args:
        folder: created if missing; its weights are replaced.
        params: parameters in our layout, on any devices; gathered one tensor at a time.
        hf_config: contents for config.json, from a source model or `config_json.hf_config`; the
            dtype of the parameters replaces its dtype.
        tokenizer_files_from: model folder whose tokenizer files are copied.
    """
    folder = Path(folder)
    tensors = families.tensors(config)
    headers = _headers(tensors, params)
    if jax.process_index() != 0:
        for header in headers.values():
            for _ in _arrays(header, tensors, params):
                pass  # every process must take part in the gathering
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for file, header in headers.items():
            unfinished = folder / (file + _UNFINISHED)
            safetensors_file.write(unfinished, header, _arrays(header, tensors, params))
        _publish(folder, headers)
    finally:
        for file in headers:
            (folder / (file + _UNFINISHED)).unlink(missing_ok=True)
    # Weights are written as they are in memory, not quantised.
    dropped = ("torch_dtype", "quantization_config")
    written = {k: v for k, v in hf_config.items() if k not in dropped}
    written["dtype"] = str(np.dtype(params["embed"].dtype))
    _write_json(folder / "config.json", written)
    if tokenizer_files_from is not None:
        source = folders.resolve(tokenizer_files_from)
        for name in TOKENIZER_FILES:
            if (source / name).is_file() and (source / name) != folder / name:
                shutil.copyfile(source / name, folder / name)


def _copy(target: np.ndarray, source: np.ndarray) -> bool:
    """Copy an array block by block, and return whether all of its values are finite."""
    rows = max(1, _BLOCK_BYTES // max(1, target[:1].nbytes))
    for start in range(0, len(target), rows):
        block = source[start : start + rows]
        if not _is_finite(block):
            return False
        target[start : start + rows] = block
    return True


def _is_finite(values: np.ndarray) -> bool:
    """Return whether no value is nan or infinite, according to the bits of the exponents."""
    if values.dtype not in _EXPONENTS:
        return bool(np.isfinite(values).all())
    # numpy handles bfloat16 by a slow function per value; integers of this width are fast.
    integer, exponent = _EXPONENTS[values.dtype]
    return not ((values.view(integer) & exponent) == exponent).any()


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder.

    Raises:
        ValueError: no weights, or a damaged file.
    """
    return set(_entries(folder)[0])


def _sources(
    folder: Path,
    tensors: Mapping[str, HFTensor],
    family: str,
    aliases: Callable[[str], tuple[str, ...]],
    is_spare: Callable[[str], bool],
) -> list[tuple[list[Entry], HFTensor]]:
    """Return the file entries of each tensor of the architecture.

    Raises:
        ValueError: names every disagreement between the files and the architecture.
    """
    found, lost = _entries(folder)
    missing, misshaped, unreadable, out = [], [], [], []
    unexpected = {name for name in found if not is_spare(name)}
    for whole_name, tensor in tensors.items():
        parts = []
        for name, shape in tensor.parts(whole_name).items():
            names = (name, *aliases(name))
            there = next((x for x in names if x in found), None)
            if there is None:
                if not any(x in lost for x in names):
                    missing.append(name)
                continue
            unexpected.discard(there)
            entry = found[there]
            if entry.shape != shape:
                misshaped.append(f"{there} (got {list(entry.shape)}, wanted {list(shape)})")
            readable = ("U8",) if tensor.is_mxfp4 else safetensors_file.DTYPES
            if entry.dtype not in readable:
                unreadable.append(f"{there} ({entry.dtype})")
            parts.append(entry)
        out.append((parts, tensor))
    problems = [
        f"{kind}: {_listed(sorted(names))}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshaped", misshaped),
            (f"of a dtype other than {', '.join(safetensors_file.DTYPES)}", unreadable),
            ("named by the index but absent from their file", lost.values()),
        )
        if names
    ]
    if problems:
        raise ValueError(
            f"{folder}: the weights do not fit config.json ({family}): {'; '.join(problems)}. Use "
            "the config.json that belongs to these weights, or download them again"
        )
    return out


def check_tied(folder: Path, heads: Sequence[str], embedding: Sequence[str]) -> None:
    """Check that an output matrix in the files equals the embedding to which config.json ties it.

    Args:
        heads: possible names of the output matrix.
        embedding: possible names of the embedding.

    Raises:
        ValueError: they differ. transformers would use the output matrix.
    """
    found, _ = _entries(folder)
    head = next((found[name] for name in heads if name in found), None)
    table = next((found[name] for name in embedding if name in found), None)
    if head is None or table is None:
        return
    ours, theirs = (
        safetensors_file.view(safetensors_file.map_file(x.path), x) for x in (table, head)
    )
    if ours.shape != theirs.shape or not np.array_equal(ours, theirs):
        raise ValueError(
            f"{folder}: config.json has tie_word_embeddings = true, but {heads[0]} in the files is "
            "not the embedding. Set it to false to use this matrix, or remove it from the files"
        )


def _listed(names: Sequence[str]) -> str:
    """Return the first names as text, followed by the number of the others."""
    more = f", and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def _entries(folder: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return (tensors by name, {tensor that the index lists and its file lacks: that file})."""
    if not (folder / _INDEX).is_file():
        if (folder / _SINGLE).is_file():
            return safetensors_file.entries(folder / _SINGLE), {}
        pickled = sorted(p.name for kind in ("*.bin", "*.pt*") for p in folder.glob(kind))
        if pickled:
            raise ValueError(
                f"{folder}: only pickled weights ({', '.join(pickled)}), which can run code when "
                "opened and are refused. Convert them to safetensors"
            )
        raise ValueError(f"{folder}: no {_SINGLE} and no {_INDEX} there. Download the weights")
    files = _read_index(folder / _INDEX)
    absent = sorted({f for f in files.values() if not (folder / f).is_file()})
    if absent:
        raise ValueError(
            f"{folder}: {_INDEX} lists missing files: {', '.join(absent)}. Download them"
        )
    in_file = {f: safetensors_file.entries(folder / f) for f in sorted(set(files.values()))}
    # Tensors that the index omits are also found, and so reported or used.
    found = {name: entry for tensors in in_file.values() for name, entry in tensors.items()}
    found |= {name: in_file[f][name] for name, f in files.items() if name in in_file[f]}
    lost = {name: f"{name} ({f})" for name, f in files.items() if name not in in_file[f]}
    return {name: entry for name, entry in found.items() if name not in lost}, lost


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, from an index."""
    files = read_json(path).get("weight_map")
    is_map = isinstance(files, dict) and all(
        isinstance(f, str) and f == Path(f).name for f in files.values()
    )
    if not files or not is_map:
        raise ValueError(
            f"{path}: wanted a weight_map from tensor names to files of the same folder. Download "
            "the file again"
        )
    return files


def _headers(
    tensors: Mapping[str, HFTensor], params: Params
) -> dict[str, dict[str, tuple[np.dtype, tuple[int, ...]]]]:
    """Return file name -> dtype and shape of each of its tensors, in the order of writing."""
    files: list[dict[str, tuple[np.dtype, tuple[int, ...]]]] = [{}]
    file_bytes = 0
    for name, tensor in tensors.items():
        tree = params["layers"] if tensor.layer >= 0 else params
        dtype = np.dtype(tree[tensor.leaves[0]].dtype)
        parts = tensor.parts(name)
        num_bytes = sum(map(math.prod, parts.values())) * dtype.itemsize
        if files[-1] and file_bytes + num_bytes > _MAX_FILE_BYTES:
            files.append({})
            file_bytes = 0
        files[-1] |= {part: (dtype, shape) for part, shape in parts.items()}
        file_bytes += num_bytes
    # Wide dtypes are first, so that every tensor is aligned.
    files = [dict(sorted(f.items(), key=lambda x: -x[1][0].itemsize)) for f in files]
    if len(files) == 1:
        return {_SINGLE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": f for i, f in enumerate(files, 1)}


def _arrays(
    names: Mapping[str, Any], tensors: Mapping[str, HFTensor], params: Params
) -> Iterator[np.ndarray]:
    """Yield the tensors of these names on the host, one at a time."""
    # Parts of a tensor are adjacent.
    whole = {part: name for name, tensor in tensors.items() for part in tensor.parts(name)}
    for tensor in (tensors[name] for name in dict.fromkeys(whole[part] for part in names)):
        arrays = []
        for name in tensor.leaves:
            leaf = params[name] if tensor.layer < 0 else params["layers"][name]
            if tensor.layer >= 0:
                is_host = isinstance(leaf, np.ndarray)
                leaf = leaf[tensor.layer] if is_host else _layer(leaf, np.int32(tensor.layer))
            arrays.append(_on_host(leaf))
        yield from tensor.file_arrays(arrays)


@jax.jit
def _layer(leaf: Array, layer: Int32[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)


def _on_host(x: Array | np.ndarray) -> np.ndarray:
    if isinstance(x, Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _publish(folder: Path, headers: Mapping[str, Mapping[str, Any]]) -> None:
    """Rename complete files to their final names and remove those of an earlier save."""
    index = folder / _INDEX
    old = set(_read_index(index).values()) if index.is_file() else set()
    # Without an index, several files are no model, so readers never mix old and new files.
    index.unlink(missing_ok=True)
    if len(headers) > 1:
        (folder / _SINGLE).unlink(missing_ok=True)
    for file in headers:
        os.replace(folder / (file + _UNFINISHED), folder / file)
    for file in old - headers.keys():
        (folder / file).unlink(missing_ok=True)
    if len(headers) > 1:
        weight_map = {name: file for file, header in headers.items() for name in header}
        sizes = [d.itemsize * math.prod(s) for h in headers.values() for d, s in h.values()]
        _write_json(index, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})


def _write_json(path: Path, contents: Any) -> None:
    unfinished = path.with_name(path.name + _UNFINISHED)
    unfinished.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")
    os.replace(unfinished, path)
