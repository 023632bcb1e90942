# SPDX-License-Identifier: Apache-2.0
"""Division of devices among trainer and searchers, and their meshes.

`divide` is the one function that assigns devices. A device is any object with `platform`,
`device_kind`, `process_index` and `id`, and on large TPU v5e slices `coords`. Rules of TPU
compilers, found by compiling with libtpu 0.0.51 and 0.0.52:

- v4 and v5p: a mesh may use some chips of several hosts.
- v5e and v6e: a mesh over several hosts must use whole hosts.
- v5e slices of more than 16 chips: a mesh must use the whole slice, or a rectangle of whole hosts
  without the first host of the slice.

Invariant: the compiler accepts every division (tests/devices/test_placement.py).
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tba_jax.settings import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

PlacementName = Literal["auto", "shared", "split", "hosts", "fleet"]
PLACEMENTS: dict[PlacementName, str] = {
    "auto": "split if the devices suffice, else shared",
    "shared": "trainer and searchers share devices",
    "split": "separate devices on each host",
    "hosts": "some hosts of a job train and the others search",
    "fleet": "searchers in separate processes on machines that join and leave (section fleet)",
}
"""Value of config.placement -> description in the documentation of the setting."""

MESH_AXES = ("data", "fsdp", "model")
"""Axes of the trainer's mesh (section `mesh`); `expert`, if requested, comes before `model`."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that divide the rows of a batch."""


class PlacementError(ConfigError):
    """Devices cannot be divided as requested; the message has the reason and a remedy."""


class MeshShape(NamedTuple):
    """Sizes of the trainer's mesh."""

    data: int = 1
    fsdp: int = 1
    model: int = 1
    expert: int = 1

    @property
    def num_parts(self) -> int:
        """Number of parts into which the rows of a batch are divided."""
        return self.data * self.fsdp * self.expert

    @property
    def size(self) -> int:
        """Number of trainer devices."""
        return self.num_parts * self.model

    def __str__(self) -> str:
        expert = (self.expert,) * (self.expert > 1)
        return " x ".join(map(str, (self.data, self.fsdp, *expert, self.model)))


def trainer_mesh(devices: Any, shape: MeshShape) -> "Mesh":
    """Return the trainer's mesh over devices of which those of one process are adjacent."""
    from jax.sharding import Mesh

    sizes = {axis: getattr(shape, axis) for axis in (*BATCH_AXES, "model")}
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis in MESH_AXES}
    return Mesh(np.asarray(devices).reshape(*sizes.values()), tuple(sizes))


class Asked(NamedTuple):
    """Devices that a config requests; `num_searchers` counts those of all processes."""

    mesh: MeshShape
    num_searchers: int
    searcher_devices: int = 1


class Division(NamedTuple):
    """Division of the devices between trainer and searchers.

    Attributes:
        placement: the placement; not auto.
        trainer: the trainer's devices; devices of one process are adjacent.
        groups: devices of each searcher of one process; equal for searchers that share devices.
        first_searcher: index of that process's first searcher in the run.
        num_searchers: number of searchers of the run.
    """

    placement: str
    mesh: MeshShape
    trainer: tuple[Any, ...]
    groups: tuple[tuple[Any, ...], ...]
    first_searcher: int
    num_searchers: int

    @property
    def trainer_mesh(self) -> "Mesh":
        """Mesh of the trainer, of the shape `mesh`."""
        return trainer_mesh(self.trainer, self.mesh)

    @property
    def searcher_meshes(self) -> "tuple[Mesh, ...]":
        """Mesh with the axis `model` for each searcher of the process."""
        from jax.sharding import Mesh

        return tuple(Mesh(np.array(group), ("model",)) for group in self.groups)

    @property
    def publication_mesh(self) -> "Mesh":
        """Mesh on which the publish program leaves the weights, with a whole copy on each process.

        Searchers cannot read arrays of other hosts. The copy of a process is divided over as many
        of its devices as the other axes permit.
        """
        local = len(self.trainer) // len(hosts_of(self.trainer))
        sizes = dict[str, int]()
        for axis in ("model", "expert", "fsdp"):
            sizes[axis] = math.gcd(getattr(self.mesh, axis), local)
            local //= sizes[axis]
        data = len(self.trainer) // math.prod(sizes.values())
        return trainer_mesh(self.trainer, MeshShape(data, **sizes))


def divide(
    placement: str, devices: Sequence[Any], asked: Asked, process_index: int = 0
) -> Division:
    """Divide devices between the trainer and the searchers of one process.

    With several hosts, shared and split divide each host equally; unless the mesh covers them, it
    has a copy of the train state on every host. With fleet, `devices` are those of the trainer.

    Args:
        devices: devices of all processes of the job, the same number on each.
        process_index: index of the process whose searchers get devices.

    Raises:
        PlacementError: there are too few devices, or the chips do not permit this division.
    """
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    hosts, mesh, each = hosts_of(devices), asked.mesh, asked.searcher_devices
    if placement not in ("hosts", "fleet") and mesh.data == 1 and mesh.size % len(hosts):
        mesh = mesh._replace(data=len(hosts))
    options = [placement]
    if placement == "auto":
        is_apart = len(devices) >= mesh.size + asked.num_searchers * each
        options = ["shared", "split"] if len(hosts) > 1 else ["split" if is_apart else "shared"]
    placement = next((p for p in options if trainer_on(p, devices, mesh.size)), "")
    if not placement:
        raise _misfit(options, devices, mesh)
    trainer = tuple(trainer_on(placement, devices, mesh.size))
    if (len(trainer) // len(hosts_of(trainer))) % mesh.model:
        raise PlacementError(
            f"config.mesh.model = {mesh.model}: must divide the trainer devices of each process, "
            "so that a process has whole rows. Lower mesh.model and raise mesh.fsdp"
        )
    if placement == "fleet":
        return Division(placement, mesh, trainer, (), 0, asked.num_searchers)
    searching = left_to_search(devices, trainer) if placement == "hosts" else hosts
    num_searchers = max(1, asked.num_searchers // len(searching))
    if asked.num_searchers > len(searching) and asked.num_searchers % len(searching):
        raise PlacementError(
            f"config.num_searchers = {asked.num_searchers}: is not divisible by the number of "
            f"searching hosts. Set --config.num_searchers to a multiple of {len(searching)}"
        )
    searches, taken = process_index in searching, {d.id for d in trainer}
    host = process_index if searches else searching[0]
    own = [d for d in devices if d.process_index == host]
    pool = [d for d in own if (d.id in taken) == (placement == "shared")]
    groups = [tuple(pool[i : i + each]) for i in range(0, len(pool) - each + 1, each)]
    is_short = placement == "split" and len(hosts) == 1 and len(groups) < num_searchers
    if not groups or is_short or (placement == "shared" and len(pool) % each):
        left = "shares" if placement == "shared" else "leaves"
        raise PlacementError(
            f"config.placement = {placement!r}: {num_searchers} searchers of {each} devices "
            f"(search.num_devices), and the trainer of {mesh} devices {left} {len(pool)} of "
            f"{len(own)}. Lower num_searchers, search.num_devices or mesh, or set placement=shared"
        )
    of_searchers = tuple(groups[s % len(groups)] for s in range(num_searchers) if searches)
    first, total = searching.index(host) * num_searchers, num_searchers * len(searching)
    return Division(placement, mesh, trainer, of_searchers, first if searches else 0, total)


def _misfit(options: Sequence[str], devices: Sequence[Any], mesh: MeshShape) -> PlacementError:
    """Return the error for a mesh that no placement suits, with sizes and placements that do."""
    counts = range(1, len(devices) + 1)
    sizes = [n for n in counts if any(trainer_on(p, devices, n) for p in options)]
    others = [p for p in ("hosts", "shared", "split") if trainer_on(p, devices, mesh.size)]
    remedies = [f"Set the product to one of {sizes}"] if sizes else []
    remedies += [f"Set --config.placement={p}" for p in others]
    kind = getattr(devices[0], "device_kind", "") or devices[0].platform
    hosts = len(hosts_of(devices))
    return PlacementError(
        f"config.mesh = {mesh}: mesh.data x mesh.fsdp x mesh.expert x mesh.model = {mesh.size} "
        f"trainer devices do not fit placement={' or '.join(options)} on {hosts} host(s) with "
        f"{len(devices) // hosts} {kind} devices each. "
        f"{'. Or: '.join(remedies) or 'Give the run more devices'}"
    )


def trainer_on(placement: str, devices: Sequence[Any], n: int) -> list[Any]:
    """Return n of the sorted devices for a trainer; [] if placement or chips do not permit them."""
    hosts = hosts_of(devices)
    if placement == "hosts":
        found = _on_whole_hosts(devices, n)
        return found if len(found) == n and left_to_search(devices, found) else []
    if len(hosts) == 1:
        return list(devices[:n]) if n <= len(devices) - (placement == "split") else []
    if placement in ("shared", "fleet"):
        return list(devices) if n == len(devices) else []
    if n % len(hosts) or n == len(devices) or _is_tpu(devices, "lite", "v6", "v5e"):
        return []
    own = ([d for d in devices if d.process_index == host] for host in hosts)
    return [d for host in own for d in host[: n // len(hosts)]]


def hosts_of(devices: Sequence[Any]) -> list[int]:
    """Return the sorted process indices of the devices; each host runs one process."""
    return sorted({d.process_index for d in devices})


def _is_tpu(devices: Sequence[Any], *kinds: str) -> bool:
    kind = getattr(devices[0], "device_kind", "")
    return devices[0].platform == "tpu" and any(x in kind for x in kinds)


def _is_large_v5e(devices: Sequence[Any]) -> bool:
    return _is_tpu(devices, "v5 lite", "v5e") and len(devices) > 16


def _on_whole_hosts(devices: Sequence[Any], n: int) -> list[Any]:
    """Return all devices of the first hosts, or of the last large enough rectangle on large v5e.

    The first hosts train, because searchers with several chips may not use a slice's first chip.
    """
    hosts = hosts_of(devices)
    per_host = len(devices) // len(hosts)
    if n % per_host:
        return []
    if not _is_large_v5e(devices):
        return list(devices[:n])
    corners = {h: min(d.coords[:2] for d in devices if d.process_index == h) for h in hosts}
    columns, rows = (sorted(set(along)) for along in zip(*corners.values(), strict=True))
    for height in range(len(rows), 0, -1):
        width = n // per_host // height
        last = {(x, y) for x in columns[-width:] for y in rows[-height:]}
        chosen = [d for d in devices if corners[d.process_index] in last]
        if len(chosen) == n and devices[0] not in chosen:
            return chosen
    return []


def left_to_search(devices: Sequence[Any], trainer: Sequence[Any]) -> list[int]:
    """Return hosts without trainer devices, except the first host of a large v5e slice."""
    taken, hosts = set(hosts_of(trainer)), hosts_of(devices)
    return [h for h in hosts[1 if _is_large_v5e(devices) else 0 :] if h not in taken]
