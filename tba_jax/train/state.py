# SPDX-License-Identifier: Apache-2.0
"""The train state: its contents, initialisation and sharding.

Invariant: moments and reference are created and kept with the sharding of their parameters, never
whole on one device.
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

from tba_jax.devices.platform import step_options
from tba_jax.devices.sharding import batch_axes, placed_shapes
from tba_jax.devices.site import Site
from tba_jax.flow.layout import OF_GROUPS, Batch
from tba_jax.models import lora
from tba_jax.models.shardings import ComputeSharding, param_shardings
from tba_jax.models.transformer import TransformerConfig, abstract_params


class Head(NamedTuple):
    """Linear head on the policy's last hidden states, float32: a learned log Z, or state values.

    Log Z(x) is read at the last token of the prompt, so it depends on the prompt alone. Learned, it
    is an alternative to VarGrad for small groups and for groups from several samplers.

    Attributes:
        weight: [d].
        bias: scalar.
    """

    weight: Array
    bias: Array


class TrainState(NamedTuple):
    """Everything a train step reads and writes on the device.

    Attributes:
        step: int32, number of completed train steps, including skipped steps.
        params: trained parameters: those of the policy, or its adapters only.
        opt_state: state of `only_finite(optimizer)`.
        reference_params: parameters of the reference, in the structure of `params`; None if no
            reference is read.
        skipped_steps: int32, number of steps that changed nothing, because loss or gradient was not
            finite.
        skipped_in_a_row: int32, number of skipped steps since the last finite step.
        head: head of a learned log Z or of state values, trained as part of the policy; None
            if the objective has no head.
    """

    step: Array
    params: Any
    opt_state: Any
    reference_params: Any
    skipped_steps: Array
    skipped_in_a_row: Array
    head: Head | None = None


class StepShardings(NamedTuple):
    """Shardings of all inputs and outputs of a train step on the trainer's mesh.

    Attributes:
        state: NamedSharding of each array of the train state.
        abstract: the train state as jax.ShapeDtypeStruct with these shardings.
        batch: sharding of the rows of a batch.
        groups: sharding of a batch's arrays per prompt and per response, [p ...].
        replicated: sharding of the metrics.
        compute: sharding of the computation.
        base: shardings of the frozen parameters under adapters; None if all parameters train.
        compiler_options: XLA options of the compiled step.
    """

    state: TrainState
    abstract: TrainState
    batch: NamedSharding
    groups: NamedSharding
    replicated: NamedSharding
    compute: ComputeSharding
    base: Any = None
    compiler_options: Mapping[str, str] = {}

    def of_batch(self, batch: Batch) -> Any:
        """Return the sharding of each array of a batch; None for absent arrays."""
        # The pass that scores the reference returns it whole, because the host stores it.
        whole = ("num_computed", "missing", "reference")
        where = {name: self.groups if name in OF_GROUPS else self.batch for name in Batch._fields}
        where |= dict.fromkeys(whole, self.replicated)
        arrays = batch._asdict()
        return Batch(**{n: None if x is None else where[n] for n, x in arrays.items()})


def step_shardings(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    keep_reference: bool,
    has_head: bool = False,
    num_prompts: int = 0,
    param_dtype: Any = jnp.float32,
) -> StepShardings:
    """Return the shardings of a train step.

    Args:
        config: architecture; with adapters, the state has only their parameters.
        mesh: the trainer's mesh, with the axes `placement.MESH_AXES`.
        keep_reference, has_head: whether the state holds a reference, and a head.
        num_prompts: p of a batch. Arrays per prompt are sharded if the mesh divides p, else
            replicated; 0: they are replicated.
        param_dtype: dtype of the parameters in `StepShardings.abstract`; adapters are float32.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    params, base = trained_shapes(config, param_dtype), None
    shardings = param_shardings(config, mesh)
    if config.adapters is not None:
        base, shardings = lora.split(shardings)
    head_size = config.hidden_size if has_head else 0
    shapes = jax.eval_shape(
        functools.partial(
            init_state, optimizer=optimizer, keep_reference=keep_reference, head_size=head_size
        ),
        params,
    )
    rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    replicated = NamedSharding(mesh, PartitionSpec())
    parts = math.prod(mesh.shape[axis] for axis in batch_axes(mesh))
    state = jax.tree.map(lambda _: replicated, shapes)
    trained = trainable(params, shapes.head), trainable(shardings, state.head)
    state = state._replace(
        params=shardings,
        reference_params=shardings if keep_reference else None,
        opt_state=optax.tree_map_params(
            only_finite(optimizer),
            sharding_like,
            shapes.opt_state,
            *trained,
            transform_non_params=lambda _: replicated,
        ),
    )
    return StepShardings(
        state=state,
        abstract=placed_shapes(shapes, state),
        batch=rows,
        groups=replicated if num_prompts % parts else rows,
        replicated=replicated,
        compute=ComputeSharding(config, Site(mesh)),
        base=base,
        compiler_options=step_options(mesh.devices.flat[0], config.hidden_size),
    )


def sharding_like(moment: Any, param: Any, where: NamedSharding) -> NamedSharding:
    """Return the sharding of an array of the optimiser that belongs to a parameter at `where`.

    With the shape of the parameter it gets that sharding; with one axis less (the factors of
    Adafactor), the sharding of the remaining axes. All others are replicated.
    """
    shape, spec = param.shape, (*where.spec, *[None] * (param.ndim - len(where.spec)))
    fits = [(shape, spec)]
    fits += [(shape[:i] + shape[i + 1 :], spec[:i] + spec[i + 1 :]) for i in range(len(shape))]
    found = next((own for size, own in fits if size == moment.shape), ())
    return NamedSharding(where.mesh, PartitionSpec(*found))


def trained_shapes(config: TransformerConfig, param_dtype: Any) -> Any:
    """Return shapes and dtypes of the trained parameters: all, or the adapters in float32."""
    has_adapters = config.adapters is not None
    return lora.abstract_adapters(config) if has_adapters else abstract_params(config, param_dtype)


def make_init_state(
    optimizer: optax.GradientTransformation, shardings: StepShardings
) -> Callable[[Any], TrainState]:
    """Return a jitted `init_state` for parameters sharded as `shardings.state`; donates them.

    Moments are created with their sharding, never whole on one device.
    """
    head = shardings.abstract.head
    return jax.jit(
        functools.partial(
            init_state,
            optimizer=optimizer,
            keep_reference=shardings.state.reference_params is not None,
            head_size=0 if head is None else len(head.weight),
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
    head_size: int = 0,
) -> TrainState:
    """Return the state at step 0; the reference, if kept, is a copy of the policy.

    `head_size` is the hidden size of the model if there is a head, else 0.
    """
    reference = jax.tree.map(jnp.copy, params) if keep_reference else None
    # It begins at 0 for every state: log Z while the policy is the reference.
    head = Head(jnp.zeros(head_size, jnp.float32), jnp.float32(0)) if head_size else None
    opt_state = only_finite(optimizer).init(trainable(params, head))
    # Three arrays, because one array cannot be donated three times.
    counts = [jnp.int32(0) for _ in range(3)]
    return TrainState(counts[0], params, opt_state, reference, counts[1], counts[2], head)


def trainable(params: Any, head: Head | None) -> Any:
    """Return the tree that the optimiser updates: the policy, with the head if there is one."""
    return params if head is None else (params, head)


def only_finite(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimiser without the updates of gradients that are nan or infinite."""
    return optax.apply_if_finite(optimizer, max_consecutive_errors=jnp.iinfo(jnp.int32).max)
