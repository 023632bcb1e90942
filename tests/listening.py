# SPDX-License-Identifier: Apache-2.0
"""TCP ports on which processes of this machine listen, as Linux lists them."""

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"  # state of a socket in /proc/net/tcp


def listening(pids: Iterable[int]) -> dict[str, str]:
    """HOST:PORT of every listening socket of these processes, and the owner's command line."""
    addresses = _addresses()
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(descriptor)
                inode = target.removeprefix("socket:[").removesuffix("]")
                if target.startswith("socket:[") and inode in addresses:
                    host, port = addresses[inode]
                    found[f"{host}:{port}"] = name
    return found


def beyond_loopback(pids: Iterable[int]) -> dict[str, str]:
    """`listening`, less the sockets that only this machine can reach."""
    return {
        address: name
        for address, name in listening(pids).items()
        if not ipaddress.ip_address(address.rpartition(":")[0]).is_loopback
    }


def _addresses() -> dict[str, tuple[str, int]]:
    """(host, port) of each listening socket, by inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, port = fields[1].split(":")
                # Words of 32 bits in the byte order of the machine: little-endian.
                packed = b"".join(
                    bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)
                )
                found[fields[9]] = _text(packed), int(port, 16)
    return found


def _text(packed: bytes) -> str:
    """An IPv4 address that an IPv6 socket serves is written as IPv4."""
    host = ipaddress.ip_address(packed)
    mapped = getattr(host, "ipv4_mapped", None)
    return str(mapped or host)
