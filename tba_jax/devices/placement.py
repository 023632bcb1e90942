# SPDX-License-Identifier: Apache-2.0
"""Which device does what: a record for each value of config.placement, and for each layout.

A `Mode` is a value of config.placement: it checks what a config asks for and chooses a `Layout`,
which says where the trainer lies and whether searchers share its devices. To add either, write its
record here. Devices are anything with `platform`, `device_kind`, `process_index` and `id`: this
module does not know jax, nor what is computed. Invariant: what `Mode.check` accepts, `arrange`
arranges, unless the chips refuse it.
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


class PlacementError(ValueError):
    """Devices cannot be divided as asked; the message says what was wanted and what to do."""


class MeshShape(NamedTuple):
    """Sizes of the trainer's mesh."""

    data: int = 1
    fsdp: int = 1
    model: int = 1

    @property
    def size(self) -> int:
        """Trainer devices."""
        return self.data * self.fsdp * self.model


class Asked(NamedTuple):
    """What a config asks of the devices.

    Attributes:
        mesh: of the trainer.
        num_searchers: of all processes.
        searcher_devices: of each.
        num_prompts: of a batch, 0 where nobody asks whether the mesh divides them.
    """

    mesh: MeshShape
    num_searchers: int
    searcher_devices: int = 1
    num_prompts: int = 0


class Layout(NamedTuple):
    """How trainer and searchers lie on devices.

    Attributes:
        name: of it, in plans.
        takes_turns: searchers have devices of the trainer, in turns with it, instead of others.
        accepts: (devices of all hosts, number of trainer devices) -> whether chips allow it.
        trainer: (devices, number) -> those of the trainer.
        searching: (devices of all hosts, those of the trainer) -> hosts that have searchers; None:
            all of them.
    """

    name: str
    takes_turns: bool
    accepts: Callable[[Sequence[Any], int], bool]
    trainer: Callable[[Sequence[Any], int], list[Any]] = lambda devices, n: list(devices[:n])
    searching: Callable[[Sequence[Any], Sequence[Any]], list[int]] | None = None


class Mode(NamedTuple):
    """A value of config.placement.

    Attributes:
        name: the value.
        meaning: in the documentation of the field.
        choose: (devices, what is asked) -> layout. Raises PlacementError.
        check: (what is asked, devices of a process, processes) -> None; what depends on their
            numbers alone. Raises ConfigError.
        spans_hosts: one run on several processes.
        trainers_search: the processes that train also search; else other processes of the job do.
        searches_elsewhere: searchers are other processes, with devices that are not looked at here;
            what is arranged is the trainer's process, which evaluates.
        mesh: (asked mesh, processes) -> the trainer's.
    """

    name: str
    meaning: str
    choose: Callable[[Sequence[Any], Asked], Layout]
    check: Callable[[Asked, int, int], None]
    spans_hosts: bool = False
    trainers_search: bool = True
    searches_elsewhere: bool = False
    mesh: Callable[[MeshShape, int], MeshShape] = lambda mesh, num_hosts: mesh


class Arrangement(NamedTuple):
    """The decision, without a mesh.

    Attributes:
        layout: how they lie.
        mesh: shape of the trainer's mesh.
        trainer: devices of the trainer, those of one process side by side.
        groups: devices of each searcher of the process asked for; searchers that take turns have
            equal ones.
        first_searcher: index, in the run, of the first of them.
        num_searchers: of the run.
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
        devices: of this process; of all processes where the mode spans hosts.
        asked: what the config asks for.
        process_index: whose searchers.

    Raises:
        PlacementError: there are too few devices, or the chips refuse such a division.
    """
    mode = MODES[placement]
    devices = sorted(devices, key=lambda d: (d.process_index, d.id))
    num_hosts = len(hosts_of(devices)) if mode.spans_hosts else 1
    mesh = mode.mesh(asked.mesh, num_hosts)
    layout = mode.choose(devices, asked._replace(mesh=mesh))
    trainer = layout.trainer(devices, mesh.size)
    if len(trainer) < mesh.size:
        raise PlacementError(
            f"the trainer's mesh wants {mesh.size} devices and there are {len(devices)}; make "
            "mesh.data, mesh.fsdp or mesh.model smaller"
        )
    searching = hosts_of(devices) if mode.spans_hosts else [process_index]
    if layout.searching is not None:
        searching = layout.searching(devices, trainer)
    num_searchers, each = _share_of_searchers(asked, searching), asked.searcher_devices
    own = [d for d in devices if not mode.spans_hosts or d.process_index == process_index]
    own = own if process_index in searching else []
    taken = {d.id for d in trainer}
    pool = [d for d in own if (d.id in taken) == layout.takes_turns]
    groups = [tuple(pool[i : i + each]) for i in range(0, len(pool) - each + 1, each)]
    is_apart = not layout.takes_turns and not mode.spans_hosts
    if is_apart and len(groups) < num_searchers or (pool and not groups):
        name = mode.name if mode.spans_hosts else layout.name
        raise PlacementError(
            f"placement={name} leaves {len(pool)} devices for searchers, and {num_searchers} "
            f"searchers of {each} want {num_searchers * each}; lower num_searchers or "
            "search.num_devices, or make the trainer's mesh smaller"
        )
    chosen = tuple(groups[s % len(groups)] for s in range(num_searchers)) if groups else ()
    first = searching.index(process_index) * num_searchers if chosen else 0
    return Arrangement(layout, mesh, tuple(trainer), chosen, first, num_searchers * len(searching))


def _share_of_searchers(asked: Asked, searching: Sequence[int]) -> int:
    """Searchers of each host that has some."""
    if asked.num_searchers > len(searching) and asked.num_searchers % len(searching):
        raise PlacementError(
            f"num_searchers = {asked.num_searchers}: the {len(searching)} hosts that search have "
            f"equal numbers of searchers; give a multiple of {len(searching)}"
        )
    return max(1, asked.num_searchers // len(searching))


def pod_layout(
    devices: Sequence[Any], num_trainer_devices: int, layouts: Sequence[Layout] = ()
) -> Layout:
    """How a trainer of this size lies in a pod.

    Args:
        devices: of all processes.
        num_trainer_devices: data x fsdp x model.
        layouts: the first of these that the chips accept; none: POD_LAYOUTS.

    Raises:
        PlacementError: the chips refuse every layout, with sizes that they accept.
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
        f"a trainer mesh of {num_trainer_devices} devices cannot lie on {hosts} hosts of "
        f"{len(devices) // hosts} {kind} devices; make mesh.data x mesh.fsdp x mesh.model one of "
        f"{sizes}{other}"
    )


def _accepts_whole_hosts(devices: Sequence[Any], n: int) -> bool:
    trainer = on_whole_hosts(devices, n)
    return len(trainer) == n and bool(left_to_search(devices, trainer))


SHARED = Layout("shared", takes_turns=True, accepts=lambda devices, n: n <= len(devices))
SPLIT = Layout("split", takes_turns=False, accepts=lambda devices, n: n < len(devices))
INTERLEAVED = Layout("interleaved", takes_turns=True, accepts=lambda devices, n: n == len(devices))
PER_HOST = Layout(
    "per_host", takes_turns=False, accepts=accepts_shares_of_hosts, trainer=share_of_each_host
)
WHOLE_HOSTS = Layout(
    "whole_hosts",
    takes_turns=False,
    accepts=_accepts_whole_hosts,
    trainer=on_whole_hosts,
    searching=left_to_search,
)
POD_LAYOUTS = (INTERLEAVED, PER_HOST)  # the first that the chips accept is taken


def _shape(mesh: MeshShape) -> str:
    return " x ".join(map(str, mesh))


def _check_trainer(asked: Asked, num_devices: int) -> None:
    need(
        asked.mesh.size <= num_devices,
        "mesh",
        _shape(asked.mesh),
        f"the trainer's mesh wants {asked.mesh.size} devices, and this process sees {num_devices}",
        "Make mesh.data, mesh.fsdp or mesh.model smaller.",
    )


def _check_shared(asked: Asked, num_devices: int, num_hosts: int) -> None:
    _check_trainer(asked, num_devices)
    trainer, each = asked.mesh.size, asked.searcher_devices
    need(
        trainer % each == 0,
        "search.num_devices",
        each,
        f"searchers that share the trainer's {trainer} devices must divide them",
        f"Set --config.search.num_devices={math.gcd(trainer, each)}, or --config.placement="
        "split where there are devices for both.",
    )


def _check_split(asked: Asked, num_devices: int, num_hosts: int) -> None:
    _check_trainer(asked, num_devices)
    each, left = asked.searcher_devices, num_devices - asked.mesh.size
    need(
        left > 0,
        "mesh",
        _shape(asked.mesh),
        f"placement=split needs a device for searchers, and this process sees {num_devices}",
        ("Make it smaller, or set" if num_devices > 1 else "Set") + " --config.placement=shared.",
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
    """Every host trains: fsdp and model that do not spread over all of the hosts have a copy each.

    That is the default, `mesh.data = 1`.
    """
    is_default = mesh.data == 1 and (mesh.fsdp * mesh.model) % num_hosts
    return mesh._replace(data=num_hosts) if is_default else mesh


def _check_pod(asked: Asked, num_devices: int, num_hosts: int) -> None:
    mesh = _pod_mesh(asked.mesh, num_hosts)
    mine = mesh.size // num_hosts
    need(
        mesh.size % num_hosts == 0 and mine <= num_devices,
        "mesh",
        _shape(mesh),
        f"each of the {num_hosts} processes has an equal share of the trainer's {mesh.size} "
        f"devices, and sees {num_devices}",
        "Make mesh.data x mesh.fsdp x mesh.model a multiple of the processes, and small enough.",
    )
    need(
        mine % mesh.model == 0,
        "mesh.model",
        mesh.model,
        f"the rows of a batch would be divided over processes: each has {mine} trainer devices",
        "Lower mesh.model and raise mesh.fsdp.",
    )
    need(
        asked.num_searchers < num_hosts or asked.num_searchers % num_hosts == 0,
        "num_searchers",
        asked.num_searchers,
        f"the {num_hosts} processes of the pod have equal numbers of searchers, at least one",
        f"Give a multiple of {num_hosts}.",
    )
    left = num_devices - mine or mine
    need(
        asked.searcher_devices <= left,
        "search.num_devices",
        asked.searcher_devices,
        f"each process has {left} devices for searchers",
        "Lower it.",
    )


def _check_whole_hosts(asked: Asked, num_devices: int, num_hosts: int) -> None:
    need(
        num_hosts > 1,
        "placement",
        "whole_hosts",
        "some hosts train and others search, and this run has one process",
        "Start it on several hosts, or set --config.placement=split.",
    )
    need(
        asked.mesh.size % num_devices == 0 and asked.mesh.size < num_devices * num_hosts,
        "mesh",
        _shape(asked.mesh),
        f"the trainer has all {num_devices} devices of some of the {num_hosts} hosts",
        f"Make mesh.data x mesh.fsdp x mesh.model a multiple of {num_devices}, below "
        f"{num_devices * num_hosts}.",
    )
    need(
        asked.searcher_devices <= num_devices,
        "search.num_devices",
        asked.searcher_devices,
        f"each process has {num_devices} devices",
        "Lower it.",
    )


PlacementName = Literal["auto", "shared", "split", "pod", "whole_hosts", "fleet"]

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(
            "auto",
            "split if it fits, else shared",
            lambda devices, asked: SPLIT if _fits_apart(asked, len(devices)) else SHARED,
            _check_auto,
        ),
        Mode(
            "shared", "in turns on the same devices", lambda devices, asked: SHARED, _check_shared
        ),
        Mode("split", "on devices of their own", lambda devices, asked: SPLIT, _check_split),
        Mode(
            "pod",
            "on several hosts, each with searchers of its own",
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
            "searchers in processes of their own, on machines that come and go (section fleet)",
            lambda devices, asked: SHARED,
            _check_shared,
            searches_elsewhere=True,
        ),
    )
}
