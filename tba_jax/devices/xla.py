# SPDX-License-Identifier: Apache-2.0
"""XLA compiler options of the train step, by platform.

They are options of the compiled program, not of the process, so that a plan for absent devices
compiles the same program as a run there. (XLA_FLAGS would need to be set on every host before a
backend starts.) Invariant: an unknown option, or a value that the compiler cannot read, gives a
one-line error before compilation.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from tba_jax.devices.config import XlaSettings
from tba_jax.devices.platform import Platform, platform_of
from tba_jax.settings import ConfigError

_GIB = str(2**30)

PRESETS: Mapping[str, Mapping[Platform, Mapping[str, str]]] = {
    "auto": {},  # a run has replaced it before, where another preset is faster
    # Collectives concurrent with products: gathers of the next layer and scatters of the last, in
    # fewer and larger pieces. Latency hiding itself is on by default.
    "overlap": {
        "cuda": {
            "xla_gpu_enable_while_loop_double_buffering": "true",
            "xla_gpu_all_gather_combine_threshold_bytes": _GIB,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": _GIB,
            "xla_gpu_all_reduce_combine_threshold_bytes": _GIB,
        },
        "tpu": {
            "xla_tpu_enable_async_collective_fusion": "true",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
            "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
            "xla_tpu_overlap_compute_collective_tc": "true",
            "xla_enable_async_all_gather": "true",
        },
    },
    # No YNNPACK, which XLA uses on CPU for products of any size.
    "eigen": {"cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}},
}
"""Name in `xla.options` -> platform -> options; other platforms have none."""


def compiler_options(settings: XlaSettings, devices: Sequence[Any]) -> dict[str, str | bool]:
    """Return compiler options for a program on these devices, as `jax.jit` takes them.

    Args:
        settings: presets and options.
        devices: attached devices, or devices of a topology. A process tests the options only if it
            owns one of the devices.

    Raises:
        ConfigError: the compiler has no such option, or cannot read its value.
    """
    given: dict[str, str] = {}
    for part in settings.parts:
        name, is_option, value = part.partition("=")
        if is_option:
            given[name.strip()] = value.strip()
        else:
            given |= PRESETS[part].get(platform_of(devices[0]), {})
    words: dict[str, str | bool] = {"true": True, "false": False}
    found = {name: words.get(value.lower(), value) for name, value in given.items()}
    here = next((d for d in devices if d.process_index == jax.process_index()), None)
    for name, value in found.items() if here is not None else ():
        _check(name, value, here)
    return found


@functools.cache
def _check(name: str, value: str | bool, device: Any) -> None:
    """Refuse an invalid option by compiling a trivial program with it."""
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(x).compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise ConfigError(
            f"config.xla.options='{name}={value}': the XLA compiler for {device.device_kind} "
            f"rejects the option: {reason.rstrip('.')}. Remove the option or correct its value"
        ) from error
