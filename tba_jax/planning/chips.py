# SPDX-License-Identifier: Apache-2.0
"""Devices to plan for: TPU slices and GPU hosts that are not attached, and attached devices.

Peak rates come from the vendors' pages, per JAX device, for dense bfloat16. `hbm_bytes` of a TPU is
the limit that the compiler names when a program needs more (libtpu 0.0.52), slightly less than the
chip has. `hbm_bytes` of a GPU is its whole memory; `overheads` lists the memory that programs
cannot use.

XLA's plugin for GPUs takes compiler targets as text and not by name, so the numbers of XLA's own
files are repeated here. The cuDNN version is the oldest that JAX's wheels accept, so that a run can
execute whatever a plan compiles.

References:
    TPUs: cloud.google.com/tpu/docs/v5e, /v5p, /v6e. GPUs: NVIDIA's data sheets of A100 (SXM4, 80
    GB), H100 (SXM5), H200 and HGX B200; targets: github.com/openxla/xla,
    xla/backends/gpu/target_config/specs: a100_sxm_80, h100_sxm, h200, b200.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax.devices.platform import GPU_MEMORY_SHARE
from tba_jax.planning import roofline

_GIB = 2**30
NO_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Variables with which libtpu neither looks for TPUs nor takes one, set before JAX is imported."""
_HOST_BOUNDS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
_MOST_GPUS = 8  # of a host
_WANTED = (
    "expected CHIP:AxB[xC][@CHIPS_PER_HOST], such as v5e:2x4, v5e:2x4@8 or v5p:2x2x4, or "
    "GPU:[HOSTSx]GPUS, such as h100:8 or h100:2x8"
)
# Share of the pool of the JAX allocator that fragmentation makes unusable, a cautious value: blocks
# are multiples of 256 bytes, chosen by best fit. `memory_stats()` of a run has the real share.
_SLACK = 0.02
_OUTSIDE = "outside of JAX's pool: CUDA context, kernels, NCCL buffers, libraries"
_ALLOCATOR = "fragmentation of the allocator"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Memory and peak rates of one device.

    Attributes:
        hbm_bytes: device memory.
        flops_per_s: peak rate of bfloat16 matrix products.
        bytes_per_s: peak rate of device memory.
        is_measured: the rates were measured on this machine, not taken from a data sheet.
        overheads: kind -> bytes that programs and their arguments cannot use.
    """

    name: str
    hbm_bytes: float
    flops_per_s: float
    bytes_per_s: float
    is_measured: bool = False
    overheads: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def usable_bytes(self) -> float:
        """Return the memory available to programs and their arguments."""
        return self.hbm_bytes - sum(self.overheads.values())


TPUS = {
    "v5e": Chip("v5e", 15.75 * _GIB, 197e12, 819e9),
    "v5p": Chip("v5p", 95.73 * _GIB, 459e12, 2765e9),
    "v6e": Chip("v6e", 31.24 * _GIB, 918e12, 1638e9),
}


class Gpu(NamedTuple):
    """One GPU model.

    Attributes:
        kind: `device_kind` of the device in JAX.
        memory_bytes: device memory.
        bytes_per_s: rate of device memory.
        flops_per_s: rate of bfloat16 products.
        capability: compute capability, (major, minor).
        cores, fpus: number of streaming multiprocessors, and of arithmetic units of each.
        shared_memory: bytes for (a block by default, a block at most, all blocks of a core).
        l2_bytes: size of the second-level cache.
        clock_ghz: highest clock rate.
    """

    kind: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    capability: tuple[int, int]
    cores: int
    fpus: int
    shared_memory: tuple[int, int, int]
    l2_bytes: int
    clock_ghz: float

    def chip(self) -> Chip:
        """Return the chip of this GPU, with the memory that programs cannot use."""
        pool = GPU_MEMORY_SHARE * self.memory_bytes
        return Chip(
            self.kind.removeprefix("NVIDIA ").split()[0].split("-")[0],
            float(self.memory_bytes),
            self.flops_per_s,
            self.bytes_per_s,
            overheads={_OUTSIDE: self.memory_bytes - pool, _ALLOCATOR: _SLACK * pool},
        )

    def target(self) -> str:
        """Return XLA's GpuTargetConfigProto as text."""
        block, optin, core = self.shared_memory
        major, minor = self.capability
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


_AMPERE = (64, (49152, 166912, 167936))
_HOPPER = (128, (49152, 232448, 233472))
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 85100068864, 2.03904e12, 312e12,
                (8, 0), 108, *_AMPERE, 41943040, 1.41),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 84942979072, 3.35232e12, 989e12,
                (9, 0), 132, *_HOPPER, 52428800, 1.98),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", 151397597184, 4.8e12, 989e12,
                (9, 0), 132, *_HOPPER, 52428800, 1.98),
    "b200": Gpu("NVIDIA B200", 191514411008, 7.67232e12, 2250e12,
                (10, 0), 148, *_HOPPER, 132644864, 1.965),
}  # fmt: skip
"""Name in --topology -> GPU model."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A TPU slice, or hosts with equal numbers of GPUs.

    Attributes:
        text: text of --topology.
        shape: number of TPU chips along each axis; or (hosts, GPUs of a host).
        chips_per_host: number of TPU chips of one host; 0: the compiler's default (4, fewer in
            smaller slices).
        gpu: GPU model; None: TPUs.
    """

    text: str
    chip: Chip
    shape: tuple[int, ...]
    chips_per_host: int = 0
    gpu: Gpu | None = None

    def devices(self) -> list[Any]:
        """Return the devices to compile for.

        Raises:
            ValueError: the compiler is not installed, or has no slice of this name.
        """
        from jax.experimental import topologies

        shape = "x".join(map(str, self.shape))
        options: dict[str, Any] = {"platform": "tpu", "topology_name": f"{self.chip.name}:{shape}"}
        needs = f"{_WANTED}; libtpu must be installed (pip install libtpu)"
        if self.gpu is not None:
            options = {"platform": "cuda", "topology_name": "", "topology": f"1x{shape}"}
            options["target_config"] = self.gpu.target()
            needs = (
                "it needs JAX's CUDA plugin, which compiles also for GPUs that are not attached. "
                "Install it: pip install 'tba_jax[cuda]' (no GPU or driver is needed)"
            )
        if self.chips_per_host:
            options["chips_per_host_bounds"] = _HOST_BOUNDS[self.chips_per_host]
        for name, value in NO_TPU.items():
            os.environ.setdefault(name, value)
        try:
            return list(topologies.get_topology_desc(**options).devices)
        except Exception as error:
            reason = [*str(error).splitlines(), type(error).__name__][0]
            raise ValueError(f"--topology={self.text}: {reason}; {needs}") from error


def parse_topology(text: str) -> Topology:
    """Return the TPU slice or the GPU hosts of a --topology argument.

    TPU hosts have four chips by default: `v5e:2x4` is two hosts of four chips, and `v5e:2x4@8` is
    one host of eight. `h100:8` is one host of eight GPUs, `h100:2x8` is two such hosts.

    Raises:
        ValueError: the text names no known slice or GPU hosts; the message shows the format.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:@(\d+))?", text)
    if not match:
        raise ValueError(f"--topology={text}: not a slice; {_WANTED}")
    name, shape, per_host = match[1], tuple(map(int, match[2].split("x"))), int(match[3] or 0)
    if name not in TPUS | GPUS:
        known = ", ".join((*TPUS, *GPUS))
        raise ValueError(f"--topology={text}: unknown chip {name!r}; known chips: {known}")
    if name in GPUS:
        hosts, gpus = (1, *shape)[-2:]
        if match[3] or len(shape) > 2 or not hosts or not 0 < gpus <= _MOST_GPUS:
            raise ValueError(
                f"--topology={text}: a host has 1 to {_MOST_GPUS} GPUs; expected {name}:GPUS "
                f"or {name}:HOSTSxGPUS, such as {name}:8 or {name}:2x8"
            )
        return Topology(text, GPUS[name].chip(), (hosts, gpus), gpu=GPUS[name])
    per_hosts = (0, 1, 4) if name == "v5p" else (0, 1, 4, 8)
    if per_host not in per_hosts:
        known = " or ".join(map(str, per_hosts[1:]))
        raise ValueError(f"--topology={text}: {per_host} chips per host; {name} hosts have {known}")
    if len(shape) != (3 if name == "v5p" else 2):
        raise ValueError(f"--topology={text}: wrong number of axes for a {name} slice; {_WANTED}")
    return Topology(text, TPUS[name], shape, per_host)


def memory_bytes(devices: Sequence[Any]) -> float:
    """Return the memory of an attached device; CPU devices share the memory of the machine."""
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)


def attached_chip(devices: Sequence[Any]) -> Chip:
    """Return the chip of attached devices; rates of GPUs from the table, other rates measured."""
    kind, memory, n = devices[0].device_kind, float(memory_bytes(devices)), len(devices)
    for name, gpu in GPUS.items():
        if name.upper() in kind:  # the limit of this process's allocator is the memory
            overheads = {_ALLOCATOR: _SLACK * memory}
            return dataclasses.replace(gpu.chip(), hbm_bytes=memory, overheads=overheads)
    rates = roofline.measure_rates("float32", 2**28)
    return Chip(kind, memory, rates.flops_per_s / n, rates.bytes_per_s / n, is_measured=True)
