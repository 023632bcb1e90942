# SPDX-License-Identifier: Apache-2.0
"""A train step on every mesh equals that of one device, and gathers no more than it should."""

import functools
import itertools
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from fake_batches import (
    DIVISIBLE,
    OPTIMIZER,
    REMAT,
    SCHEDULE,
    changed,
    collectives,
    lay_out,
    make_batch,
    make_draws,
    make_mesh,
    placed,
    sharded,
    slow,
)
from fake_models import TINY_LOGIT, logprob_bound, random_params, tiny_config
from jax.sharding import PartitionSpec as P

from tba_jax.devices.sharding import shardings_like
from tba_jax.models.shardings import param_shardings
from tba_jax.models.transformer import abstract_params
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.objectives import make_objective
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import init_state, step_shardings
from tba_jax.train.step import make_reference_pass, make_train_step


@functools.cache
def one_device():
    state = init_state(random_params(DIVISIBLE), OPTIMIZER, keep_reference=False)
    step = make_train_step(DIVISIBLE, OPTIMIZER, SCHEDULE, REMAT)
    for seed in (0, 1):
        state, outputs = step(state, make_batch(p=8, seed=seed))
    return jax.device_get((state, outputs))


def shapes_of(*sizes):
    return [s for s in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(s) in sizes]


DEFAULT = [(2, 2, 2), (1, 4, 2)]


@pytest.mark.parametrize(
    "shape",
    [s if s in DEFAULT else pytest.param(s, marks=pytest.mark.slow) for s in shapes_of(2, 4, 8)],
)
def test_the_step_on_every_mesh_equals_that_of_one_device(shape):
    shardings, state, step = sharded(shape)
    for seed in (0, 1):
        state, outputs = step(state, placed(make_batch(p=8, seed=seed), shardings))
    wanted, wanted_outputs = one_device()
    jax.tree.map(
        # Float32 sums in another order; two steps at rate 0.1 move weights of 0.3 by up to 0.5.
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6),
        jax.device_get(state),
        wanted,
    )
    chex.assert_trees_all_close(outputs, wanted_outputs, rtol=1e-4, atol=1e-4)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings.state
    parts = shape[1] * shape[2]
    shards = {
        s.data.size for s in state.opt_state.inner_state.trace["layers"]["up"].addressable_shards
    }
    assert shards == {DIVISIBLE.num_layers * DIVISIBLE.hidden_size * DIVISIBLE.mlp_size // parts}


# K = 4, over two parts of the batch: groups, one group over both parts, parts of groups, packed.
@pytest.mark.parametrize(
    ("micro_batch_rows", "row_length"),
    [
        pytest.param(8, 0, marks=pytest.mark.slow),
        pytest.param(4, 0, marks=pytest.mark.slow),
        pytest.param(2, 0, marks=pytest.mark.slow),
        (4, 18),
        pytest.param(2, 18, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_on_a_mesh_equal_the_whole_step(micro_batch_rows, row_length):
    batch = make_batch(p=4)
    state = init_state(random_params(DIVISIBLE), OPTIMIZER, keep_reference=False)
    wanted, _ = make_train_step(DIVISIBLE, OPTIMIZER, SCHEDULE, REMAT)(state, batch)
    cut = {"micro_batch_rows": micro_batch_rows, "is_whole": micro_batch_rows >= 4}
    shardings, state, step = sharded((1, 2, 2), replace(REMAT, **cut))
    rows = make_batch(p=4, row_length=row_length, **cut)
    rows = placed(rows, shardings)
    program = step.lower(state, rows).compile()
    got, _ = program(state, rows)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6),  # as above
        jax.device_get(got.params),
        jax.device_get(wanted.params),
    )
    # Rows stay where they are: activations of length s and width d are summed over model only.
    s, d = rows.tokens.shape[-1], DIVISIBLE.hidden_size
    moved = [x for op, x in collectives(program.as_text()) if op != "all-reduce"]
    assert moved and not any(s in shape and d in shape for shape in moved)


def test_weights_are_gathered_by_layer_over_fsdp_and_never_over_model():
    _, state, step = sharded((1, 2, 4))
    batch = make_batch(p=8)
    text = step.lower(state, batch).compile().as_text()
    d, f, v = DIVISIBLE.hidden_size, DIVISIBLE.mlp_size, DIVISIBLE.vocab_size
    gathered = [shape for op, shape in collectives(text) if op == "all-gather"]
    # One layer at a time, a quarter of its matrix; the tables in the same quarters, both once.
    assert (1, d, f // 4) in gathered and (1, f // 4, d) in gathered
    assert gathered.count((v // 4, d)) == 2
    weights = DIVISIBLE.num_layers * d * f // 4
    assert max(np.prod(shape) for shape in gathered) <= max(weights, v // 4 * d)
    assert not any(f in shape or v in shape for shape in gathered)


def test_the_state_is_donated_whole():
    _, state, step = sharded((2, 2, 2))
    memory = step.lower(state, make_batch(p=8)).compile().memory_analysis()
    held = sum(
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)
    )
    assert memory.alias_size_in_bytes == held - 1  # the flag of the last update is not read


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_optimizer_state_lies_where_its_parameters_do(name):
    optimizer = make_optimizer(OptimizerSettings(name, b2=0.99, weight_decay=0.1))
    mesh = make_mesh((1, 2, 4))
    config = DIVISIBLE if name == "adamw" else tiny_config(hidden_size=128, mlp_size=256)
    params = abstract_params(config)
    state = jax.eval_shape(optimizer.init, params)
    got = shardings_like(state, params, param_shardings(config, mesh), mesh)
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


def test_a_mesh_that_does_not_divide_the_model_is_refused():
    with pytest.raises(ValueError, match=r"'heads' of size 4 .* 8 devices"):
        step_shardings(
            tiny_config(mlp_size=24), OPTIMIZER, make_mesh((1, 1, 8)), keep_reference=False
        )


def test_a_checkpoint_of_eight_devices_restores_on_any_number(tmp_path):
    _, state, _ = sharded((2, 2, 2), keep_reference=True)
    wanted = jax.device_get(state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, state, {})
    checkpoints.close()
    for shape in ((1, 4, 1), (1, 1, 2), (1, 1, 1)):
        shardings, *_ = sharded(shape, keep_reference=True)
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings.state
        )
        restored = Checkpoints(tmp_path).read(0, target)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), wanted)
        assert restored.params["embed"].sharding == shardings.state.params["embed"]


LEARNED = replace(REMAT, objective=make_objective("tb", {"scale": "paper", "log_z": "learned"}))


@pytest.mark.parametrize(
    ("shape", "settings", "options"),
    [
        ((1, 4, 2), REMAT, {"row_length": 18, "shares_prompts": True}),
        slow((2, 2, 2), REMAT, {}),
        slow((1, 8, 1), REMAT, {"shares_prompts": True}),
        slow((1, 4, 1), REMAT, {"row_length": 18, "micro_batch_rows": 4, "is_whole": True}),
        slow((1, 4, 1), LEARNED, {}),
    ],
)
def test_prompts_need_not_divide_over_the_devices(shape, settings, options):
    """Seven, as the paper's GSM8K has: rows are filled up, and groups are known everywhere."""
    draws, parts = make_draws(p=7), shape[0] * shape[1]
    results = []
    for own in ((1, 1, 1), shape):
        cut = {"row_multiple": parts} if own == shape else {}
        micro_batch = {x: options[x] for x in ("micro_batch_rows", "is_whole") if x in options}
        of_mesh = replace(settings, **micro_batch, **cut)
        shardings, state, step = sharded(own, of_mesh, num_prompts=7)
        batch = lay_out(draws, **options, **cut)
        assert own != shape or batch.tokens.shape[0] % parts == 0
        batch = placed(batch, shardings)
        assert batch.rewards.sharding.is_fully_replicated
        assert batch.tokens.sharding.is_fully_replicated == (own != shape)
        state, outputs = step(state, batch)
        results.append(jax.device_get(((state.params, state.head), outputs)))
    (wanted, wanted_outputs), (got, outputs) = results
    # Sums in another order, as above.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, wanted)
    numbers, wanted_numbers = outputs["numbers"], wanted_outputs["numbers"]
    chex.assert_trees_all_close(numbers, wanted_numbers, rtol=1e-4)
    if settings is LEARNED:
        np.testing.assert_allclose(outputs["log_z"], wanted_outputs["log_z"], rtol=1e-4, atol=1e-6)


def test_the_reference_of_some_rows_on_a_mesh_is_that_of_one_device():
    def without(y):
        return replace(y, reference_token_logprobs=None) if y.prompt_id == 5 else y

    draws, results = changed(make_draws(p=8), without), []
    for shape in ((1, 1, 1), (2, 2, 2)):
        cut = {"row_multiple": shape[0] * shape[1]}
        shardings, state, _ = sharded(shape)
        score = make_reference_pass(DIVISIBLE, replace(REMAT, **cut), shardings)
        batch = placed(lay_out(draws, **cut), shardings)
        assert len(batch.missing) < len(batch.tokens)
        results.append(jax.device_get(score(state.params, batch)))
    bound = logprob_bound(DIVISIBLE, batch.tokens.shape[-1], TINY_LOGIT)
    np.testing.assert_allclose(*results, rtol=0, atol=bound)  # 4e-6, where 5e-7 were found
