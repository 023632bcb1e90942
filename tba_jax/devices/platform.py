# SPDX-License-Identifier: Apache-2.0
"""Platform of a device, which selects kernels and compiler options.

The functions look at a given device, attached or described, never at the process's default device:
a process without a GPU can plan for one.
"""

import glob
import importlib.util
import os
from typing import Any, Literal

Platform = Literal["any", "cpu", "cuda", "rocm", "tpu"]
"""any: unspecified; the program must run on every platform."""

GPU_MEMORY_SHARE = 0.92
"""Share of a GPU's memory that JAX preallocates for arrays and programs.

JAX's default is 0.75, for processes that share a GPU. The rest is for memory outside the pool: 0.6
GiB of CUDA context and library handles, kernels, and NCCL's buffers (up to 32 channels of 10 MiB
per group of devices, so 0.3 GiB; a run has at most three such groups).
"""


def take_gpu_memory() -> None:
    """Set the share of GPU memory that JAX preallocates, if unset; call before using a device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))


def ignore_absent_tpu() -> None:
    """Keep libtpu silent on a machine without accelerators; call before using a device.

    If libtpu is installed for plans, JAX would load it, and it would print that it finds no TPU.
    """
    accelerators = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/kfd")
    if importlib.util.find_spec("libtpu") and not any(map(glob.glob, accelerators)):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def platform_of(device: Any) -> Platform:
    """Return the platform of a device, attached or of a topology.

    Raises:
        ValueError: the platform is not supported.
    """
    name = device.platform.lower()
    if name == "gpu":  # both NVIDIA and AMD; a topology's platform version names the chip
        version = device.client.platform_version.lower()
        name = "rocm" if "rocm" in version or "amd" in version else "cuda"
    if name not in ("cpu", "cuda", "rocm", "tpu"):
        raise ValueError(
            f"device platform {device.platform!r} is not supported; wanted cpu, cuda, rocm or "
            "tpu. Choose one with JAX_PLATFORMS"
        )
    return name
