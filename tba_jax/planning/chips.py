# SPDX-License-Identifier: Apache-2.0
"""Devices to plan for: TPU and GPU data sheets, measured devices, and slices that are not attached.

Peak rates come from the vendors' pages, per JAX device. `hbm_bytes` of a TPU is the limit that the
compiler names when a program needs more (libtpu 0.0.52), slightly less than the chip has.
`hbm_bytes` of a GPU is its whole memory; `overheads` lists
the memory that programs cannot use.

References:
    cloud.google.com/tpu/docs/v5e, /v5p, /v6e; GPUs: `gpus`.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.devices.platform import GPU_MEMORY_SHARE
from tba_jax.planning import gpus
from tba_jax.planning.children import NO_TPU

_GIB = 2**30


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
# Share of the pool of the JAX allocator that fragmentation makes unusable, a cautious value: blocks
# are multiples of 256 bytes, chosen by best fit. `memory_stats()` of a run has the real share.
_SLACK = 0.02
_OUTSIDE = "outside of JAX's pool: CUDA context, kernels, NCCL buffers, libraries"
_ALLOCATOR = "fragmentation of the allocator"


def gpu_chip(gpu: gpus.Gpu) -> Chip:
    """Return the chip of a GPU, with the memory that programs cannot use."""
    pool = GPU_MEMORY_SHARE * gpu.memory_bytes
    return Chip(
        gpu.kind.removeprefix("NVIDIA ").split()[0].split("-")[0],
        float(gpu.memory_bytes),
        gpu.flops_per_s,
        gpu.bytes_per_s,
        overheads={_OUTSIDE: gpu.memory_bytes - pool, _ALLOCATOR: _SLACK * pool},
    )


_HOST_BOUNDS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
_WANTED = (
    "expected CHIP:AxB[xC][@CHIPS_PER_HOST], such as v5e:2x4, v5e:2x4@8 or v5p:2x2x4, or "
    "GPU:[HOSTSx]GPUS, such as h100:8 or h100:2x8"
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A TPU slice.

    Attributes:
        text: text of --topology.
        shape: number of chips along each axis.
        chips_per_host: number of chips of one host; 0: the compiler's default (4, fewer in smaller
            slices).
    """

    text: str
    chip: Chip
    shape: tuple[int, ...]
    chips_per_host: int = 0

    def devices(self) -> list[Any]:
        """Return the devices to compile for.

        Raises:
            ValueError: libtpu is not installed, or has no slice of this name.
        """
        from jax.experimental import topologies

        for name, value in NO_TPU.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {}
        if self.chips_per_host:
            options["chips_per_host_bounds"] = _HOST_BOUNDS[self.chips_per_host]
        name = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        try:
            found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"--topology={self.text}: {reason}; {_WANTED}; libtpu must be installed (pip "
                "install libtpu)"
            ) from error
        return list(found.devices)


@dataclasses.dataclass(frozen=True)
class GpuHosts:
    """Hosts with equal numbers of GPUs: NVLink within a host, a network between hosts.

    Attributes:
        text: text of --topology.
        gpu: GPU model of all hosts.
    """

    text: str
    gpu: gpus.Gpu
    hosts: int
    per_host: int

    @property
    def chip(self) -> Chip:
        return gpu_chip(self.gpu)

    def devices(self) -> list[Any]:
        """Return the devices to compile for.

        Raises:
            ValueError: JAX's CUDA plugin is not installed.
        """
        from jax.experimental import topologies

        try:
            found = topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                target_config=self.gpu.target(),
                topology=f"1x{self.hosts}x{self.per_host}",
            )
        except NotImplementedError as error:
            raise ValueError(
                f"--topology={self.text}: needs JAX's CUDA plugin, which compiles also for GPUs "
                f"that are not attached. Install it: {gpus.INSTALL} (no GPU or driver is needed)"
            ) from error
        return list(found.devices)


def parse_topology(text: str) -> Topology | GpuHosts:
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
    if name in gpus.GPUS:
        hosts, per_host = (1, *shape)[-2:]
        if match[3] or len(shape) > 2 or not hosts or not 0 < per_host <= gpus.PER_HOST:
            raise ValueError(
                f"--topology={text}: a host has 1 to {gpus.PER_HOST} GPUs; expected {name}:GPUS "
                f"or {name}:HOSTSxGPUS, such as {name}:8 or {name}:2x8"
            )
        return GpuHosts(text, gpus.GPUS[name], hosts, per_host)
    if name not in TPUS:
        known = ", ".join((*TPUS, *gpus.GPUS))
        raise ValueError(f"--topology={text}: unknown chip {name!r}; known chips: {known}")
    if len(shape) != (3 if name == "v5p" else 2):
        raise ValueError(f"--topology={text}: wrong number of axes for a {name} slice; {_WANTED}")
    if per_host and per_host not in _HOST_BOUNDS:
        raise ValueError(f"--topology={text}: {per_host} chips per host; TPU hosts have 1, 4 or 8")
    if per_host == 8 and name == "v5p":
        raise ValueError(f"--topology={text}: hosts of v5p have 4 chips, not 8")
    return Topology(text, TPUS[name], shape, per_host)


def attached_chip(devices: Sequence[Any]) -> Chip:
    """Return the chip of attached devices; rates of GPUs from the table, other rates measured."""
    device = devices[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = stats.get("bytes_limit", 0) if stats else 0
    for name, gpu in gpus.GPUS.items():
        if name.upper() in device.device_kind:
            chip = gpu_chip(gpu)
            if not memory:
                return chip
            # The limit of this process's allocator replaces the estimated memory.
            overheads = {_ALLOCATOR: _SLACK * memory}
            return dataclasses.replace(chip, hbm_bytes=float(memory), overheads=overheads)
    if not memory:  # All CPU devices share the machine's memory.
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    from tba_jax.planning import roofline

    rates = roofline.measure_rates("float32", 2**28)
    return Chip(
        device.device_kind,
        float(memory),
        rates.flops_per_s / len(devices),
        rates.bytes_per_s / len(devices),
        is_measured=True,
    )
