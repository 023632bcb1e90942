# SPDX-License-Identifier: Apache-2.0
"""Tracing for a device that is described and not attached.

Most programs learn what they are made for from the shardings of their arguments, when they are
compiled. Pallas asks when a kernel is traced, and asks the process's default device unless it is
told otherwise. It owns one invariant: inside `traced_for` a kernel is that of the described device.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from tba_jax.devices.platform import platform_of


@contextlib.contextmanager
def traced_for(device: Any) -> Iterator[None]:
    """Lower programs in here for this device, attached or of a topology."""
    if platform_of(device) != "cuda":  # a TPU's kernels depend on the chip at compilation only
        yield
        return
    described = Mesh(np.array([device]), ("one",)).abstract_mesh.abstract_device
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=described)):
        yield
