# SPDX-License-Identifier: Apache-2.0
"""Chips of several hosts that may form a mesh, and hosts that are left over.

Rules of TPU compilers, found by compiling with libtpu 0.0.51 and 0.0.52:

- v4 and v5p: a mesh may use some chips of several hosts.
- v5e and v6e: a mesh over several hosts must use whole hosts.
- v5e slices of more than 16 chips: a mesh must use the whole slice, or a rectangle of whole hosts
  without the first host of the slice.

Other devices have no limits. A device is any object with the attributes that `placement` lists.
Invariant: the compiler accepts the choices made here.
"""

from collections.abc import Sequence
from typing import Any


def hosts_of(devices: Sequence[Any]) -> list[int]:
    """Return the sorted process indices of the devices; each host runs one process."""
    return sorted({d.process_index for d in devices})


def accepts_one_of_each_host(devices: Sequence[Any]) -> bool:
    """Return whether one device of each of several hosts may form a mesh."""
    return not _is_tpu(devices, "lite", "v6", "v5e")


def _is_tpu(devices: Sequence[Any], *kinds: str) -> bool:
    kind = getattr(devices[0], "device_kind", "")
    return devices[0].platform == "tpu" and any(x in kind for x in kinds)


def accepts_shares_of_hosts(devices: Sequence[Any], n: int) -> bool:
    """Return whether a mesh may have n devices, an equal number from each host."""
    return n % len(hosts_of(devices)) == 0 and accepts_one_of_each_host(devices)


def on_whole_hosts(devices: Sequence[Any], n: int) -> list[Any]:
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
    places = {h: min(_place(d) for d in devices if d.process_index == h) for h in hosts}
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
    taken = set(hosts_of(trainer))
    hosts = hosts_of(devices)
    return [h for h in hosts[1 if _is_large_v5e(devices) else 0 :] if h not in taken]


def _is_large_v5e(devices: Sequence[Any]) -> bool:
    return _is_tpu(devices, "v5 lite", "v5e") and len(devices) > 16


def _place(device: Any) -> tuple[int, int]:
    """Return column and row of a chip in its slice."""
    x, y, *_ = device.coords
    return x, y


def share_of_each_host(devices: Sequence[Any], n: int) -> list[Any]:
    """Return n devices: the first n / (number of hosts) devices of each host."""
    hosts = hosts_of(devices)
    own = ([d for d in devices if d.process_index == host] for host in hosts)
    return [d for host in own for d in host[: n // len(hosts)]]
