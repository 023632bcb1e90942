# SPDX-License-Identifier: Apache-2.0
"""How much memory loading a model takes beyond the model, on the CPU.

    JAX_PLATFORMS=cpu python -m tba_jax.bench.load_weights --num_devices=8 --json

Writes a Llama of random numbers as several bfloat16 safetensors files, loads it onto fake devices
and samples the anonymous memory of the process. `peak_bytes` is its peak less the parameters; the
aim is at most 1.5 times the largest tensor and 256 MiB, which also holds the interpreter and the
compiler. `growth_bytes` leaves out what the process held before. The loader makes its arrays
before it reads, so the parameters are live whenever a tensor is; sampling which arrays are live
would miss those that a running program has taken as donations. Linux only.
"""

import argparse
import ctypes
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.bench.load_weights")
    parser.add_argument("--mib", type=int, default=2048, help="least size of the checkpoint")
    parser.add_argument("--num_files", type=int, default=5, help="files it is divided into")
    parser.add_argument("--num_devices", type=int, default=1, help="fake CPU devices")
    parser.add_argument(
        "--shard_axis", default="embed", choices=("embed", "mlp"), help="what they divide"
    )
    parser.add_argument("--param_dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", action="store_true", help="last line of output: a JSON object")
    args = parser.parse_args(argv)
    if not _STATUS.exists() or "RssAnon" not in _STATUS.read_text():
        print(f"error: no RssAnon in {_STATUS}, from which memory is read", file=sys.stderr)
        return 1
    jax.config.update("jax_num_cpu_devices", args.num_devices)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), args.mib * _MIB, args.num_files)
        result = measure(Path(folder), args.num_devices, args.shard_axis, args.param_dtype)
    for key, value in result.items():
        is_size = key.endswith("_bytes")
        print(f"{key:>28}  {f'{value / _MIB:.1f} MiB' if is_size else value}")
    if args.json:
        print(json.dumps(result))
    return 0


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


def measure(folder: Path, num_devices: int, shard_axis: str, param_dtype: str) -> dict[str, Any]:
    """The figures of one load, by name."""
    model = models.describe(folder)
    config = model.config
    shardings = _shardings(config, num_devices, shard_axis)
    jax.block_until_ready(jax.numpy.zeros(1))  # the backend starts before the count
    # What writing left with the allocator would be used again, and not counted.
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous_bytes()
    start = time.perf_counter()
    with Peak(anonymous_bytes) as peak:
        params = model.load_params(param_dtype=param_dtype, shardings=shardings)
        jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    sizes = _sizes(config)
    # What the devices here hold; a leaf that nothing divides lies on each of them.
    params_bytes = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)
    return {
        "num_devices": num_devices,
        "shard_axis": shard_axis if num_devices > 1 else "none",
        "param_dtype": param_dtype,
        "num_files": len(list(folder.glob("*.safetensors"))),
        "num_samples": peak.num_samples,
        "checkpoint_bytes": sum(sizes.values()),
        "largest_tensor_bytes": max(sizes.values()),
        "params_bytes": params_bytes,
        "before_bytes": before,
        "after_bytes": anonymous_bytes() - params_bytes,
        "peak_bytes": peak.value - params_bytes,
        "growth_bytes": peak.value - params_bytes - before,
        "bound_bytes": max(sizes.values()) * 3 // 2 + 256 * _MIB,
        "load_s": seconds,
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


def _shardings(config: TransformerConfig, num_devices: int, axis: str) -> Params | None:
    if num_devices == 1:
        return None
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    return jax.tree.map(
        lambda axes: NamedSharding(
            mesh, PartitionSpec(*("fsdp" if name == axis else None for name in axes))
        ),
        param_axes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


if __name__ == "__main__":
    sys.exit(main())
