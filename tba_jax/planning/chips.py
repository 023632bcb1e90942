# SPDX-License-Identifier: Apache-2.0
"""Devices to plan for: what one has and does, and groups of them that need not be attached.

Peak rates are those of the vendors' pages, given per JAX device. Of a TPU `hbm_bytes` is what the
compiler lets a program use, as it names it when a program needs more (libtpu 0.0.52): a little less
than the chip has; `link_bytes_per_s` is half the bidirectional bandwidth that the pages give: what
a chip sends when all its links are busy. Of a GPU `hbm_bytes` is all it has, and `overheads` is
what programs do not get. The invariant it owns: a rate that nobody published is 0 and is never used
as one.

References:
    cloud.google.com/tpu/docs/v5e, /v5p, /v6e; GPUs: `gpus`.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tba_jax.devices.platform import GPU_MEMORY_SHARE
from tba_jax.planning import gpus
from tba_jax.planning.environment import NO_TPU

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        name: v5e, H100, ...
        hbm_bytes: its memory.
        flops_per_s: peak of bfloat16 matrix products.
        bytes_per_s: peak of device memory.
        link_bytes_per_s: sent to devices that fast links reach, all links together; 0: unknown.
        network_bytes_per_s: sent to hosts that they do not reach, all devices sending at once; 0:
            unknown, or links reach every host.
        cores: TensorCores behind one JAX device.
        is_measured: the rates were measured here and are not a data sheet's.
        overheads: memory that is not for programs and their arguments, and why.
    """

    name: str
    hbm_bytes: float
    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float = 0.0
    cores: int = 1
    is_measured: bool = False
    overheads: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def usable_bytes(self) -> float:
        """Memory that programs and their arguments may take."""
        return self.hbm_bytes - sum(self.overheads.values())


TPUS = {
    "v5e": Chip("v5e", 15.75 * _GIB, 197e12, 819e9, 200e9),
    "v5p": Chip("v5p", 95.73 * _GIB, 459e12, 2765e9, 600e9, cores=2),
    "v6e": Chip("v6e", 31.24 * _GIB, 918e12, 1638e9, 400e9),
}
# Of what JAX's allocator has: blocks are cut to 256 bytes and found again by best fit, and what is
# free lies scattered. A guess on the safe side, until `memory_stats()` of a run says better.
_SLACK = 0.02
_OUTSIDE = "outside of JAX's pool: CUDA context, kernels, NCCL's buffers, libraries"
_ALLOCATOR = "slack of the allocator"


def gpu_chip(gpu: gpus.Gpu) -> Chip:
    """Return a GPU with the memory outside the run's pool, and the allocator's loss inside it."""
    pool = GPU_MEMORY_SHARE * gpu.memory_bytes
    return Chip(
        gpu.kind.removeprefix("NVIDIA ").split()[0].split("-")[0],
        float(gpu.memory_bytes),
        gpu.flops_per_s,
        gpu.bytes_per_s,
        gpu.nvlink_bytes_per_s,
        gpu.network_bytes_per_s,
        overheads={_OUTSIDE: gpu.memory_bytes - pool, _ALLOCATOR: _SLACK * pool},
    )


_HOST_BOUNDS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
_WANTED = (
    "wanted CHIP:AxB[xC][@CHIPS_PER_HOST], as v5e:2x4, v5e:2x4@8 or v5p:2x2x4, or "
    "GPU:[HOSTSx]GPUS, as h100:8 or h100:2x8"
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice.

    Attributes:
        text: as given.
        chip: what it is made of.
        shape: chips along each axis.
        chips_per_host: chips of one host; 0: the compiler's own (four, fewer in smaller slices).
    """

    text: str
    chip: Chip
    shape: tuple[int, ...]
    chips_per_host: int = 0

    def devices(self) -> list[Any]:
        """Devices to compile for.

        Raises:
            ValueError: no libtpu, or it has no such slice.
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
                f"--topology={self.text}: {reason}; {_WANTED}, and libtpu (pip install libtpu)"
            ) from error
        return list(found.devices)


@dataclasses.dataclass(frozen=True)
class GpuHosts:
    """Hosts with equal numbers of GPUs: NVLink within one, a network between them.

    Attributes:
        text: as given.
        gpu: what each host has.
        hosts: how many.
        per_host: GPUs of each.
    """

    text: str
    gpu: gpus.Gpu
    hosts: int
    per_host: int

    @property
    def chip(self) -> Chip:
        """One device."""
        return gpu_chip(self.gpu)

    def devices(self) -> list[Any]:
        """Devices to compile for.

        Raises:
            ValueError: no CUDA plugin of JAX is installed.
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
                f"--topology={self.text}: JAX's CUDA plugin compiles for GPUs, attached or not, "
                f"and is not installed here ({gpus.INSTALL}; no GPU or driver is needed)"
            ) from error
        return list(found.devices)


def parse_topology(text: str) -> Topology | GpuHosts:
    """Return the slice or the GPU hosts that an argument names.

    TPU hosts have four chips unless the argument says otherwise: `v5e:2x4` is two hosts of four,
    and `v5e:2x4@8` is one host of eight. `h100:8` is one host of eight GPUs, `h100:2x8` are two.

    Raises:
        ValueError: nothing that can be planned for; says what was wanted.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:@(\d+))?", text)
    if not match:
        raise ValueError(f"--topology={text}: not a slice; {_WANTED}")
    name, shape, per_host = match[1], tuple(map(int, match[2].split("x"))), int(match[3] or 0)
    if name in gpus.GPUS:
        hosts, per_host = (1, *shape)[-2:]
        if match[3] or len(shape) > 2 or not hosts or not 0 < per_host <= gpus.PER_HOST:
            raise ValueError(
                f"--topology={text}: a host has 1 to {gpus.PER_HOST} GPUs; wanted {name}:GPUS or "
                f"{name}:HOSTSxGPUS, as {name}:8 or {name}:2x8"
            )
        return GpuHosts(text, gpus.GPUS[name], hosts, per_host)
    if name not in TPUS:
        known = ", ".join((*TPUS, *gpus.GPUS))
        raise ValueError(f"--topology={text}: no chip {name!r}; there are {known}")
    if len(shape) != (3 if name == "v5p" else 2):
        raise ValueError(f"--topology={text}: a {name} slice has another number of axes; {_WANTED}")
    if per_host and per_host not in _HOST_BOUNDS:
        raise ValueError(f"--topology={text}: hosts have 1, 4 or 8 chips, not {per_host}")
    if per_host == 8 and name == "v5p":
        raise ValueError(f"--topology={text}: hosts of v5p have 4 chips")
    return Topology(text, TPUS[name], shape, per_host)


def attached_chip(devices: Sequence[Any]) -> Chip:
    """Return the chip of attached devices: GPUs from the table, others measured."""
    device = devices[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = stats.get("bytes_limit", 0) if stats else 0
    for name, gpu in gpus.GPUS.items():
        if name.upper() in device.device_kind:
            chip = gpu_chip(gpu)
            if not memory:
                return chip
            # The pool of this very process, as its allocator gives it.
            overheads = {_ALLOCATOR: _SLACK * memory}
            return dataclasses.replace(chip, hbm_bytes=float(memory), overheads=overheads)
    if not memory:  # the devices of a CPU share the machine's memory
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    from tba_jax.planning import roofline

    rates = roofline.measure_rates("float32", 2**28)
    return Chip(
        device.device_kind,
        float(memory),
        rates.flops_per_s / len(devices),
        rates.bytes_per_s / len(devices),
        0.0,
        is_measured=True,
    )


def local_devices() -> list[Any]:
    """Devices of this process."""
    return list(jax.local_devices())
