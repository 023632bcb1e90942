# SPDX-License-Identifier: Apache-2.0
"""What kind of device a program is made for, as far as it decides how something is computed.

It looks at devices that are given, attached or described, and never at the process's own: a plan
for a GPU is made in a process that has none. It knows no jax.
"""

import os
from typing import Any, Literal

Platform = Literal["any", "cpu", "cuda", "rocm", "tpu"]
"""any: nobody said which; what is computed so runs on all of them."""

GPU_MEMORY_SHARE = 0.92
"""Of a GPU's memory, taken for arrays and programs when a run starts.

JAX's own default is 0.75, for processes that are not alone. The rest is for what does not lie in
this pool: 0.6 GiB of CUDA context and library handles, kernels, and NCCL's buffers (for a group of
devices up to 32 channels of 10 MiB, so 0.3 GiB; a run has three such groups at most).
"""


def take_gpu_memory() -> None:
    """Have JAX take that share, unless the user said how much; before a device is used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))


def platform_of(device: Any) -> Platform:
    """The platform of a device, attached or of a topology.

    Raises:
        ValueError: a device of a kind that nothing here was written for.
    """
    name = device.platform.lower()
    if name == "gpu":  # NVIDIA's and AMD's alike; of a topology the version names the chip
        version = device.client.platform_version.lower()
        name = "rocm" if "rocm" in version or "amd" in version else "cuda"
    if name not in ("cpu", "cuda", "rocm", "tpu"):
        raise ValueError(
            f"a device of platform {device.platform!r}; programs are made for cpu, cuda, rocm and "
            "tpu. Choose one of them with JAX_PLATFORMS"
        )
    return name
