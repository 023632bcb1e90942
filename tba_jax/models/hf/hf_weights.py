# SPDX-License-Identifier: Apache-2.0
"""Reading and writing of weights in Hugging Face model folders: safetensors, single or sharded.

Tensors are read as views of mapped files, whose pages the system can drop. No pickle is read, and
no code of a checkpoint runs. Invariant: weights that are read and saved again are unchanged, bit
for bit.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
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
from tba_jax.models.hf.folders import read_json
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
_UNFINISHED = ".unfinished"
_SHOWN_NAMES = 20  # maximum number of listed tensors per kind of problem
_MAX_FILE_BYTES = 5 * 10**9  # larger weights are split into several files, as the hub requires
# Blocks of this size stay in the caches of a CPU while they are transposed, which takes 2.4 times
# as long with blocks of 32 MiB.
_BLOCK_BYTES = 2 * 2**20


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        path: the file.
        code: dtype code in the file; `DTYPES` has the codes of floating point.
        array: view of the mapped file; the bytes of a dtype that cannot be read.
    """

    path: Path
    code: str
    array: np.ndarray


def open_folder(folder: Path) -> dict[str, Stored]:
    """Return the tensors in a folder by name, without reading them.

    Raises:
        ValueError: no weights, pickled weights, or a damaged index or file.
    """
    if not (folder / _INDEX).is_file():
        if (folder / _SINGLE).is_file():
            return open_file(folder / _SINGLE)
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
    in_file = {f: open_file(folder / f) for f in sorted(set(files.values()))}
    if lost := [f"{name} ({f})" for name, f in files.items() if name not in in_file[f]]:
        raise ValueError(
            f"{folder}: {_INDEX} lists tensors that are absent from their file: {_listed(lost)}. "
            "Download index and files again"
        )
    # Tensors that the index omits are also found, and so reported or used.
    found = {name: x for tensors in in_file.values() for name, x in tensors.items()}
    return found | {name: in_file[f][name] for name, f in files.items()}


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
            found[name] = Stored(path, x["dtype"], array)
    return found


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


def read(
    stored: Mapping[str, Stored],
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
        stored: return value of `open_folder`.
        tensors: required tensors, by name.
        abstract: the tree to fill, with the leaves of layers under "layers"; its dtypes are storage
            dtypes, to which the checkpoint is converted.
        shardings: tree of shardings, one per leaf; None: default device.
        family: name of the architecture in errors.
        aliases: function that returns other names of a tensor.
        is_spare: whether a tensor that is not in `tensors` may be present.

    Raises:
        ValueError: missing, unexpected or misshaped tensors, all named in one message.
    """
    pieces: dict[tuple[bool, str], list[tuple[list[Stored], HFTensor]]] = {}
    for parts, tensor in _sources(stored, tensors, family, aliases, is_spare):
        for leaf in tensor.leaves:
            pieces.setdefault((tensor.layer >= 0, leaf), []).append((parts, tensor))

    def load(path: Any, spec: jax.ShapeDtypeStruct, sharding: Any = None) -> Array:
        leaf = path[-1].key
        return _load(leaf, spec, sharding, pieces[len(path) > 1, leaf])

    return jax.tree_util.tree_map_with_path(
        load, abstract, *([] if shardings is None else [shardings])
    )


def _load(
    leaf: str,
    spec: jax.ShapeDtypeStruct,
    sharding: Any,
    pieces: Sequence[tuple[list[Stored], HFTensor]],
) -> Array:
    """Return a leaf, put together on the host.

    Args:
        leaf: name of the leaf.
        spec: shape and dtype.
        sharding: sharding of the leaf; None: the default device.
        pieces: tensors with the layers of the leaf, or with the whole leaf.
    """
    whole = np.empty(spec.shape, spec.dtype)  # parts of no device of this process use no memory
    regions = {"": (slice(None),) * len(spec.shape)}
    if sharding is not None:
        # Devices with equal parts share them.
        indices = sharding.addressable_devices_indices_map(spec.shape).values()
        regions = {str(index): index for index in indices}
    for parts, tensor in pieces if regions else ():
        arrays = tensor.leaf_arrays([x.array for x in parts])
        array, row = arrays[tensor.leaves.index(leaf)], tensor.layer
        for region in regions.values():
            if row < 0:
                _copy(whole[region], array[region])
            elif row in range(*region[0].indices(len(whole))):
                _copy(whole[row][region[1:]], array[region[1:]])
    if sharding is None:
        return jax.device_put(whole)
    return jax.make_array_from_callback(spec.shape, sharding, whole.__getitem__)


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy an array block by block."""
    rows = max(1, _BLOCK_BYTES // max(1, target[:1].nbytes))
    for start in range(0, len(target), rows):
        target[start : start + rows] = source[start : start + rows]


def _sources(
    stored: Mapping[str, Stored],
    tensors: Mapping[str, HFTensor],
    family: str,
    aliases: Callable[[str], tuple[str, ...]],
    is_spare: Callable[[str], bool],
) -> list[tuple[list[Stored], HFTensor]]:
    """Return the stored parts of each tensor of the architecture.

    Raises:
        ValueError: names every disagreement between the files and the architecture.
    """
    missing, misshaped, unreadable, out = [], [], [], []
    unexpected = {name for name in stored if not is_spare(name)}
    for whole_name, tensor in tensors.items():
        parts = []
        for name, shape in tensor.parts(whole_name).items():
            there = next((x for x in (name, *aliases(name)) if x in stored), None)
            if there is None:
                missing.append(name)
                continue
            unexpected.discard(there)
            found = stored[there]
            if found.code not in (("U8",) if tensor.is_mxfp4 else DTYPES):
                unreadable.append(f"{there} ({found.code})")
            elif found.array.shape != shape:
                got = list(found.array.shape)
                misshaped.append(f"{there} (got {got}, wanted {list(shape)})")
            parts.append(found)
        out.append((parts, tensor))
    problems = [
        f"{kind}: {_listed(sorted(names))}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshaped", misshaped),
            (f"of a dtype other than {', '.join(DTYPES)}", unreadable),
        )
        if names
    ]
    if problems:
        folder = next(iter(stored.values())).path.parent
        raise ValueError(
            f"{folder}: the weights do not fit config.json ({family}): {'; '.join(problems)}. Use "
            "the config.json that belongs to these weights, or download them again"
        )
    return out


def _listed(names: Sequence[str]) -> str:
    """Return the first names as text, followed by the number of the others."""
    more = f", and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def check_tied(
    stored: Mapping[str, Stored], heads: Sequence[str], embedding: Sequence[str]
) -> None:
    """Check that an output matrix in the files equals the embedding to which config.json ties it.

    Args:
        stored: return value of `open_folder`.
        heads: possible names of the output matrix.
        embedding: possible names of the embedding.

    Raises:
        ValueError: they differ. transformers would use the output matrix.
    """
    head = next((stored[name] for name in heads if name in stored), None)
    table = next((stored[name] for name in embedding if name in stored), None)
    if head is not None and table is not None and not np.array_equal(head.array, table.array):
        raise ValueError(
            f"{head.path.parent}: config.json has tie_word_embeddings = true, but {heads[0]} in "
            "the files is not the embedding. Set it to false to use this matrix, or remove it "
            "from the files"
        )


def save(
    folder: str | os.PathLike[str],
    config: TransformerConfig,
    params: Params,
    hf_config: Mapping[str, Any],
    tokenizer_files_from: str | os.PathLike[str] | None = None,
) -> None:
    """Write config.json and safetensors that transformers can load.

    Readers find the old weights, the new weights, or (while several files are replaced) no weights.
    With several processes, all must call this function, and process 0 writes. The host holds the
    tensors of one file, at most 5 GB, or one tensor if it is larger.

    Args:
        folder: created if missing; its weights are replaced.
        params: parameters in our layout, on any devices; gathered one tensor at a time.
        hf_config: contents for config.json, from a source model or `config_json.hf_config`; the
            dtype of the parameters replaces its dtype.
        tokenizer_files_from: model folder whose tokenizer files are copied.
    """
    folder, is_writer = Path(folder), jax.process_index() == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, int]] = []  # size in bytes of each tensor of each file
    batch: dict[str, np.ndarray] = {}

    def write() -> None:
        files.append({name: x.nbytes for name, x in batch.items()})
        write_file(folder / f"{len(files)}{_UNFINISHED}", batch)
        batch.clear()

    try:
        for name, tensor in families.tensors(config).items():
            # Every process must take part in the gathering.
            arrays = tensor.file_arrays([_on_host(params, x, tensor.layer) for x in tensor.leaves])
            if not is_writer:
                continue
            num_bytes = sum(x.nbytes for x in (*batch.values(), *arrays))
            if batch and num_bytes > _MAX_FILE_BYTES:
                write()
            batch |= zip(tensor.parts(name), arrays, strict=True)
        if not is_writer:
            return
        write()
        _publish(folder, files)
    finally:
        for i in range(1, len(files) + 1):
            (folder / f"{i}{_UNFINISHED}").unlink(missing_ok=True)
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


def write_file(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write tensors to a file, which is readable as other files of the user are."""
    path.touch()
    mode = path.stat().st_mode
    arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    save_file(arrays, path, metadata={"format": "pt"})
    path.chmod(mode)  # the library makes a new file that only its owner may read


def _on_host(params: Params, name: str, layer: int) -> np.ndarray:
    """Return a leaf, or its row of a layer, gathered from all devices."""
    leaf = params[name] if layer < 0 else params["layers"][name]
    if layer >= 0:
        is_host = isinstance(leaf, np.ndarray)
        leaf = leaf[layer] if is_host else _row(leaf, np.int32(layer))
    if isinstance(leaf, Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


@jax.jit
def _row(leaf: Array, row: Int32[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(leaf, row, keepdims=False)


def _publish(folder: Path, files: Sequence[Mapping[str, int]]) -> None:
    """Rename complete files to their final names and remove those of an earlier save."""
    index, num = folder / _INDEX, len(files)
    names = [f"model-{i:05}-of-{num:05}.safetensors" for i in range(1, num + 1)]
    names = names if num > 1 else [_SINGLE]
    old = set(_read_index(index).values()) if index.is_file() else set()
    # Without an index, several files are no model, so readers never mix old and new files.
    index.unlink(missing_ok=True)
    if num > 1:
        (folder / _SINGLE).unlink(missing_ok=True)
    for i, name in enumerate(names, 1):
        os.replace(folder / f"{i}{_UNFINISHED}", folder / name)
    for name in old.difference(names):
        (folder / name).unlink(missing_ok=True)
    if num > 1:
        weight_map = {x: name for name, file in zip(names, files, strict=True) for x in file}
        total = sum(sum(file.values()) for file in files)
        _write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, contents: Any) -> None:
    unfinished = path.with_name(path.name + _UNFINISHED)
    unfinished.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n")
    os.replace(unfinished, path)
