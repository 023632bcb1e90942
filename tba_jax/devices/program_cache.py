# SPDX-License-Identifier: Apache-2.0
"""The persistent compilation cache of a process: JAX's own, opened in the user's cache folder.

It does not know which programs a run compiles, nor how JAX finds them again. Invariant: a folder
holds programs of one kind of machine under one version of jax and jaxlib, so that a home folder
which several machines share serves none of them a program made for another; and a cache that
cannot be had costs time, never the run.
"""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import time
from pathlib import Path

import jax
from etils import epath

MAX_BYTES = 2**30
"""Of one machine and version; JAX drops what was used longest ago."""

MIN_COMPILE_S = 0.05
"""What compiles faster is not kept: to read it back takes as long."""

FORGET_S = 60 * 86400
"""Folders of other machines and versions go when none of their programs was used for as long."""


def open_cache(setting: str) -> str:
    """Keep compiled programs from now on, and find those that earlier processes kept.

    A cache that the user chose for all of JAX (JAX_COMPILATION_CACHE_DIR) is used as it is. To be
    called before the programs are compiled, after the processes of a pod have met.

    Args:
        setting: "auto": below the user's cache folder; "off"; or a folder, local or of a bucket.

    Returns:
        One line for the user, which says where; "" where programs are not kept on purpose.
    """
    if setting == "off" or not jax.config.jax_enable_compilation_cache:
        return ""
    if chosen := jax.config.jax_compilation_cache_dir:
        return f"compiled programs are kept in {chosen} (JAX_COMPILATION_CACHE_DIR)"
    off = "--config.compilation_cache=off: do not"
    try:
        root = _default_root() if setting == "auto" else _absolute(setting)
        folder = root / _machine()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"written-by-{platform.node()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
        forget_unused(root, keep=folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return (
            f"compiled programs are not kept: {error}. --config.compilation_cache=DIR: keep them "
            f"there; {off} try"
        )
    # With a bound JAX also takes a lock, so that no process reads half of what another writes.
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return f"compiled programs are kept in {folder} ({off})"


def _default_root() -> epath.Path:
    """The user's cache folder, as the XDG base directory specification says."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return epath.Path(home) / "tba_jax" / "xla"


def _absolute(folder: str) -> epath.Path:
    is_local = "://" not in folder
    return epath.Path(os.path.abspath(os.path.expanduser(folder)) if is_local else folder)


def _machine() -> str:
    """Name of the folder for this process's devices, processor and versions."""
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
    """A folder name that two machines share where programs of one run on the other.

    Args:
        device_kind: as JAX names it.
        processor: /proc/cpuinfo, or the name of the processor. Programs for the CPU use the
            instructions of the one they were compiled on.
        num_cores: that this process may use; programs for the CPU are divided among as many.
        jax_version, jaxlib_version: their versions.
    """
    told = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    lines = processor.splitlines()
    # Of the first core: the order in which cores are listed is no property of a machine.
    facts = [next((x for x in lines if x.startswith(name)), "") for name in told]
    facts = facts if any(facts) else [processor]
    digest = hashlib.sha256("\n".join([platform.machine(), str(num_cores), *facts]).encode())
    kind = "".join(c if c.isalnum() else "_" for c in device_kind)
    return f"jax-{jax_version}-jaxlib-{jaxlib_version}-{kind}-{digest.hexdigest()[:12]}"


def forget_unused(root: epath.Path, keep: epath.Path) -> None:
    """Delete local folders of other machines and versions that nobody used for `FORGET_S`."""
    if "://" in os.fspath(root):
        return  # in a bucket, which has rules of its own for that
    for folder in Path(root).glob("jax-*-jaxlib-*"):
        newest = max((x.stat().st_mtime for x in [folder, *folder.iterdir()]), default=0.0)
        if folder != Path(keep) and time.time() - newest > FORGET_S:
            shutil.rmtree(folder, ignore_errors=True)
