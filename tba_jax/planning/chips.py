# SPDX-License-Identifier: Apache-2.0
"""Chips to plan for: what one has and does, and slices of them that need not be attached.

Peak rates are those of the vendors' pages, given per JAX device (one chip). `hbm_bytes` is what the
compiler lets a program use, as it names it when a program needs more (libtpu 0.0.52): a little less
than the chip has. `ici_bytes_per_s` is half the bidirectional bandwidth that the pages give: what a
chip sends when all its links are busy. The invariant it owns: a rate that nobody published is 0 and
is never used as one.

References:
    cloud.google.com/tpu/docs/v5e, /v5p, /v6e; NVIDIA data sheets of A100, H100 and H200 (SXM, dense
    bfloat16; NVLink one way).
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from tba_jax.planning.environment import NO_TPU

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        name: v5e, H100, ...
        hbm_bytes: memory that programs and their arguments may take.
        flops_per_s: peak of bfloat16 matrix products.
        bytes_per_s: peak of device memory.
        ici_bytes_per_s: sent to other devices, all links together; 0: unknown.
        cores: TensorCores behind one JAX device.
        is_measured: the rates were measured here and are not a data sheet's.
    """

    name: str
    hbm_bytes: float
    flops_per_s: float
    bytes_per_s: float
    ici_bytes_per_s: float
    cores: int = 1
    is_measured: bool = False


TPUS = {
    "v5e": Chip("v5e", 15.75 * _GIB, 197e12, 819e9, 200e9),
    "v5p": Chip("v5p", 95.73 * _GIB, 459e12, 2765e9, 600e9, cores=2),
    "v6e": Chip("v6e", 31.24 * _GIB, 918e12, 1638e9, 400e9),
}
# Part of jax.Device.device_kind -> chip; memory is asked of the device.
GPUS = {
    "H200": Chip("H200", 141e9, 989e12, 4.8e12, 450e9),
    "H100": Chip("H100", 80e9, 989e12, 3.35e12, 450e9),
    "A100": Chip("A100", 80e9, 312e12, 2.04e12, 300e9),
}
_HOST_BOUNDS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}
_WANTED = "wanted CHIP:AxB[xC][@CHIPS_PER_HOST], as v5e:2x4, v5e:2x4@8 or v5p:2x2x4"


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


def parse_topology(text: str) -> Topology:
    """The slice that an argument names.

    Hosts have four chips unless the argument says otherwise: `v5e:2x4` is two hosts of four, and
    `v5e:2x4@8` is one host of eight.

    Raises:
        ValueError: not a slice that can be planned for; says what was wanted.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)(?:@(\d+))?", text)
    if not match:
        raise ValueError(f"--topology={text}: not a slice; {_WANTED}")
    name, shape, per_host = match[1], tuple(map(int, match[2].split("x"))), int(match[3] or 0)
    if name not in TPUS:
        raise ValueError(f"--topology={text}: no chip {name!r}; there are {', '.join(TPUS)}")
    if len(shape) != (3 if name == "v5p" else 2):
        raise ValueError(f"--topology={text}: a {name} slice has another number of axes; {_WANTED}")
    if per_host and per_host not in _HOST_BOUNDS:
        raise ValueError(f"--topology={text}: hosts have 1, 4 or 8 chips, not {per_host}")
    if per_host == 8 and name == "v5p":
        raise ValueError(f"--topology={text}: hosts of v5p have 4 chips")
    return Topology(text, TPUS[name], shape, per_host)


def attached_chip(devices: Sequence[Any]) -> Chip:
    """The chip behind attached devices: GPUs from the table, others measured."""
    device = devices[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    memory = stats.get("bytes_limit", 0) if stats else 0
    for kind, chip in GPUS.items():
        if kind in device.device_kind:
            return dataclasses.replace(chip, hbm_bytes=float(memory or chip.hbm_bytes))
    if not memory:  # the devices of a CPU share the machine's memory
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    from tba_jax.bench import roofline

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
