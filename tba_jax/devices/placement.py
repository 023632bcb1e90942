# SPDX-License-Identifier: Apache-2.0
"""Division of devices among trainer and searchers: modes and layouts.

A `Mode` is a value of config.placement. It checks the request of a config and chooses a `Layout`,
which selects the trainer's devices and declares whether searchers share them. To add a mode or
layout, add its record here. A device is any object with `platform`, `device_kind`, `process_index`
and `id`.
Invariant: `arrange` accepts a request that `Mode.check` accepts, unless the chips do not permit it.
"""

import math
from collections.abc import Callable, Sequence
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


class Layout(NamedTuple):
    """Rule that assigns devices to trainer and searchers.

    Attributes:
        name: name in plans.
        shares_devices: whether searchers use the trainer's devices instead of separate devices.
        accepts: (devices of all hosts, number of trainer devices) -> whether the chips permit it.
        trainer: (devices of all hosts, number of trainer devices) -> the trainer's devices.
        searching: (devices of all hosts, the trainer's devices) -> hosts with searchers; None:
            every host has searchers.
    """

    name: str
    shares_devices: bool
    accepts: Callable[[Sequence[Any], int], bool]
    trainer: Callable[[Sequence[Any], int], list[Any]] = lambda devices, n: list(devices[:n])
    searching: Callable[[Sequence[Any], Sequence[Any]], list[int]] | None = None


class Mode(NamedTuple):
    """A value of config.placement.

    Attributes:
        name: the value.
        meaning: description in the documentation of the setting.
        choose: (devices, request) -> layout. Raises PlacementError.
        check: (request, devices per process, processes) -> None. Raises ConfigError if these
            numbers do not fit each other.
        spans_hosts: whether the trainer may have several processes, one for each host.
        trainers_search: whether processes that train also search.
        has_remote_searchers: whether searchers are remote processes with their own devices. The
            `Arrangement` then contains the trainer's processes only.
        mesh: (requested mesh, processes) -> the trainer's mesh.
    """

    name: str
    meaning: str
    choose: Callable[[Sequence[Any], Asked], Layout]
    check: Callable[[Asked, int, int], None]
    spans_hosts: bool = False
    trainers_search: bool = True
    has_remote_searchers: bool = False
    mesh: Callable[[MeshShape, int], MeshShape] = lambda mesh, num_hosts: mesh


class Arrangement(NamedTuple):
    """Division of the devices between trainer and searchers.

    Attributes:
        layout: the layout that selected the devices.
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


def arrange(
    placement: str, devices: Sequence[Any], asked: Asked, process_index: int = 0
) -> Arrangement:
    """Divide devices between the trainer and the searchers of one process.

    Args:
        placement: one of MODES.
        devices: devices of this process, or of all processes if the mode spans hosts.
        process_index: index of the process whose searchers get devices.

    Raises:
        PlacementError: there are too few devices, or the chips do not permit this division.
    """
    mode = MODES[placement]
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    num_hosts = len(hosts_of(devices)) if mode.spans_hosts else 1
    mesh = mode.mesh(asked.mesh, num_hosts)
    layout = mode.choose(devices, asked._replace(mesh=mesh))
    trainer = layout.trainer(devices, mesh.size)
    if len(trainer) < mesh.size:
        raise PlacementError(
            f"{_PRODUCT}={mesh.size}: the trainer's mesh needs {mesh.size} devices, got "
            f"{len(devices)}. Lower one of them"
        )
    if mode.has_remote_searchers:
        return Arrangement(layout, mesh, tuple(trainer), (), 0, asked.num_searchers)
    searching = hosts_of(devices) if mode.spans_hosts else [process_index]
    if layout.searching is not None:
        searching = layout.searching(devices, trainer)
    num_searchers, each = _share_of_searchers(asked, searching), asked.searcher_devices
    own = [d for d in devices if not mode.spans_hosts or d.process_index == process_index]
    own = own if process_index in searching else []
    taken = {d.id for d in trainer}
    pool = [d for d in own if (d.id in taken) == layout.shares_devices]
    groups = [tuple(pool[i : i + each]) for i in range(0, len(pool) - each + 1, each)]
    is_apart = not layout.shares_devices and not mode.spans_hosts
    if is_apart and len(groups) < num_searchers or (pool and not groups):
        name = mode.name if mode.spans_hosts else layout.name
        raise PlacementError(
            f"placement={name}: {num_searchers} searchers of {each} devices need "
            f"{num_searchers * each}, and the trainer leaves {len(pool)}. Lower num_searchers, "
            "search.num_devices or the trainer's mesh"
        )
    chosen = tuple(groups[s % len(groups)] for s in range(num_searchers)) if groups else ()
    first = searching.index(process_index) * num_searchers if chosen else 0
    return Arrangement(layout, mesh, tuple(trainer), chosen, first, num_searchers * len(searching))


def _share_of_searchers(asked: Asked, searching: Sequence[int]) -> int:
    """Return the number of searchers on each host that searches."""
    if asked.num_searchers > len(searching) and asked.num_searchers % len(searching):
        raise PlacementError(
            f"num_searchers={asked.num_searchers} cannot be divided evenly over {len(searching)} "
            f"searching hosts. Set --config.num_searchers to a multiple of {len(searching)}"
        )
    return max(1, asked.num_searchers // len(searching))


def pod_layout(
    devices: Sequence[Any], num_trainer_devices: int, layouts: Sequence[Layout] = ()
) -> Layout:
    """Return the layout of a pod for a trainer of this size.

    Args:
        devices: devices of all processes.
        num_trainer_devices: product of the sizes of the trainer's mesh.
        layouts: candidates, of which the first that the chips permit is chosen; (): POD_LAYOUTS.

    Raises:
        PlacementError: the chips permit no layout; the message lists sizes that they permit.
    """
    layouts = layouts or POD_LAYOUTS
    for layout in layouts:
        if layout.accepts(devices, num_trainer_devices):
            return layout
    every = range(1, len(devices) + 1)
    sizes = [n for n in every if any(layout.accepts(devices, n) for layout in layouts)]
    hosts = len(hosts_of(devices))
    kind = getattr(devices[0], "device_kind", "") or devices[0].platform
    other = ""
    if WHOLE_HOSTS not in layouts and WHOLE_HOSTS.accepts(devices, num_trainer_devices):
        other = ", or set --config.placement=whole_hosts"
    raise PlacementError(
        f"{_PRODUCT}={num_trainer_devices}: no layout of a trainer of this size on {hosts} hosts "
        f"with {len(devices) // hosts} {kind} devices each. Set the product to one of "
        f"{sizes}{other}"
    )


def _accepts_whole_hosts(devices: Sequence[Any], n: int) -> bool:
    trainer = on_whole_hosts(devices, n)
    return len(trainer) == n and bool(left_to_search(devices, trainer))


SHARED = Layout("shared", shares_devices=True, accepts=lambda devices, n: n <= len(devices))
SPLIT = Layout("split", shares_devices=False, accepts=lambda devices, n: n < len(devices))
INTERLEAVED = Layout(
    "interleaved", shares_devices=True, accepts=lambda devices, n: n == len(devices)
)
PER_HOST = Layout(
    "per_host", shares_devices=False, accepts=accepts_shares_of_hosts, trainer=share_of_each_host
)
WHOLE_HOSTS = Layout(
    "whole_hosts",
    shares_devices=False,
    accepts=_accepts_whole_hosts,
    trainer=on_whole_hosts,
    searching=left_to_search,
)
TRAINER_ONLY = Layout("fleet", shares_devices=False, accepts=lambda devices, n: n <= len(devices))
POD_LAYOUTS = (INTERLEAVED, PER_HOST)  # in order of preference


def _shape(mesh: MeshShape) -> str:
    expert = (mesh.expert,) * (mesh.expert > 1)
    return " x ".join(map(str, (mesh.data, mesh.fsdp, *expert, mesh.model)))


def _check_trainer(asked: Asked, num_devices: int) -> None:
    need(
        asked.mesh.size <= num_devices,
        "mesh",
        _shape(asked.mesh),
        f"the trainer's mesh needs {asked.mesh.size} devices, and this process sees {num_devices}",
        "Lower mesh.data, mesh.fsdp or mesh.model.",
    )


def _check_shared(asked: Asked, num_devices: int, num_hosts: int) -> None:
    _check_trainer(asked, num_devices)
    trainer, each = asked.mesh.size, asked.searcher_devices
    need(
        trainer % each == 0,
        "search.num_devices",
        each,
        f"must divide the trainer's {trainer} devices, which searchers share",
        f"Set --config.search.num_devices={math.gcd(trainer, each)}, or --config.placement="
        "split if there are devices for both.",
    )


def _check_split(asked: Asked, num_devices: int, num_hosts: int) -> None:
    _check_trainer(asked, num_devices)
    each, left = asked.searcher_devices, num_devices - asked.mesh.size
    need(
        left > 0,
        "mesh",
        _shape(asked.mesh),
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


def _fits_apart(asked: Asked, num_devices: int) -> bool:
    return num_devices >= asked.mesh.size + asked.num_searchers * asked.searcher_devices


def _check_auto(asked: Asked, num_devices: int, num_hosts: int) -> None:
    check = _check_split if _fits_apart(asked, num_devices) else _check_shared
    check(asked, num_devices, num_hosts)


def _pod_mesh(mesh: MeshShape, num_hosts: int) -> MeshShape:
    """Return the mesh over all hosts; by default every host has a copy of the train state.

    The function changes `mesh.data` only if it is 1 and the number of hosts does not divide the
    product of the other axes.
    """
    is_default = mesh.data == 1 and mesh.size % num_hosts
    return mesh._replace(data=num_hosts) if is_default else mesh


def _check_pod(asked: Asked, num_devices: int, num_hosts: int) -> None:
    mesh = _pod_mesh(asked.mesh, num_hosts)
    mine = mesh.size // num_hosts
    need(
        mesh.size % num_hosts == 0 and mine <= num_devices,
        "mesh",
        _shape(mesh),
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
    left = num_devices - mine or mine
    need(
        asked.searcher_devices <= left,
        "search.num_devices",
        asked.searcher_devices,
        f"each process has {left} devices for searchers",
        f"Set --config.search.num_devices={left}.",
    )


def _check_whole_hosts(asked: Asked, num_devices: int, num_hosts: int) -> None:
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
        _shape(asked.mesh),
        f"the trainer must take all {num_devices} devices of some of the {num_hosts} hosts",
        f"Make {_PRODUCT} a multiple of {num_devices}, below {num_devices * num_hosts}.",
    )
    need(
        asked.searcher_devices <= num_devices,
        "search.num_devices",
        asked.searcher_devices,
        f"each process has {num_devices} devices",
        f"Set --config.search.num_devices={num_devices}.",
    )


def _check_fleet(asked: Asked, num_devices: int, num_hosts: int) -> None:
    if num_hosts == 1:
        _check_trainer(asked, num_devices)
        return
    need(
        asked.mesh.size == num_devices * num_hosts,
        "mesh",
        _shape(asked.mesh),
        f"the {num_hosts} processes of the trainer (fleet.trainer_hosts) have {num_devices} "
        "devices each, and the mesh must use all of them",
        f"Make {_PRODUCT} {num_devices * num_hosts}, or change fleet.trainer.",
    )


PlacementName = Literal["auto", "shared", "split", "pod", "whole_hosts", "fleet"]

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            "auto",
            "split if the devices suffice, else shared",
            lambda devices, asked: SPLIT if _fits_apart(asked, len(devices)) else SHARED,
            _check_auto,
        ),
        Mode(
            "shared",
            "trainer and searchers share devices",
            lambda devices, asked: SHARED,
            _check_shared,
        ),
        Mode("split", "separate devices", lambda devices, asked: SPLIT, _check_split),
        Mode(
            "pod",
            "several hosts, each of which trains and searches",
            lambda devices, asked: pod_layout(devices, asked.mesh.size),
            _check_pod,
            spans_hosts=True,
            mesh=_pod_mesh,
        ),
        Mode(
            "whole_hosts",
            "a pod in which some hosts train and the others search",
            lambda devices, asked: pod_layout(devices, asked.mesh.size, [WHOLE_HOSTS]),
            _check_whole_hosts,
            spans_hosts=True,
            trainers_search=False,
        ),
        Mode(
            "fleet",
            "searchers in separate processes on machines that join and leave (section fleet)",
            lambda devices, asked: TRAINER_ONLY,
            _check_fleet,
            trainers_search=False,
            has_remote_searchers=True,
        ),
    )
}
