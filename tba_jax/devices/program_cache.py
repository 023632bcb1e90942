# SPDX-License-Identifier: Apache-2.0
"""The persistent compilation cache of a process: JAX's cache in the user's cache folder.

Invariants: a folder holds programs for one kind of machine under one version of jax and jaxlib, so
machines that share a home folder never load each other's programs. An unusable cache costs time,
but does not end the run.
"""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import time
from pathlib import Path

import jax

MAX_BYTES = 2**30
"""Maximum size of one machine's folder; JAX evicts the least recently used programs."""

MIN_COMPILE_S = 0.05
"""Minimum compile time of cached programs: to read a faster one from disk would take as long."""

FORGET_S = 60 * 86400
"""Age of the last use after which other machines' folders are deleted."""


def open_cache() -> str:
    """Enable the persistent compilation cache; return a line for the user with its folder.

    A folder in the variable JAX_COMPILATION_CACHE_DIR takes precedence and is used unchanged. Call
    the function before programs are compiled, and after the processes of a pod are connected.

    Returns:
        The line for the user; "" if JAX_ENABLE_COMPILATION_CACHE is off.
    """
    if not jax.config.jax_enable_compilation_cache:
        return ""
    if chosen := jax.config.jax_compilation_cache_dir:
        return f"compiled programs are kept in {chosen} (JAX_COMPILATION_CACHE_DIR)"
    try:
        root = _default_root()
        folder = root / _machine()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"written-by-{platform.node()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
        forget_unused(root, keep=folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return (
            f"compiled programs are not kept: {error}. Set JAX_COMPILATION_CACHE_DIR=DIR to keep "
            "them there"
        )
    # With a size limit JAX also locks the cache, so that no process reads partial writes.
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return f"compiled programs are kept in {folder}"


def _default_root() -> Path:
    """Return the user's cache folder according to the XDG base directory specification."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return home / "tba_jax" / "xla"


def _machine() -> str:
    """Return the name of the folder for this process's devices, processor and versions."""
    kind = jax.local_devices()[0].device_kind
    path = Path("/proc/cpuinfo")
    processor = path.read_text() if path.exists() else platform.processor()
    try:
        num_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        num_cores = os.cpu_count() or 1
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    return machine_key(kind, processor, num_cores, *versions)


def machine_key(
    device_kind: str, processor: str, num_cores: int, jax_version: str, jaxlib_version: str
) -> str:
    """Return a folder name, equal for two machines if programs of one run on the other.

    Args:
        device_kind: name of the device in JAX.
        processor: text of /proc/cpuinfo, or name of the processor. CPU programs use instructions
            of the processor that compiled them.
        num_cores: number of cores of this process, over which CPU programs are divided.
        jax_version, jaxlib_version: versions of JAX and jaxlib.
    """
    told = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    lines = processor.splitlines()
    # Read the first core only: the order of cores may differ between equal machines.
    facts = [next((x for x in lines if x.startswith(name)), "") for name in told]
    facts = facts if any(facts) else [processor]
    digest = hashlib.sha256("\n".join([platform.machine(), str(num_cores), *facts]).encode())
    kind = "".join(c if c.isalnum() else "_" for c in device_kind)
    return f"jax-{jax_version}-jaxlib-{jaxlib_version}-{kind}-{digest.hexdigest()[:12]}"


def forget_unused(root: Path, keep: Path) -> None:
    """Delete local folders of other machines and versions that were unused for `FORGET_S`."""
    for folder in root.glob("jax-*-jaxlib-*"):
        newest = max((x.stat().st_mtime for x in [folder, *folder.iterdir()]), default=0.0)
        if folder != keep and time.time() - newest > FORGET_S:
            shutil.rmtree(folder, ignore_errors=True)
