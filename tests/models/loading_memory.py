# SPDX-License-Identifier: Apache-2.0
"""Measure the memory that loading a model takes beyond the model: one JSON line. Linux only.

    python loading_memory.py MIB NUM_DEVICES

Writes a Llama of random numbers as five bfloat16 safetensors files of at least MIB together, loads
it onto fake CPU devices and samples the anonymous memory of the process. `peak_bytes` is the peak
less the parameters, with interpreter and compiler; `growth_bytes` leaves out what the process held
before. The loader makes its arrays before it reads, so parameters are live whenever a tensor is.
"""

import ctypes
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.models import model as models
from tba_jax.models.hf import families, safetensors_file
from tba_jax.models.hf.config_json import transformer_config
from tba_jax.models.transformer import Params, TransformerConfig, param_axes

_STATUS = Path("/proc/self/status")
_MIB = 2**20
_PERIOD_S = 0.002


def main(mib: int, num_devices: int) -> None:
    jax.config.update("jax_num_cpu_devices", num_devices)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), mib * _MIB, num_files=5)
        print(json.dumps(measure(Path(folder), num_devices)))


def write_checkpoint(folder: Path, num_bytes: int, num_files: int) -> TransformerConfig:
    """Write a Llama of at least so many bytes, bfloat16, in about so many files."""
    d = 2048 if num_bytes >= 1024 * _MIB else 512
    contents: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": d,
        "num_hidden_layers": 1,
        "num_attention_heads": d // 64,
        "num_key_value_heads": d // 256,
        "intermediate_size": 4 * d,
        "tie_word_embeddings": False,
    }
    one = _sizes(transformer_config(contents))
    of_layer = sum(size for name, size in one.items() if ".layers." in name)
    contents["num_hidden_layers"] = math.ceil((num_bytes - sum(one.values())) / of_layer) + 1
    config = transformer_config(contents)
    (folder / "config.json").write_text(json.dumps(contents))
    sizes = _sizes(config)
    shapes = {name: tensor.shape for name, tensor in families.tensors(config).items()}
    files: list[list[str]] = [[] for _ in range(num_files)]
    before = 0
    for name, size in sizes.items():
        files[before * num_files // sum(sizes.values())].append(name)
        before += size
    dtype = safetensors_file.DTYPES["BF16"]
    rng = np.random.default_rng(0)
    weight_map = {}
    for i, names in enumerate(files):
        path = folder / f"model-{i}.safetensors"
        header = {name: (dtype, shapes[name]) for name in names}
        # The bits of every finite number from 0 up.
        arrays = (rng.integers(0x7F80, size=shapes[n], dtype=np.uint16).view(dtype) for n in names)
        safetensors_file.write(path, header, arrays)
        weight_map |= dict.fromkeys(names, path.name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return config


def measure(folder: Path, num_devices: int) -> dict[str, int]:
    """The figures of one load, by name."""
    model = models.describe(folder)
    config = model.config
    shardings = _shardings(config, num_devices)
    jax.block_until_ready(jax.numpy.zeros(1))  # the backend starts before the count
    # What writing left with the allocator would be used again, and not counted.
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous_bytes()
    with Peak(anonymous_bytes) as peak:
        params = model.load_params(param_dtype="bfloat16", shardings=shardings)
        jax.block_until_ready(params)
    sizes = _sizes(config)
    # What the devices here hold; a leaf that nothing divides lies on each of them.
    params_bytes = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)
    return {
        "num_files": len(list(folder.glob("*.safetensors"))),
        "num_samples": peak.num_samples,
        "checkpoint_bytes": sum(sizes.values()),
        "largest_tensor_bytes": max(sizes.values()),
        "params_bytes": params_bytes,
        "peak_bytes": peak.value - params_bytes,
        "growth_bytes": peak.value - params_bytes - before,
    }


class Peak:
    """The largest value of a function while the context lasts, sampled by a thread."""

    def __init__(self, function: Callable[[], int]):
        """
        Args:
            function: what to sample; called from another thread.
        """
        self.value, self.num_samples = 0, 0
        self._function = function
        self._worker = Worker("peak", self._sample, StopFlag(), idle_s=_PERIOD_S)

    def __enter__(self) -> "Peak":
        self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def _sample(self) -> bool:
        self.value = max(self.value, self._function())
        self.num_samples += 1
        return False  # then it sleeps


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def _sizes(config: TransformerConfig) -> dict[str, int]:
    """Bytes of each tensor in the checkpoint."""
    return {n: 2 * math.prod(tensor.shape) for n, tensor in families.tensors(config).items()}


def _shardings(config: TransformerConfig, num_devices: int) -> Params | None:
    if num_devices == 1:
        return None
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    return jax.tree.map(
        lambda axes: NamedSharding(
            mesh, PartitionSpec(*("fsdp" if name == "embed" else None for name in axes))
        ),
        param_axes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
