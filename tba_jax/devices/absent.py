# SPDX-License-Identifier: Apache-2.0
"""Tracing of kernels for a device that is described by a topology but not attached.

Most programs take their target from the shardings of their arguments at compilation. Pallas reads
it when a kernel is traced, from the process's default device. Inside `traced_for`, kernels are
traced for the described device.
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
    """Trace and lower programs in this context for `device`, attached or of a topology."""
    if platform_of(device) != "cuda":  # a TPU's kernels depend on the chip at compilation only
        yield
        return
    described = Mesh(np.array([device]), ("one",)).abstract_mesh.abstract_device
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=described)):
        yield
