# SPDX-License-Identifier: Apache-2.0
"""Config and policy of a saved run, for commands that only read runs.

These functions do not start, continue or change a run.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.config.command_line import local_folder
from tba_jax.config.schema import Config, defaults, unflatten
from tba_jax.devices.site import reading_mesh
from tba_jax.models import lora
from tba_jax.models.shardings import param_shardings
from tba_jax.models.transformer import TransformerConfig
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.errors import UserError
from tba_jax.run.model_parts import abstract_state, describe_model, policy_config
from tba_jax.run.object_store import storage_of
from tba_jax.run.workdir import saved_config
from tba_jax.weights.folder import WeightFolder
from tba_jax.weights.publication import PublicationError


def load_run_config(workdir: str) -> Config:
    """Return the config of a run.

    Raises:
        UserError: the folder has no run, or a run of another version.
    """
    saved = saved_config(local_folder(workdir))
    known = defaults(str(saved.get("objective.name")))
    lost = sorted(saved.keys() - known.keys())
    if lost:
        raise UserError(
            f"{workdir} was written by another version of tba_jax: this version does not know "
            f"{', '.join(lost)}. Use the version that config.json names"
        )
    return unflatten(saved)


def load_policy(
    workdir: str, published: str = "", note: Callable[[str], None] = print
) -> tuple[int, Any, Any, dict[str, Any], str]:
    """Return the newest saved policy of a run, sharded over the devices of `reading_mesh`.

    Adapters are merged into the parameters that they were trained on, in `model.param_dtype`.

    Args:
        workdir: work directory of the run, which may be running.
        published: "": read the newest checkpoint. Otherwise the number of a published version, or
            "newest" for the newest intact version, in `model.compute_dtype`.
        note: receives a line for each damaged published version.

    Returns:
        Step, model config, params, and config.json and folder of the source model.

    Raises:
        ValueError: the folder has no run, or the adapters were trained on other weights than those
            of model.path. CheckpointError: no checkpoint is readable. PublicationError: the version
            does not exist, or no version is intact.
    """
    config = load_run_config(workdir)
    source = describe_model(config)
    model_config = source.config
    mesh = reading_mesh(model_config.hidden_size, jax.local_devices())
    policy = policy_config(config, model_config)
    state = abstract_state(config, model_config, mesh)
    checkpoints = Checkpoints(storage_of(workdir), read_only=True)
    if published:
        folder = WeightFolder(storage_of(workdir))
        step = newest_intact(folder, note, _version(published))
        dtype = jnp.dtype(config.model.compute_dtype)
        params = folder.load(step, _cast(state.params, dtype, policy))
    else:
        step = checkpoints.newest_required()
        if found := checkpoints.damage(step):
            raise checkpoints.damaged(step, found)
        params = checkpoints.restore(step, state).params
    if policy.adapters is not None:
        base = source.load_params(
            param_dtype=jnp.dtype(config.model.param_dtype),
            shardings=param_shardings(model_config, mesh),
        )
        params = lora.merge(base, params, config=policy)
    return step, model_config, params, source.hf_config, str(source.folder)


def newest_intact(
    folder: WeightFolder, note: Callable[[str], None], wanted: int | None = None
) -> int:
    """Return the newest intact published version, or the wanted one.

    Args:
        note: receives a line for each damaged version.

    Raises:
        PublicationError: no version is intact, or the wanted one is missing or damaged.
    """
    versions = folder.steps()
    if wanted is not None and wanted not in versions:
        raise PublicationError(
            f"{folder.folder} has no published version {wanted}; published versions: "
            f"{versions or 'none'}. Give one of these"
        )
    for version in reversed(versions) if wanted is None else [wanted]:
        if not (found := folder.damage(version)):
            return version
        note(f"published weights {folder.path(version)} are damaged: {found[0]}")
    raise PublicationError(
        f"{folder.folder} has no intact version among {versions if wanted is None else wanted}. "
        "Leave out --published to read the newest checkpoint; only runs with placement=hosts or "
        "placement=fleet publish weights as files"
    )


def _version(published: str) -> int | None:
    """Return the version number in the value of --published; None for the newest version."""
    if published == "newest":
        return None
    if not published.isdecimal():
        raise ValueError(f"--published={published}: wanted newest or the number of a version")
    return int(published)


def _cast(abstract: Any, dtype: jnp.dtype, config: TransformerConfig) -> Any:
    """Return the shapes with the dtypes of published parameters."""

    def leaf(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        own = jnp.float32 if path[-1].key in config.float32_leaves else dtype
        return jax.ShapeDtypeStruct(x.shape, own, sharding=x.sharding)

    return jax.tree_util.tree_map_with_path(leaf, abstract)
