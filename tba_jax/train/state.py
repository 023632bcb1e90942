# SPDX-License-Identifier: Apache-2.0
"""The train state: what a step reads and writes, how it begins, and where it lies.

It does not know objectives or batches. Its invariant: whatever belongs to a parameter (moments, a
reference) is made and kept where that parameter is, never whole on one device.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from tba_jax.devices.sharding import BATCH_AXES, shardings_like
from tba_jax.devices.site import Site
from tba_jax.flow.batch import OF_GROUPS, Batch, PackedBatch
from tba_jax.models import lora
from tba_jax.models.shardings import ComputeSharding, param_shardings
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.train.heads import LogZHead, init_head

HOST_MEMORY = "pinned_host"
"""Kind of memory of an offloaded optimiser state: that of a host, which devices read and write."""


class TrainState(NamedTuple):
    """Everything a train step reads and writes on the device.

    Attributes:
        step: int32, train steps done, skipped ones included.
        params: what is trained: the parameters of the policy, or its adapters alone.
        opt_state: optax state.
        reference_params: like `params`, of the reference where the trainer scores it, else None.
        skipped_steps: int32, steps whose loss or gradient was not finite; they changed nothing.
        skipped_in_a_row: int32, how many of the last steps were skipped.
        log_z_head: the learned log Z, or what values of states are read with, where there is one;
            trained as part of the policy.
    """

    step: Array
    params: Any
    opt_state: Any
    reference_params: Any
    skipped_steps: Array
    skipped_in_a_row: Array
    log_z_head: LogZHead | None = None


class StepShardings(NamedTuple):
    """Where everything a train step touches lies on the trainer's mesh.

    Attributes:
        state: a NamedSharding for each array of the train state.
        batch: of the rows of a batch.
        groups: of what a batch says of prompts and slots, [p ...].
        replicated: of the metrics.
        compute: how the step computes on the trainer's devices.
        base: of the frozen parameters beside adapters; None where all are trained.
        log_z_size, log_z_layers: as in `init_state`.
        compiler_options: of XLA, for the compiled step.
    """

    state: TrainState
    batch: NamedSharding
    groups: NamedSharding
    replicated: NamedSharding
    compute: ComputeSharding
    base: Any = None
    log_z_size: int = 0
    log_z_layers: int = 1
    compiler_options: Mapping[str, str | bool] = {}

    def of_batch(self, batch: Batch | PackedBatch) -> Any:
        """The sharding of each array of a batch; None where it has none."""
        fields = {
            name: None if x is None else self.groups if name in OF_GROUPS else self.batch
            for name, x in batch._asdict().items()
        }
        return type(batch)(**fields)

    def placed(self, batch: Batch | PackedBatch) -> Batch | PackedBatch:
        """A batch as `of_batch` says, inside a program."""
        return jax.tree.map(jax.lax.with_sharding_constraint, batch, self.of_batch(batch))

    def fetched(self, opt_state: Any) -> Any:
        """The optimiser's state in device memory, where a step can compute with it."""

        def fetch(x: Array, sharding: NamedSharding) -> Array:
            if sharding.memory_kind != HOST_MEMORY:
                return x
            return jax.device_put(x, sharding.with_memory_kind("device"))

        return jax.tree.map(fetch, opt_state, self.state.opt_state)


def step_shardings(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    keep_reference: bool,
    log_z_layers: int = 0,
    offload: bool = False,
    num_prompts: int = 0,
) -> StepShardings:
    """The shardings of a train step: parameters by the table, what belongs to them likewise.

    Args:
        config: the architecture; with adapters, they alone are the state's parameters.
        optimizer: whose state is placed.
        mesh: the trainer's, with the axes `sharding.MESH_AXES`.
        keep_reference: the state holds a reference.
        log_z_layers: of a learned log Z; 0: there is none.
        offload: the optimiser's state lies in pinned host memory between steps.
        num_prompts: p of a batch; what is known of them is divided where the mesh divides them, and
            else every device has it. 0: it does.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    params, shardings, base = abstract_params(config), param_shardings(config, mesh), None
    if config.adapters is not None:
        (_, params), (base, shardings) = lora.split(params), lora.split(shardings)
    shapes = jax.eval_shape(
        functools.partial(
            init_state,
            optimizer=optimizer,
            keep_reference=keep_reference,
            log_z_size=config.hidden_size if log_z_layers else 0,
            log_z_layers=log_z_layers,
        ),
        params,
    )
    state = shardings_like(shapes, params, shardings, mesh)
    if offload:
        # Not counts: a scalar is not worth a transfer, and the partitioner refuses it.
        state = state._replace(
            opt_state=jax.tree.map(
                lambda x, s: s.with_memory_kind(HOST_MEMORY) if x.ndim else s,
                shapes.opt_state,
                state.opt_state,
            )
        )
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    replicated = NamedSharding(mesh, PartitionSpec())
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    return StepShardings(
        state=state,
        batch=rows,
        groups=replicated if num_prompts % parts else rows,
        replicated=replicated,
        compute=ComputeSharding(config, Site(mesh)),
        base=base,
        log_z_size=config.hidden_size if log_z_layers else 0,
        log_z_layers=log_z_layers,
    )


def make_init_state(
    optimizer: optax.GradientTransformation, shardings: StepShardings
) -> Callable[[Any], TrainState]:
    """Jitted `init_state` for parameters that lie as `shardings.state` says; they are donated.

    Moments are made where they belong, never whole on one device.
    """
    return jax.jit(
        functools.partial(
            init_state,
            optimizer=optimizer,
            keep_reference=shardings.state.reference_params is not None,
            log_z_size=shardings.log_z_size,
            log_z_layers=shardings.log_z_layers,
        ),
        donate_argnums=0,
        in_shardings=(shardings.state.params,),
        out_shardings=shardings.state,
    )


def init_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    keep_reference: bool,
    log_z_size: int = 0,
    log_z_layers: int = 1,
) -> TrainState:
    """Fresh state at step 0; the reference, where kept, is a copy of the policy.

    Args:
        params: what is trained.
        optimizer: whose state is made.
        keep_reference: whether the trainer scores the reference.
        log_z_size: hidden size of the model where log Z is learned, else 0.
        log_z_layers: of its head.
    """
    reference = jax.tree.map(jnp.copy, params) if keep_reference else None
    head = init_head(log_z_size, log_z_layers) if log_z_size else None
    opt_state = optimizer.init(trainable(params, head))
    # Three arrays: one could not be donated three times.
    counts = [jnp.int32(0) for _ in range(3)]
    return TrainState(counts[0], params, opt_state, reference, counts[1], counts[2], head)


def trainable(params: Any, head: LogZHead | None) -> Any:
    """What the optimiser moves; without a head the tree is that of the policy."""
    return params if head is None else (params, head)
