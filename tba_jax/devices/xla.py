# SPDX-License-Identifier: Apache-2.0
"""XLA compiler options of the train step.

They are options of the compiled program, not of the process, so that a plan for absent devices
compiles the same program as a run there. (XLA_FLAGS would need to be set on every host before a
backend starts.)
"""

from typing import Any

from tba_jax.devices.platform import platform_of

_WIDE = 512  # hidden size from which Eigen is faster than YNNPACK on CPU (docs/lab/train_step.md)


def step_options(device: Any, hidden_size: int) -> dict[str, str]:
    """Return compiler options for the train step of a model on a kind of device.

    Wide models on CPU have no YNNPACK, which XLA uses there for products of any size.
    """
    if platform_of(device) != "cpu" or hidden_size < _WIDE:
        return {}
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
