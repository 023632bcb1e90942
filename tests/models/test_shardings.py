# SPDX-License-Identifier: Apache-2.0
"""Programs on every mesh equal those of one device, and gather no more than they should.

Contract: the train step in each layout, with prompts that do not divide over the devices; the
reference pass; log-probs and gradients of each kind of layer. Weights travel by layer over fsdp and
never over model; rows stay where they are; the state is donated, and restored on any mesh.
"""

import functools
import itertools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import (
    DIVISIBLE,
    REMAT,
    changed,
    collectives,
    lay_out,
    make_draws,
    make_mesh,
    placed,
    sharded,
    slow,
)
from fake_models import KINDS, TINY_LOGIT, logprob_bound, random_params, tiny_config
from jax.sharding import PartitionSpec as P

from tba_jax.devices.placement import MeshShape, trainer_mesh
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.models.logprobs import Scoring, packed_token_logprobs
from tba_jax.models.shardings import ComputeSharding, param_shardings
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.objectives import make_objective
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import step_shardings
from tba_jax.train.step import make_reference_pass

# Prompts, a number that divides over no mesh, as the paper's GSM8K has; K = 4.
NUM = 7
LEARNED = replace(REMAT, objective=make_objective("tb", {"scale": "paper", "log_z": "learned"}))
PACKED, SHARED = {"row_length": 18}, {"shares_prompts": True}


@functools.cache
def draws(seed):
    return make_draws(p=NUM, seed=seed)


@functools.cache
def compiled(shape, settings, options):
    """(program of the step, its text, initial state, shardings, two batches) on a mesh."""
    options, parts = dict(options), shape[0] * shape[1]
    options |= {"row_multiple": parts} if parts > 1 else {}
    own = {name: options[name] for name in options if hasattr(settings, name)}
    shardings, state, step = sharded(shape, replace(settings, **own), num_prompts=NUM)
    batches = [placed(lay_out(draws(seed), **options), shardings) for seed in (0, 1)]
    program = step.lower(state, batches[0]).compile()
    return program, program.as_text(), state, shardings, batches


def after_two_steps(shape, settings=REMAT, **options):
    """(state, numbers of the last step)."""
    program, _, state, _, batches = compiled(shape, settings, tuple(options.items()))
    state = jax.tree.map(jnp.copy, state)  # which is donated
    for batch in batches:
        state, outputs = program(state, batch)
    return state, jax.device_get(outputs["numbers"])


def shapes_of(*sizes):
    return [s for s in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(s) in sizes]


MICRO = {"micro_batch_rows": 4, "is_whole": True}
CASES = [
    ((2, 2, 2), REMAT, {}),
    slow((1, 4, 2), REMAT, {**PACKED, **SHARED}),
    # Packed rows; below groups, one group over both parts of the batch, and parts of groups.
    ((1, 2, 2), REMAT, {**PACKED, **MICRO}),
    slow((1, 2, 2), REMAT, {**MICRO, "micro_batch_rows": 8}),
    slow((1, 2, 2), REMAT, {**PACKED, "micro_batch_rows": 2}),
    slow((1, 8, 1), REMAT, SHARED),
    slow((1, 4, 1), LEARNED, {}),
    *(slow(shape, REMAT, {}) for shape in shapes_of(2, 4, 8) if shape != (2, 2, 2)),
]


@pytest.mark.parametrize(("shape", "settings", "options"), CASES)
def test_the_step_on_every_mesh_equals_that_of_one_device(shape, settings, options):
    """Rows are filled up where they do not divide, and groups are known everywhere."""
    state, numbers = after_two_steps(shape, settings, **options)
    wanted, wanted_numbers = after_two_steps((1, 1, 1), settings)
    chex.assert_trees_all_close(
        # Float32 sums in another order; two steps at rate 0.1 move weights of 0.3 by up to 0.5.
        *(jax.device_get((x.params, x.opt_state, x.head)) for x in (state, wanted)),
        rtol=1e-4,
        atol=2e-6,
    )
    chex.assert_trees_all_close(numbers, wanted_numbers, rtol=1e-4, atol=1e-4)
    _, text, _, shardings, (batch, _) = compiled(shape, settings, tuple(options.items()))
    assert jax.tree.map(lambda x: x.sharding, state) == shardings.state
    assert batch.tokens.shape[0] % (shape[0] * shape[1]) == 0
    assert batch.rewards.sharding.is_fully_replicated
    assert batch.tokens.sharding.is_fully_replicated == (shape[0] * shape[1] == 1)
    up = state.params["layers"]["up"]
    traces = [x for x in jax.tree.leaves(state.opt_state) if x.shape == up.shape]
    shards = {x.data.size for trace in traces for x in trace.addressable_shards}
    assert shards == {up.size // (shape[1] * shape[2])}
    # Rows stay where they are: activations of this length and width are summed over model only.
    moved = [found for op, found in collectives(text) if op != "all-reduce"]
    assert not any(batch.tokens.shape[-1] in x and DIVISIBLE.hidden_size in x for x in moved)


def test_weights_are_gathered_by_layer_over_fsdp_and_never_over_model():
    text = compiled((2, 2, 2), REMAT, ())[1]
    d, f, v = DIVISIBLE.hidden_size, DIVISIBLE.mlp_size, DIVISIBLE.vocab_size
    gathered = [shape for op, shape in collectives(text) if op == "all-gather"]
    # One layer at a time, a half of its matrix; the tables in the same halves, both once.
    assert (1, d, f // 2) in gathered and (1, f // 2, d) in gathered
    assert gathered.count((v // 2, d)) == 2
    weights = DIVISIBLE.num_layers * d * f // 2
    assert max(np.prod(shape) for shape in gathered) <= max(weights, v // 2 * d)
    assert not any(f in shape or v in shape for shape in gathered)


def test_the_state_is_donated_whole():
    program, _, state, *_ = compiled((2, 2, 2), REMAT, ())
    held = sum(
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)
    )
    # The flag of the last update is not read.
    assert program.memory_analysis().alias_size_in_bytes == held - 1


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_optimizer_state_lies_where_its_parameters_do(name):
    optimizer = make_optimizer(OptimizerSettings(name, b2=0.99, weight_decay=0.1))
    mesh = make_mesh((1, 2, 4))
    config = DIVISIBLE if name == "adamw" else tiny_config(hidden_size=128, mlp_size=256)
    made = step_shardings(config, optimizer, mesh, keep_reference=True, has_head=True)
    state, got = made.abstract, made.state
    by_path = {
        jax.tree_util.keystr(path): (x.shape, sharding.spec)
        for (path, x), sharding in zip(
            jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(got), strict=True
        )
    }
    up = {v for k, v in by_path.items() if k.endswith("['layers']['up']")}
    if name == "adamw":
        assert up == {((2, 16, 24), P(None, "fsdp", "model"))}
    else:  # factors of [l d f] without f and without d; and, factored, no second moment
        assert up >= {((2, 128), P(None, "fsdp")), ((2, 256), P(None, "model")), ((1,), P())}


def test_a_checkpoint_of_eight_devices_restores_on_any_number(tmp_path):
    _, state, _ = sharded((1, 4, 2), keep_reference=True)
    wanted = jax.device_get(state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, state, {})
    checkpoints.close()
    for shape in ((2, 2, 1), (1, 1, 1)):
        shardings, *_ = sharded(shape, keep_reference=True)
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings.state
        )
        restored = Checkpoints(tmp_path).read(0, target)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), wanted)
        assert restored.params["embed"].sharding == shardings.state.params["embed"]


def test_the_reference_of_some_rows_on_a_mesh_is_that_of_one_device():
    def without(y):
        return replace(y, reference_token_logprobs=None) if y.prompt_id == 5 else y

    given, results = changed(draws(0), without), []
    for shape in ((1, 1, 1), (2, 2, 2)):
        cut = {"row_multiple": shape[0] * shape[1]}
        shardings, state, _ = sharded(shape, num_prompts=NUM)
        score = make_reference_pass(DIVISIBLE, replace(REMAT, **cut), shardings)
        batch = placed(lay_out(given, **cut), shardings)
        assert len(batch.missing) < len(batch.tokens)
        results.append(jax.device_get(score(state.params, batch)))
    bound = logprob_bound(DIVISIBLE, batch.tokens.shape[-1], TINY_LOGIT)
    np.testing.assert_allclose(*results, rtol=0, atol=bound)  # 4e-6, where 5e-7 were found


def log_probs_and_gradients(family, site, has_gradients):
    """Log-probs of packed rows, and the gradients of the sum of their squares."""
    sizes = {"vocab_size": 24, "head_dim": 8}  # two devices divide them
    config = tiny_config(family=family, num_layers=KINDS.get(family, 3), **sizes)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 23, (8, 16)).astype(np.int32)
    segments = np.repeat([[1, 2]], 8, axis=0).repeat(8, axis=1).astype(np.int32)
    positions = np.tile(np.arange(8), (8, 2)).astype(np.int32)
    options = {"config": config, "scoring": Scoring(), "remat": "layers"}
    params, sharding = random_params(config), ComputeSharding(config, site)
    if site is not ANY_DEVICE:
        params = jax.device_put(jax.device_get(params), param_shardings(config, site.mesh))

    def total(params):
        found = packed_token_logprobs(
            params, tokens, segments, positions, sharding=sharding, **options
        )
        return jnp.sum(found**2), found

    run = jax.value_and_grad(total, has_aux=True) if has_gradients else lambda x: (total(x), None)
    return jax.device_get(jax.jit(run)(params))


def mesh_of(*shape):
    return trainer_mesh(np.array(jax.devices()[: np.prod(shape)]), MeshShape(*shape))


@pytest.mark.parametrize(
    ("family", "shape", "has_gradients"),
    [
        # By default the values of windows, sinks, and experts over an axis of their own: gradients
        # are those of the step, and of experts in test_experts.py.
        ("gpt_oss", (1, 2, 2, 2), False),
        *(slow(family, (2, 2, 2), True) for family in KINDS),
        slow("gpt_oss", (1, 2, 2, 2), True),
        slow("qwen3_5_moe_text", (1, 2, 2, 2), True),
        slow("gpt_oss", (1, 1, 1, 4), True),
    ],
)
def test_log_probs_and_gradients_on_a_mesh_are_those_of_one_device(family, shape, has_gradients):
    got = log_probs_and_gradients(family, Site(mesh_of(*shape)), has_gradients)
    wanted = log_probs_and_gradients(family, ANY_DEVICE, has_gradients)
    assert np.abs(wanted[0][1]).max() > 1
    # Float32 sums in another order, of gradients of order 1 to 1000. Delta layers amplify rounding
    # tenfold (see `bfloat16_kl`): their gradients of 180 differ by 4e-3.
    atol = 2e-3 * (10 if family.startswith("qwen3_5") else 1)
    chex.assert_trees_all_close(got, wanted, rtol=2e-4, atol=atol)
    np.testing.assert_allclose(got[0][1], wanted[0][1], atol=2e-5)


def test_meshes_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ValueError, match="axis 'experts' of size 4 cannot be divided over 8"):
        param_shardings(tiny_config(family="gpt_oss"), mesh_of(1, 1, 1, 8))
    with pytest.raises(ValueError, match="mesh.expert=2: this model .llama. has no experts"):
        param_shardings(tiny_config(), mesh_of(1, 1, 1, 2))
