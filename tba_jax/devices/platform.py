# SPDX-License-Identifier: Apache-2.0
"""What kind of device a program is made for, as far as it decides how something is computed.

It looks at devices that are given, attached or described, and never at the process's own: a plan
for a GPU is made in a process that has none. It knows no jax.
"""

from typing import Any, Literal

Platform = Literal["any", "cpu", "cuda", "rocm", "tpu"]
"""any: nobody said which; what is computed so runs on all of them."""


def platform_of(device: Any) -> Platform:
    """The platform of a device, attached or of a topology.

    Raises:
        ValueError: a device of a kind that nothing here was written for.
    """
    name = device.platform.lower()
    if name == "gpu":  # NVIDIA's and AMD's alike; of a topology the version names the chip
        version = device.client.platform_version.lower()
        name = "rocm" if "rocm" in version or "amd" in version else "cuda"
    if name not in ("cpu", "cuda", "rocm", "tpu"):
        raise ValueError(
            f"a device of platform {device.platform!r}; programs are made for cpu, cuda, rocm and "
            "tpu. Choose one of them with JAX_PLATFORMS"
        )
    return name
