# SPDX-License-Identifier: Apache-2.0
"""What a process does before its programs: addresses, platforms, the cache of programs, workers."""

import glob
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tba_jax.devices import cluster
from tba_jax.devices.cluster import Address, Cluster, PeerError, peer_errors, resolve_address
from tba_jax.devices.platform import prepare_process
from tba_jax.devices.worker import StopFlag, Worker, WorkerError


def test_address_comes_from_flags():
    assert resolve_address("b:2", 2, 0) == Address("b:2", 2, 0)
    assert resolve_address(None, None, None) == resolve_address(None, 1, None) == Address()
    assert resolve_address("auto", None, None) == Address("", 0, -1)  # a TPU pod knows by itself
    for flags, message in (
        (("a:1", 2, None), "--process_id=None: .* needs all three"),
        (("a:1", 2, 2), "count from 0"),
        (("a", 2, 0), "must be HOST:PORT"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_address(*flags)


def test_a_port_of_process_0_that_is_taken_or_closed_is_one_clear_error():
    limits = {"heartbeat_s": 10, "shutdown_s": 10, "join_s": 1.0}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        towards = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PeerError, match="Address already in use.*where the port is free"):
            cluster.start(Address(towards, 2, 0), **limits)
    with pytest.raises(PeerError, match=f"at {towards} failed: .*Connection refused.*is free"):
        cluster.start(Address(towards, 2, 1), **limits)


def test_only_the_failure_of_a_collective_is_a_lost_peer():
    pod = Cluster(1, (0, 1))
    lost = "process 1 of 2 lost another.*run the same command again"
    with pytest.raises(PeerError, match=lost), peer_errors(pod):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    with pytest.raises(ValueError, match="of ours"), peer_errors(pod):
        raise ValueError("a mistake of ours")


@pytest.mark.parametrize(("has_files", "expected"), [(False, "cpu"), (True, None)])
def test_libtpu_is_not_loaded_without_an_accelerator(has_files, expected, monkeypatch):
    """Also in a process that has imported JAX before the command begins."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "libtpu")
    monkeypatch.setattr(glob, "glob", lambda pattern: [pattern] if has_files else [])
    config = SimpleNamespace(jax_platforms=None, update=lambda name, x: setattr(config, name, x))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config))
    prepare_process()
    assert os.environ.get("JAX_PLATFORMS") == expected
    assert config.jax_platforms == expected


# Prints where programs are kept, then whether one was compiled or found there.
PROGRAM = """
import jax
from tba_jax.devices.platform import open_cache

print(open_cache())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name.split("/")[-1]))
jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.eye(7))
print("found" if "cache_hits" in found else "compiled")
"""


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_one_compiled(tmp_path):
    def run(home):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            capture_output=True,
            text=True,
            timeout=120,
            env=kept | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    note = f"compiled programs are kept in {tmp_path / 'tba_jax' / 'xla'}"
    assert run(tmp_path) == [note, "compiled"] and run(tmp_path) == [note, "found"]
    (tmp_path / "file").write_text("")
    note, result = run(tmp_path / "file")
    assert result == "compiled"
    assert note.startswith("compiled programs are not kept: [Errno 20] Not a directory: ")


def test_the_first_failure_stops_the_siblings_and_reaches_the_main_thread():
    stop = StopFlag()

    def step() -> bool:
        raise KeyError("lost prompt 17")

    sibling = Worker("sibling", lambda: True, stop).start()
    Worker("searcher-3", step, stop).start()
    assert stop.wait(5.0)
    stop.fail("searcher-1", ValueError("second"))
    with pytest.raises(WorkerError, match="searcher-3 failed: KeyError: 'lost prompt 17'") as info:
        stop.check()
    sibling.join(5.0)
    assert isinstance(info.value.__cause__, KeyError) and info.value.__cause__.__traceback__
    assert not sibling.is_alive()


def test_the_wait_for_a_step_that_hangs_has_an_end():
    stop, release = StopFlag(), threading.Event()
    worker = Worker("stuck", lambda: release.wait(20.0), stop).start()
    stop.set()
    worker.join(0.2)
    assert worker.is_alive()
    release.set()
    worker.join(5.0)
    assert not worker.is_alive()
