# SPDX-License-Identifier: Apache-2.0
"""TCP ports on which processes of this machine listen."""

import contextlib
import ipaddress

import psutil


def listening(pids):
    """HOST:PORT of every listening socket of these processes, and the owner's command line."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # the process has ended
            process = psutil.Process(pid)
            for socket in process.net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    address = f"{socket.laddr.ip}:{socket.laddr.port}"
                    found[address] = " ".join(process.cmdline())
    return found


def beyond_loopback(pids):
    """`listening`, less the sockets that only this machine can reach."""
    found = {}
    for address, name in listening(pids).items():
        host = ipaddress.ip_address(address.rpartition(":")[0])
        if not (getattr(host, "ipv4_mapped", None) or host).is_loopback:
            found[address] = name
    return found
