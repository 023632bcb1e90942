# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs to plan for: compiler targets and peak rates.

A target describes a GPU to XLA, as an attached device does. XLA's plugin takes targets as text and
not by name, so the numbers of XLA's own files are repeated here. The cuDNN version is the oldest
that JAX's wheels accept, so that a run can execute whatever a plan compiles.

References:
    Targets: github.com/openxla/xla, xla/backends/gpu/target_config/specs: a100_sxm_80, h100_sxm,
    h200, b200. Rates: NVIDIA's data sheets of A100 (SXM4, 80 GB), H100 (SXM5), H200 and HGX B200,
    dense bfloat16; memory as in the targets.
"""

from typing import NamedTuple

PER_HOST = 8
"""GPUs of the largest host that is planned for (HGX boards)."""

INSTALL = "pip install 'tba_jax[cuda]'"
"""Command that installs the compiler; from a checkout, pip install -e '.[cuda]'."""


class Gpu(NamedTuple):
    """One GPU model.

    Attributes:
        kind: `device_kind` of the device in JAX.
        compute_capability: (major, minor).
        cores: number of streaming multiprocessors.
        fpus: number of arithmetic units of each core.
        shared_memory: bytes for (a block by default, a block at most, all blocks of a core).
        l2_bytes: size of the second-level cache.
        clock_ghz: highest clock rate.
        memory_bytes: device memory.
        bytes_per_s: rate of device memory.
        flops_per_s: rate of bfloat16 products.
    """

    kind: str
    compute_capability: tuple[int, int]
    cores: int
    fpus: int
    shared_memory: tuple[int, int, int]
    l2_bytes: int
    clock_ghz: float
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float

    def target(self) -> str:
        """Return XLA's GpuTargetConfigProto as text."""
        block, optin, core = self.shared_memory
        major, minor = self.compute_capability
        # From Hopper on, compile for exactly this chip, as a run does, so that tensor cores are
        # used.
        extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: {block} shared_memory_per_block_optin: {optin}
          shared_memory_per_core: {core}
          core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock_ghz}
          l2_cache_size: {self.l2_bytes} device_memory_size: {self.memory_bytes}
          memory_bandwidth: {int(self.bytes_per_s)}
          cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
          name: "{self.kind}"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: "{self.kind}"
        """


_HOPPER = (49152, 232448, 233472)

GPUS: dict[str, Gpu] = {
    "a100": Gpu(
        kind="NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        cores=108,
        fpus=64,
        shared_memory=(49152, 166912, 167936),
        l2_bytes=41943040,
        clock_ghz=1.41,
        memory_bytes=85100068864,
        bytes_per_s=2.03904e12,
        flops_per_s=312e12,
    ),
    "h100": Gpu(
        kind="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        cores=132,
        fpus=128,
        shared_memory=_HOPPER,
        l2_bytes=52428800,
        clock_ghz=1.98,
        memory_bytes=84942979072,
        bytes_per_s=3.35232e12,
        flops_per_s=989e12,
    ),
    "h200": Gpu(
        kind="NVIDIA H200 141GB HBM3e",
        compute_capability=(9, 0),
        cores=132,
        fpus=128,
        shared_memory=_HOPPER,
        l2_bytes=52428800,
        clock_ghz=1.98,
        memory_bytes=151397597184,
        bytes_per_s=4.8e12,
        flops_per_s=989e12,
    ),
    "b200": Gpu(
        kind="NVIDIA B200",
        compute_capability=(10, 0),
        cores=148,
        fpus=128,
        shared_memory=_HOPPER,
        l2_bytes=132644864,
        clock_ghz=1.965,
        memory_bytes=191514411008,
        bytes_per_s=7.67232e12,
        flops_per_s=2250e12,
    ),
}
"""Name in --topology -> GPU model."""
