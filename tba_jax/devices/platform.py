# SPDX-License-Identifier: Apache-2.0
"""Platform of a device, which selects kernels and compiler options; setup of a process for JAX.

The functions look at a given device, attached or described, never at the process's default device.
A process without a GPU can therefore plan for a GPU.
"""

import ctypes
import glob
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, Literal

Platform = Literal["any", "cpu", "cuda", "rocm", "tpu"]
"""any: unspecified; the program must run on every platform."""

GPU_MEMORY_SHARE = 0.92
"""Share of a GPU's memory that JAX preallocates for arrays and programs.

The rest is for memory outside the pool: 0.6 GiB of CUDA context and library handles, kernels, and
NCCL's buffers (0.3 GiB per group of devices; a run has at most three such groups).
"""
_WIDE = 512  # hidden size from which Eigen is faster than YNNPACK on CPU (docs/lab/train_step.md)


def prepare_process() -> None:
    """Set JAX's environment for a command; call before a device is used.

    Variables that are set already stay unchanged. Where libtpu is installed for plans and no
    accelerator is attached, JAX would load libtpu, which would print that it finds no TPU.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_SHARE))
    accelerators = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia*", "/dev/kfd")
    if not importlib.util.find_spec("libtpu") or any(map(glob.glob, accelerators)):
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax = sys.modules.get("jax")  # JAX reads the variable when it is imported
    if jax is not None and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def open_cache() -> str:
    """Enable JAX's persistent compilation cache; return a line for the user with its folder.

    Call the function before programs are compiled, and after the processes of a job are connected.
    A folder in JAX_COMPILATION_CACHE_DIR takes precedence and is used unchanged. A folder that
    cannot be written does not end the run. The line is "" if JAX_ENABLE_COMPILATION_CACHE is off.
    """
    import jax

    if not jax.config.jax_enable_compilation_cache:
        return ""
    if chosen := jax.config.jax_compilation_cache_dir:
        return f"compiled programs are kept in {chosen} (JAX_COMPILATION_CACHE_DIR)"
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "tba_jax" / "xla"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return (
            f"compiled programs are not kept: {error}. Set JAX_COMPILATION_CACHE_DIR=DIR to keep "
            "them there"
        )
    # With a size limit JAX also locks the cache, so that no process reads partial writes.
    jax.config.update("jax_compilation_cache_max_size", 2**30)
    # To read a program that compiles faster than this would take as long.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return f"compiled programs are kept in {folder}"


def return_free_memory() -> None:
    """Return to the operating system the memory that glibc keeps after threads have freed it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def platform_of(device: Any) -> Platform:
    """Return the platform of a device, which may be attached or described by a topology.

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


def step_options(device: Any, hidden_size: int) -> dict[str, str]:
    """Return XLA's compiler options for the train step of a model on a kind of device.

    Wide models on CPU go without YNNPACK, which XLA uses for products of any size.
    """
    if platform_of(device) != "cpu" or hidden_size < _WIDE:
        return {}
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
