# SPDX-License-Identifier: Apache-2.0
"""Division of devices among trainer and searchers.

`divide` is the one function that assigns devices; `check` refuses a request by the numbers of
devices and processes alone, before devices are known. To add a placement, add it to MODES, `check`
and `_choose`. A device is any object with `platform`, `device_kind`, `process_index` and `id`.
Invariant: `divide` accepts a request that `check` accepts, unless the chips do not permit it.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tba_jax.devices.slices import (
    accepts_shares_of_hosts,
    hosts_of,
    left_to_search,
    on_whole_hosts,
    share_of_each_host,
)
from tba_jax.settings import need

_PRODUCT = "mesh.data x mesh.fsdp x mesh.expert x mesh.model"


class PlacementError(ValueError):
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
        num_prompts: number of prompts of a batch, which the mesh must divide; 0: no such check.
    """

    mesh: MeshShape
    num_searchers: int
    searcher_devices: int = 1
    num_prompts: int = 0


class Mode(NamedTuple):
    """Properties of a value of config.placement.

    Attributes:
        meaning: description in the documentation of the setting.
        spans_hosts: whether the trainer may have several processes, one for each host.
        trainers_search: whether processes that train also search.
        has_remote_searchers: whether searchers are remote processes with their own devices. A
            `Division` then contains the trainer's processes only.
    """

    meaning: str
    spans_hosts: bool = False
    trainers_search: bool = True
    has_remote_searchers: bool = False


PlacementName = Literal["auto", "shared", "split", "pod", "whole_hosts", "fleet"]

MODES: dict[str, Mode] = {
    "auto": Mode("split if the devices suffice, else shared"),
    "shared": Mode("trainer and searchers share devices"),
    "split": Mode("separate devices"),
    "pod": Mode("several hosts, each of which trains and searches", spans_hosts=True),
    "whole_hosts": Mode(
        "a pod in which some hosts train and the others search",
        spans_hosts=True,
        trainers_search=False,
    ),
    "fleet": Mode(
        "searchers in separate processes on machines that join and leave (section fleet)",
        trainers_search=False,
        has_remote_searchers=True,
    ),
}

Layout = Literal["shared", "split", "interleaved", "per_host", "whole_hosts", "fleet"]
"""Rule that assigns devices: `interleaved` and `per_host` are `shared` and `split` on each host."""
POD_LAYOUTS: tuple[Layout, ...] = ("interleaved", "per_host")
"""Layouts of a pod, in order of preference."""


class Division(NamedTuple):
    """Division of the devices between trainer and searchers.

    Attributes:
        layout: the rule that assigned the devices.
        mesh: shape of the trainer's mesh.
        trainer: the trainer's devices; devices of one process are adjacent.
        groups: devices of each searcher of one process; equal for searchers that share devices.
        first_searcher: index of that process's first searcher in the run.
        num_searchers: number of searchers of the run.
    """

    layout: Layout
    mesh: MeshShape
    trainer: tuple[Any, ...]
    groups: tuple[tuple[Any, ...], ...]
    first_searcher: int
    num_searchers: int

    @property
    def shares_devices(self) -> bool:
        """Whether searchers use the trainer's devices instead of separate devices."""
        return self.layout in ("shared", "interleaved")


def divide(
    placement: str, devices: Sequence[Any], asked: Asked, process_index: int = 0
) -> Division:
    """Divide devices between the trainer and the searchers of one process.

    Args:
        placement: one of MODES.
        devices: devices of this process, or of all processes if the placement spans hosts.
        process_index: index of the process whose searchers get devices.

    Raises:
        PlacementError: there are too few devices, or the chips do not permit this division.
    """
    mode = MODES[placement]
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    hosts = hosts_of(devices) if mode.spans_hosts else [process_index]
    mesh = pod_mesh(asked.mesh, len(hosts)) if placement == "pod" else asked.mesh
    layout, trainer = _choose(placement, devices, asked._replace(mesh=mesh))
    if len(trainer) < mesh.size:
        raise PlacementError(
            f"{_PRODUCT}={mesh.size}: the trainer's mesh needs {mesh.size} devices, got "
            f"{len(devices)}. Lower one of them"
        )
    found = Division(layout, mesh, tuple(trainer), (), 0, asked.num_searchers)
    if mode.has_remote_searchers:
        return found
    searching = left_to_search(devices, trainer) if layout == "whole_hosts" else hosts
    num_searchers, each = _share_of_searchers(asked, searching), asked.searcher_devices
    found = found._replace(num_searchers=num_searchers * len(searching))
    if process_index not in searching:
        return found
    taken = {d.id for d in trainer}
    own = [d for d in devices if not mode.spans_hosts or d.process_index == process_index]
    pool = [d for d in own if (d.id in taken) == found.shares_devices]
    groups = [tuple(pool[i : i + each]) for i in range(0, len(pool) - each + 1, each)]
    is_short = layout == "split" and len(groups) < num_searchers
    if is_short or (pool and not groups):
        raise PlacementError(
            f"placement={placement if mode.spans_hosts else layout}: {num_searchers} searchers of "
            f"{each} devices need {num_searchers * each}, and the trainer leaves {len(pool)}. "
            "Lower num_searchers, search.num_devices or the trainer's mesh"
        )
    if not groups:
        return found
    return found._replace(
        groups=tuple(groups[s % len(groups)] for s in range(num_searchers)),
        first_searcher=searching.index(process_index) * num_searchers,
    )


def _choose(placement: str, devices: Sequence[Any], asked: Asked) -> tuple[Layout, list[Any]]:
    """Return the layout of a placement on these devices, and the trainer's devices."""
    size = asked.mesh.size
    if placement == "auto":
        placement = "split" if _fits_apart(asked, len(devices)) else "shared"
    if placement in ("shared", "split", "fleet"):
        return placement, list(devices[:size])
    layouts = POD_LAYOUTS if placement == "pod" else ("whole_hosts",)
    for layout in layouts:
        if trainer := on_hosts(layout, devices, size):
            return layout, trainer
    every = range(1, len(devices) + 1)
    sizes = [n for n in every if any(on_hosts(layout, devices, n) for layout in layouts)]
    hosts = len(hosts_of(devices))
    kind = getattr(devices[0], "device_kind", "") or devices[0].platform
    other = ""
    if placement == "pod" and on_hosts("whole_hosts", devices, size):
        other = ", or set --config.placement=whole_hosts"
    raise PlacementError(
        f"{_PRODUCT}={size}: no layout of a trainer of this size on {hosts} hosts with "
        f"{len(devices) // hosts} {kind} devices each. Set the product to one of {sizes}{other}"
    )


def on_hosts(layout: Layout, devices: Sequence[Any], n: int) -> list[Any]:
    """Return n devices of several hosts for a trainer; [] if the chips do not permit the layout.

    Args:
        layout: interleaved, per_host or whole_hosts.
        devices: devices of all processes.
    """
    if layout == "interleaved":
        return list(devices) if n == len(devices) else []
    if layout == "per_host":
        return share_of_each_host(devices, n) if accepts_shares_of_hosts(devices, n) else []
    trainer = on_whole_hosts(devices, n)
    return trainer if len(trainer) == n and left_to_search(devices, trainer) else []


def _share_of_searchers(asked: Asked, searching: Sequence[int]) -> int:
    """Return the number of searchers on each host that searches."""
    if asked.num_searchers > len(searching) and asked.num_searchers % len(searching):
        raise PlacementError(
            f"num_searchers={asked.num_searchers} cannot be divided evenly over {len(searching)} "
            f"searching hosts. Set --config.num_searchers to a multiple of {len(searching)}"
        )
    return max(1, asked.num_searchers // len(searching))


def _fits_apart(asked: Asked, num_devices: int) -> bool:
    return num_devices >= asked.mesh.size + asked.num_searchers * asked.searcher_devices


def pod_mesh(mesh: MeshShape, num_hosts: int) -> MeshShape:
    """Return the mesh over all hosts; by default every host has a copy of the train state.

    The function changes `mesh.data` only if it is 1 and the number of hosts does not divide the
    product of the other axes.
    """
    is_default = mesh.data == 1 and mesh.size % num_hosts
    return mesh._replace(data=num_hosts) if is_default else mesh


def check(placement: str, asked: Asked, num_devices: int, num_hosts: int = 1) -> None:
    """Refuse a request that does not fit the numbers of devices and processes.

    Args:
        num_devices: devices of each process.
        num_hosts: processes of the run.

    Raises:
        ConfigError: names the setting, its value and a value that fits.
    """
    if placement == "auto":
        placement = "split" if _fits_apart(asked, num_devices) else "shared"
    if placement in ("shared", "split") or (placement == "fleet" and num_hosts == 1):
        need(
            asked.mesh.size <= num_devices,
            "mesh",
            str(asked.mesh),
            f"the trainer's mesh needs {asked.mesh.size} devices, and this process sees "
            f"{num_devices}",
            "Lower mesh.data, mesh.fsdp or mesh.model.",
        )
    checks = {"shared": _shared, "split": _split, "pod": _pod, "whole_hosts": _whole_hosts}
    checks.get(placement, _fleet)(asked, num_devices, num_hosts)


def _shared(asked: Asked, num_devices: int, num_hosts: int) -> None:
    trainer, each = asked.mesh.size, asked.searcher_devices
    need(
        trainer % each == 0,
        "search.num_devices",
        each,
        f"must divide the trainer's {trainer} devices, which searchers share",
        f"Set --config.search.num_devices={math.gcd(trainer, each)}, or --config.placement="
        "split if there are devices for both.",
    )


def _split(asked: Asked, num_devices: int, num_hosts: int) -> None:
    each, left = asked.searcher_devices, num_devices - asked.mesh.size
    need(
        left > 0,
        "mesh",
        str(asked.mesh),
        f"placement=split needs a device for searchers, and this process sees {num_devices}",
        ("Lower it, or set" if num_devices > 1 else "Set") + " --config.placement=shared.",
    )
    need(
        asked.num_searchers * each <= left,
        "num_searchers",
        asked.num_searchers,
        f"placement=split leaves {left} devices for searchers of {each} each",
        f"Set --config.num_searchers={left // each} or --config.placement=shared."
        if left >= each
        else f"Set --config.search.num_devices={left} or --config.placement=shared.",
    )


def _pod(asked: Asked, num_devices: int, num_hosts: int) -> None:
    mesh = pod_mesh(asked.mesh, num_hosts)
    mine = mesh.size // num_hosts
    need(
        mesh.size % num_hosts == 0 and mine <= num_devices,
        "mesh",
        str(mesh),
        f"each of the {num_hosts} processes needs an equal share of the trainer's "
        f"{asked.mesh.size} devices, and sees {num_devices}",
        f"Make {_PRODUCT} a multiple of {num_hosts}, at most {num_devices * num_hosts}.",
    )
    need(
        mine % mesh.model == 0,
        "mesh.model",
        mesh.model,
        f"must divide the {mine} trainer devices of each process, so that a process has whole rows",
        "Lower mesh.model and raise mesh.fsdp.",
    )
    need(
        asked.num_searchers < num_hosts or asked.num_searchers % num_hosts == 0,
        "num_searchers",
        asked.num_searchers,
        f"the {num_hosts} processes of the pod must have equal numbers of searchers, at least one",
        f"Set --config.num_searchers to a multiple of {num_hosts}.",
    )
    _group(asked, num_devices - mine or mine)


def _whole_hosts(asked: Asked, num_devices: int, num_hosts: int) -> None:
    need(
        num_hosts > 1,
        "placement",
        "whole_hosts",
        "needs several hosts: some train and others search; this run has one process",
        "Start it on several hosts, or set --config.placement=split.",
    )
    need(
        asked.mesh.size % num_devices == 0 and asked.mesh.size < num_devices * num_hosts,
        "mesh",
        str(asked.mesh),
        f"the trainer must take all {num_devices} devices of some of the {num_hosts} hosts",
        f"Make {_PRODUCT} a multiple of {num_devices}, below {num_devices * num_hosts}.",
    )
    _group(asked, num_devices)


def _group(asked: Asked, num_devices: int) -> None:
    need(
        asked.searcher_devices <= num_devices,
        "search.num_devices",
        asked.searcher_devices,
        f"each process has {num_devices} devices for searchers",
        f"Set --config.search.num_devices={num_devices}.",
    )


def _fleet(asked: Asked, num_devices: int, num_hosts: int) -> None:
    need(
        num_hosts == 1 or asked.mesh.size == num_devices * num_hosts,
        "mesh",
        str(asked.mesh),
        f"the {num_hosts} processes of the trainer (fleet.trainer_hosts) have {num_devices} "
        "devices each, and the mesh must use all of them",
        f"Make {_PRODUCT} {num_devices * num_hosts}, or change fleet.trainer.",
    )
