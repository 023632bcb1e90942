# SPDX-License-Identifier: Apache-2.0
"""Config and policy of a saved run, for commands that only read runs.

These functions do not start, continue or change a run.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.config.schema import Config, defaults, unflatten
from tba_jax.devices.platform import open_cache, platform_of
from tba_jax.devices.site import Site, any_device, reading_mesh
from tba_jax.models import lora
from tba_jax.run.checkpoint import open_newest
from tba_jax.run.errors import UserError
from tba_jax.run.model_parts import describe_model, make_step_shardings, policy_config
from tba_jax.run.workdir import run_folder, saved_config


def decoding_site() -> tuple[Site, Any]:
    """Open the program cache; return the first device for decoding, and the dtype for it."""
    open_cache()
    site = any_device(platform_of(jax.local_devices()[0]))
    return site, jnp.float32 if site.platform == "cpu" else jnp.bfloat16


def load_run_config(workdir: str | os.PathLike[str]) -> Config:
    """Return the config of a run.

    Args:
        workdir: work directory of the run: a folder or gs://BUCKET/FOLDER.

    Raises:
        UserError: the folder has no run, or a run of another version.
    """
    saved = saved_config(run_folder(workdir, "--workdir"))
    if lost := sorted(saved.keys() - defaults(str(saved.get("objective.name"))).keys()):
        raise UserError(
            f"{workdir} was written by another version of tba_jax: this version does not know "
            f"{', '.join(lost)}. Use the version that config.json names"
        )
    return unflatten(saved)


def load_policy(workdir: str | os.PathLike[str]) -> tuple[int, Any, Any, dict, str, Any]:
    """Return the policy of the newest checkpoint, sharded over the devices of `reading_mesh`.

    Adapters are merged into the parameters that they were trained on, in `model.param_dtype`.

    Args:
        workdir: work directory of the run, which may be running: a folder or gs://BUCKET/FOLDER.

    Returns:
        Step, model config, params, config.json and folder of the source model; (config, adapters),
        or None without adapters of this source.

    Raises:
        ValueError: the folder has no run, or the adapters were trained on other weights than those
            of model.path. CheckpointError: no checkpoint is readable.
    """
    folder = run_folder(workdir, "--workdir")
    config = load_run_config(folder)
    source = describe_model(config)
    model_config = source.config
    mesh = reading_mesh(model_config.hidden_size, jax.local_devices())
    policy = policy_config(config, model_config)
    checkpoints, step = open_newest(folder)
    params = checkpoints.read(step, make_step_shardings(config, model_config, mesh).abstract).params
    adapters = (policy, params) if policy.adapters and not source.adapters else None
    if policy.adapters is not None:
        base = source.load_on(mesh, jnp.dtype(config.model.param_dtype))
        params = lora.merge(base, params, config=policy)
    return step, model_config, params, source.hf_config, str(source.folder), adapters
