# SPDX-License-Identifier: Apache-2.0
"""Division of devices among trainer and searchers.

`divide` is the one function that assigns devices. A device is any object with `platform`,
`device_kind`, `process_index` and `id`, and on large TPU v5e slices `coords`. Rules of TPU
compilers, found by compiling with libtpu 0.0.51 and 0.0.52:

- v4 and v5p: a mesh may use some chips of several hosts.
- v5e and v6e: a mesh over several hosts must use whole hosts.
- v5e slices of more than 16 chips: a mesh must use the whole slice, or a rectangle of whole hosts
  without the first host of the slice.

Invariant: the compiler accepts every division (tests/devices/test_placement.py).
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tba_jax.settings import ConfigError

PlacementName = Literal["auto", "shared", "split", "hosts", "fleet"]
PLACEMENTS: dict[PlacementName, str] = {
    "auto": "split if the devices suffice, else shared",
    "shared": "trainer and searchers share devices",
    "split": "separate devices on each host",
    "hosts": "some hosts of a job train and the others search",
    "fleet": "searchers in separate processes on machines that join and leave (section fleet)",
}
"""Value of config.placement -> description in the documentation of the setting."""
_PRODUCT = "mesh.data x mesh.fsdp x mesh.expert x mesh.model"


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
    def num_param_parts(self) -> int:
        """Number of parts into which devices divide the parameters.

        With `data`, devices hold copies. With `expert`, so do they for parameters outside experts.
        """
        return self.size // self.data

    @property
    def size(self) -> int:
        """Number of trainer devices."""
        return self.num_parts * self.model

    def __str__(self) -> str:
        expert = (self.expert,) * (self.expert > 1)
        return " x ".join(map(str, (self.data, self.fsdp, *expert, self.model)))


class Asked(NamedTuple):
    """Devices that a config requests.

    Attributes:
        mesh: shape of the trainer's mesh.
        num_searchers: number of searchers of all processes.
        searcher_devices: number of devices of each searcher.
    """

    mesh: MeshShape
    num_searchers: int
    searcher_devices: int = 1


class Division(NamedTuple):
    """Division of the devices between trainer and searchers.

    Attributes:
        placement: the placement; not auto.
        mesh: shape of the trainer's mesh.
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
    def shares_devices(self) -> bool:
        """Whether searchers use the trainer's devices instead of separate devices."""
        return self.placement == "shared"


def divide(
    placement: str, devices: Sequence[Any], asked: Asked, process_index: int = 0
) -> Division:
    """Divide devices between the trainer and the searchers of one process.

    With several hosts, shared and split divide each host equally; unless the mesh covers them, it
    has a copy of the train state on every host. With fleet, `devices` are those of the trainer.

    Args:
        placement: one of PLACEMENTS.
        devices: devices of all processes of the job.
        process_index: index of the process whose searchers get devices.

    Raises:
        PlacementError: there are too few devices, or the chips do not permit this division.
    """
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    hosts, mesh = hosts_of(devices), asked.mesh
    if len(hosts) > 1 and placement not in ("hosts", "fleet"):
        if mesh.data == 1 and mesh.size % len(hosts):
            mesh = mesh._replace(data=len(hosts))
    options = ("shared", "split") if placement == "auto" else (placement,)
    if placement == "auto" and len(hosts) == 1:
        is_apart = len(devices) >= mesh.size + asked.num_searchers * asked.searcher_devices
        options = ("split",) if is_apart else ("shared",)
    placement, trainer = _trainer(options, devices, mesh)
    if placement == "fleet":
        return Division(placement, mesh, trainer, (), 0, asked.num_searchers)
    searching = left_to_search(devices, trainer) if placement == "hosts" else hosts
    each, num_searchers = asked.searcher_devices, max(1, asked.num_searchers // len(searching))
    if asked.num_searchers > len(searching) and asked.num_searchers % len(searching):
        raise PlacementError(
            f"config.num_searchers = {asked.num_searchers}: cannot be divided evenly over "
            f"{len(searching)} searching hosts. Set --config.num_searchers to a multiple of "
            f"{len(searching)}"
        )
    total = num_searchers * len(searching)
    taken = {d.id for d in trainer}
    groups: dict[int, list[tuple[Any, ...]]] = {}
    for host in searching:
        own = [d for d in devices if d.process_index == host]
        pool = [d for d in own if (d.id in taken) == (placement == "shared")]
        groups[host] = [tuple(pool[i : i + each]) for i in range(0, len(pool) - each + 1, each)]
        is_short = placement == "split" and len(hosts) == 1 and len(groups[host]) < num_searchers
        is_uneven = placement == "shared" and len(pool) % each
        if not groups[host] or is_short or is_uneven:
            left = "shares" if placement == "shared" else "leaves"
            raise PlacementError(
                f"config.placement = {placement!r}: {num_searchers} searchers of {each} devices "
                f"(search.num_devices), and the trainer of {mesh} devices {left} {len(pool)} of "
                f"{len(own)}. Lower num_searchers, search.num_devices or the trainer's mesh, or "
                "set --config.placement=shared"
            )
    own_groups = groups.get(process_index, [])
    return Division(
        placement,
        mesh,
        trainer,
        tuple(own_groups[s % len(own_groups)] for s in range(num_searchers)) if own_groups else (),
        searching.index(process_index) * num_searchers if own_groups else 0,
        total,
    )


def _trainer(
    options: Sequence[str], devices: Sequence[Any], mesh: MeshShape
) -> tuple[str, tuple[Any, ...]]:
    """Return the first of these placements that suits the mesh, and the trainer's devices.

    Raises:
        PlacementError: the mesh does not fit; the message has sizes that fit.
    """
    for placement in options:
        if found := trainer_on(placement, devices, mesh.size):
            if (len(found) // len(hosts_of(found))) % mesh.model:
                raise PlacementError(
                    f"config.mesh.model = {mesh.model}: must divide the trainer devices of each "
                    "process, so that a process has whole rows. Lower mesh.model and raise "
                    "mesh.fsdp"
                )
            return placement, tuple(found)
    sizes = [
        n for n in range(1, len(devices) + 1) if any(trainer_on(p, devices, n) for p in options)
    ]
    others = [
        p
        for p in ("shared", "split", "hosts")
        if p not in options and trainer_on(p, devices, mesh.size)
    ]
    remedies = [f"set the product to one of {sizes}"] if sizes else []
    remedies += [f"set --config.placement={p}" for p in others]
    remedy = ", or ".join(remedies) or "give the run more devices"
    kind = getattr(devices[0], "device_kind", "") or devices[0].platform
    hosts = len(hosts_of(devices))
    raise PlacementError(
        f"config.mesh = {mesh}: {_PRODUCT} = {mesh.size} trainer devices do not fit placement="
        f"{' or '.join(options)} on {hosts} host(s) with {len(devices) // hosts} {kind} devices "
        f"each. {remedy[0].upper()}{remedy[1:]}"
    )


def trainer_on(placement: str, devices: Sequence[Any], n: int) -> list[Any]:
    """Return n devices for a trainer; [] if the placement or the chips do not permit them.

    Args:
        placement: one of PLACEMENTS, not auto.
        devices: devices of all processes, sorted.
    """
    hosts = hosts_of(devices)
    if placement == "hosts":
        found = _on_whole_hosts(devices, n)
        return found if len(found) == n and left_to_search(devices, found) else []
    if len(hosts) == 1:
        return list(devices[:n]) if n <= len(devices) - (placement == "split") else []
    if placement in ("shared", "fleet"):
        return list(devices) if n == len(devices) else []
    if n % len(hosts) or n == len(devices) or not accepts_one_of_each_host(devices):
        return []
    own = ([d for d in devices if d.process_index == host] for host in hosts)
    return [d for host in own for d in host[: n // len(hosts)]]


# Chips of several hosts.


def hosts_of(devices: Sequence[Any]) -> list[int]:
    """Return the sorted process indices of the devices; each host runs one process."""
    return sorted({d.process_index for d in devices})


def accepts_one_of_each_host(devices: Sequence[Any]) -> bool:
    """Return whether some devices of each of several hosts may form a mesh."""
    return not _is_tpu(devices, "lite", "v6", "v5e")


def _is_tpu(devices: Sequence[Any], *kinds: str) -> bool:
    kind = getattr(devices[0], "device_kind", "")
    return devices[0].platform == "tpu" and any(x in kind for x in kinds)


def _is_large_v5e(devices: Sequence[Any]) -> bool:
    return _is_tpu(devices, "v5 lite", "v5e") and len(devices) > 16


def _on_whole_hosts(devices: Sequence[Any], n: int) -> list[Any]:
    """Return n devices that are all devices of some hosts; [] if that is impossible.

    The hosts are the first ones, because searchers with several chips may not use the first chip of
    a slice. On a large v5e slice, the hosts are the last rectangle that is large enough.
    """
    hosts = hosts_of(devices)
    per_host = len(devices) // len(hosts)
    if n % per_host:
        return []
    if not _is_large_v5e(devices):
        return list(devices[:n])
    places = {h: min(d.coords[:2] for d in devices if d.process_index == h) for h in hosts}
    rows = sorted({y for _, y in places.values()})
    columns = sorted({x for x, _ in places.values()})
    for height in range(len(rows), 0, -1):
        width, rest = divmod(n // per_host, height)
        if rest or width > len(columns):
            continue
        corner = set(columns[-width:]), set(rows[-height:])
        chosen = {h for h, (x, y) in places.items() if x in corner[0] and y in corner[1]}
        if hosts[0] not in chosen and chosen:
            return [d for d in devices if d.process_index in chosen]
    return []


def left_to_search(devices: Sequence[Any], trainer: Sequence[Any]) -> list[int]:
    """Return hosts without trainer devices, except the first host of a large v5e slice."""
    taken, hosts = set(hosts_of(trainer)), hosts_of(devices)
    return [h for h in hosts[1 if _is_large_v5e(devices) else 0 :] if h not in taken]
