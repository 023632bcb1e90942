# SPDX-License-Identifier: Apache-2.0
"""Tracing of kernels for a device that a topology describes but that is not attached.

Most programs are compiled for the devices in the shardings of their arguments. Pallas, when it
traces a kernel, reads the process's default device instead. Inside `traced_for`, kernels are traced
for the described device.
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
    """Trace and lower programs in this context for `device`, which may be absent."""
    if platform_of(device) != "cuda":  # a TPU's kernels depend on the chip at compilation only
        yield
        return
    described = Mesh(np.array([device]), ("one",)).abstract_mesh.abstract_device
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=described)):
        yield
