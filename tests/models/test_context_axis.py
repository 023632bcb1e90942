# SPDX-License-Identifier: Apache-2.0
"""Rows divided over the mesh axis `context` give the numbers of one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import OPTIMIZER, REMAT, SCHEDULE, collectives, make_batch, slow
from fake_models import random_params, tiny_config
from jax.sharding import NamedSharding, PartitionSpec

from tba_jax.config.notes import notes
from tba_jax.config.schema import make_config
from tba_jax.devices.placement import MeshShape
from tba_jax.devices.sharding import trainer_mesh
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.models import attention, context_axis, cudnn_attention
from tba_jax.models.logprobs import packed_token_logprobs, row_token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding, param_shardings
from tba_jax.train.state import init_state, make_init_state, step_shardings
from tba_jax.train.step import make_train_step

EVEN = {"vocab_size": 24, "head_dim": 8, "mlp_size": 24}
ROWS, LENGTH = 4, 16


def mesh_of(**sizes):
    shape = MeshShape(**sizes)
    return trainer_mesh(np.array(jax.devices()[: shape.size]), shape)


def inputs(layout):
    """A scoring function and its arrays."""
    tokens = np.random.default_rng(0).integers(3, 23, (ROWS, LENGTH)).astype(np.int32)
    if layout == "padded":  # a prompt of 3 after padding of 1, one response of 9 of 12
        lengths = np.full((ROWS,), 3), np.full((ROWS, 1), 9)
        return functools.partial(row_token_logprobs, response_bucket=12), (tokens, *lengths)
    if layout == "shared":  # a prompt of 7 after padding of 1, responses of 4 and 3 of 4
        lengths = np.full((ROWS,), 7), np.tile([4, 3], (ROWS, 1))
        return functools.partial(row_token_logprobs, response_bucket=4), (tokens, *lengths)
    if layout == "packed":  # sequences of 7 and 6 tokens
        sequences = [(7, 1, 0), (6, 2, 0), (3, 0, 0)]
    else:  # a prompt of 3 with responses of 5 and 2, one of 2 with a response of 3
        sequences = [(3, 1, 0), (5, 2, 3), (2, 3, 3), (2, 4, 0), (3, 5, 2), (1, 0, 0)]
    segments = np.concatenate([[number] * n for n, number, _ in sequences])
    positions = np.concatenate([first + np.arange(n) for n, _, first in sequences])
    rows = [segments, np.where(segments > 0, positions, 0)]
    if layout == "packed_shared":
        rows += [np.repeat([1, 2, 0], [10, 5, 1]), np.isin(segments, (1, 4))]
    return packed_token_logprobs, (tokens, *(np.tile(x, (ROWS, 1)) for x in rows))


def log_probs_and_gradients(family, layout, site):
    """(sum of squares, log-probs) and gradients."""
    config = tiny_config(family=family, **EVEN)
    score, arrays = inputs(layout)
    params = random_params(config)
    if site is not ANY_DEVICE:
        params = jax.device_put(params, param_shardings(config, site.mesh))

    def total(params):
        options = {"remat": "layers", "sharding": ComputeSharding(config, site)}
        found = score(params, *arrays, config=config, scoring=Scoring(), **options)
        return jnp.sum(found**2), found

    return jax.device_get(jax.jit(jax.value_and_grad(total, has_aux=True))(params))


@functools.cache
def on_one_device(family, layout):
    return log_probs_and_gradients(family, layout, ANY_DEVICE)


ALONE, WITH_ALL = {"context": 2}, {"fsdp": 2, "model": 2, "context": 2}
CASES = [
    ("qwen2", "packed", {"context": 4}),
    ("gemma3_text", "packed_shared", WITH_ALL),
    ("gpt_oss", "packed", {"context": 2, "expert": 2}),
    *(
        slow(family, layout, sizes)
        for family in ("qwen2", "gemma2", "gemma3_text", "gpt_oss", "mistral", "olmo3", "gpt2")
        for layout in ("packed", "packed_shared", "padded", "shared")
        for sizes in (ALONE, {"context": 4}, WITH_ALL)
    ),
]


@pytest.mark.parametrize(("family", "layout", "sizes"), CASES)
def test_losses_and_gradients_are_those_of_one_device(family, layout, sizes, monkeypatch):
    """In blocks of one to four queries, so that windows of 4 read a part of the keys."""
    monkeypatch.setattr(attention, "PART_BYTES", 1024)
    got = log_probs_and_gradients(family, layout, Site(mesh_of(**sizes)))
    wanted = on_one_device(family, layout)
    assert np.abs(wanted[0][1]).max() > 1
    # Float32 sums in another order.
    np.testing.assert_allclose(got[0][0], wanted[0][0], rtol=1e-5)
    np.testing.assert_allclose(got[0][1], wanted[0][1], rtol=1e-5, atol=1e-5)
    scales = jax.tree.map(lambda x: np.abs(x).max(), wanted[1])
    if family == "gpt2":  # weights do not depend on this bias; its gradient is 0 but for rounding
        scales["layers"]["k_bias"] = scales["layers"]["v_bias"]
    jax.tree.map(
        lambda x, y, scale: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * scale),
        got[1],
        wanted[1],
        scales,
    )


def test_a_train_step_is_that_of_one_device():
    """With a reference, a third of the rows at a time, and prompts that responses share."""
    config = tiny_config(**EVEN)
    batch = make_batch(p=6, row_length=24, shares_prompts=True, micro_batch_rows=4)
    settings = dataclasses.replace(REMAT, micro_batch_rows=4)
    alone = init_state(random_params(config), OPTIMIZER, keep_reference=True)
    wanted, losses = make_train_step(config, OPTIMIZER, SCHEDULE, settings)(alone, batch)
    shardings = step_shardings(config, OPTIMIZER, mesh_of(data=2, context=4), keep_reference=True)
    params = jax.device_put(random_params(config), shardings.state.params)
    state = make_init_state(OPTIMIZER, shardings)(params)
    up = state.params["layers"]["up"]
    assert up.sharding.spec[1] == ("fsdp", "context")
    assert up.addressable_shards[0].data.size == up.size // 4
    step = make_train_step(config, OPTIMIZER, SCHEDULE, settings, shardings)
    program = step.lower(state, jax.device_put(batch, shardings.of_batch(batch))).compile()
    got, metrics = program(state, jax.device_put(batch, shardings.of_batch(batch)))
    for name, value in losses.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
    jax.tree.map(
        # Float32 sums in another order; a step at rate 0.1 moves weights of 0.3 by up to 0.5.
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6),
        jax.device_get(got.params),
        jax.device_get(wanted.params),
    )


def test_only_keys_and_values_of_whole_rows_are_gathered():
    config, mesh = tiny_config(**EVEN), mesh_of(context=4)
    score, arrays = inputs("packed")
    sharding = ComputeSharding(config, Site(mesh))

    def total(params):
        options = {"config": config, "scoring": Scoring(), "sharding": sharding}
        return jnp.sum(score(params, *arrays, **options))

    params = jax.device_put(random_params(config), param_shardings(config, mesh))
    text = jax.jit(jax.grad(total)).lower(params).compile().as_text()
    moved = {shape for _, shape in collectives(text) if shape[:2] == (ROWS, LENGTH)}
    assert moved == {(ROWS, LENGTH, config.num_kv_heads, config.head_dim)}


def test_parts_become_rows_without_communication():
    mesh = mesh_of(fsdp=2, context=4)
    x = jnp.arange(4 * 8 * 3).reshape(4, 8, 3)
    where = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "context"))

    def there_and_back(x):
        rows = context_axis.as_rows(x, mesh)
        return rows, context_axis.as_sequences(rows, mesh), context_axis.shifted(x, mesh)

    program = jax.jit(there_and_back, in_shardings=where)
    rows, again, shifted = program(x)
    np.testing.assert_array_equal(rows, np.concatenate(np.split(x, 4, axis=1)))
    np.testing.assert_array_equal(again, x)
    np.testing.assert_array_equal(shifted[:, 1:], x[:, :-1])
    text = program.lower(x).compile().as_text()
    assert "all-" not in text and text.count(" collective-permute(") == 1


def test_queries_of_splash_attention_are_balanced_over_devices():
    """Interpreted: rows of 1,024 tokens over two devices, padded, of one and two sequences."""
    mesh, s = mesh_of(context=2), 1024
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, s, 1, 2, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, s, 1, 8)), jnp.float32) for _ in range(2))
    segments = np.repeat([[1] * 5 + [0] * 3, [1] * 2 + [2] * 6], s // 8, axis=1)
    visible = attention.packed(jnp.asarray(segments))
    weight = jnp.where(visible.mask[:, :, None, None, None], jnp.cos(q), 0)
    cache = NamedSharding(mesh, PartitionSpec(context_axis.row_axes(mesh), "model"))

    def total(run, q, k, v):
        return jnp.sum(weight * run(q, k, v, visible))

    def by_parts(*args):
        *parts, visible = args
        options = {"scores": attention.PLAIN, "implementation": "tpu_kernel", "sharding": cache}
        parts = (context_axis.as_rows(x, mesh) for x in parts)
        out = context_axis.attend_causal(*parts, visible, **options)
        return context_axis.as_sequences(out, mesh)

    grad = jax.value_and_grad(total, argnums=(1, 2, 3))
    got = jax.jit(functools.partial(grad, by_parts))(q, k, v)
    wanted = jax.jit(functools.partial(grad, attention.attend_causal))(q, k, v)
    # Float32 sums of 1,024 numbers in blocks.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, wanted)


@pytest.mark.parametrize("sinks", [None, np.array([[-1.0, 0.3], [1.2, 2.0]])])
@pytest.mark.parametrize("window", [None, 4])
def test_a_mask_of_pairs_gives_the_attention_of_the_einsum(window, sinks):
    """The mask that cuDNN gets, with XLA's implementation."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 8, 2, 2, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 16, 2, 8)), jnp.float32) for _ in range(2))
    visible = attention.packed(jnp.repeat(jnp.array([[1, 2, 2, 0]] * 2), 4, axis=1))
    sinks = None if sinks is None else jnp.asarray(sinks)
    scores, first = attention.Scores(window, sinks=sinks), jnp.int32(6)
    wanted = attention.attend_part(q, k, v, visible, first, scores, "xla")
    seen = attention._seen(
        visible.part(first, 8), visible, 6 + jnp.arange(8), jnp.arange(16), window
    )
    got = cudnn_attention.attend_pairs(q, k, v, visible.mask, seen, sinks, "xla")
    valid = visible.mask[:, 6:14]
    np.testing.assert_allclose(got[valid], wanted[valid], atol=1e-5)


def test_models_and_rows_that_the_axis_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="mesh.context=2: this model .qwen3_5_text. has recurrent"):
        param_shardings(tiny_config(family="qwen3_5_text", **EVEN), mesh_of(context=2))
    config, mesh = tiny_config(**EVEN), mesh_of(context=8)
    tokens = jnp.ones((2, 12), jnp.int32)
    with pytest.raises(ValueError, match="mesh.context=8 does not divide rows of 12 tokens. Set"):
        packed_token_logprobs(
            random_params(config),
            tokens,
            tokens,
            tokens,
            config=config,
            scoring=Scoring(),
            sharding=ComputeSharding(config, Site(mesh)),
        )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batch.share_prompts": False}, ""),
        ({}, "because responses share prompts. Set --config.batch.share_prompts=False"),
        (
            {"batch.share_prompts": False, "batch.packed_length": 768},
            "for rows of 768 tokens. Make batch.packed_length a multiple of 512",
        ),
        ({"batch.share_prompts": False, "mesh.context": 1, "batch.packed_length": 768}, ""),
        (
            {"model.attention": "auto", "model.compute_dtype": "bfloat16"},
            "mesh.context=2 on TPUs: the trainer uses xla, because responses share prompts",
        ),
    ],
)
def test_a_run_names_rows_that_splash_attention_does_not_support(fields, words):
    """The trainer's program has the kernel if and only if there is no note."""
    base = {"model.attention": "tpu_kernel", "mesh.context": 2, "batch.packed_length": 1024}
    run = make_config({**base, **fields})
    said = notes(run)
    assert [words in note for note in said] == ([True] if words else [])
    config, mesh = tiny_config(attention="tpu_kernel", **EVEN), mesh_of(context=run.mesh.context)
    rows = np.ones((2, run.batch.packed_length), np.int32)
    contexts = (rows, rows == 0) if run.batch.share_prompts else ()
    options = {"scoring": Scoring(), "sharding": ComputeSharding(config, Site(mesh))}
    score = functools.partial(packed_token_logprobs, config=config, **options)
    text = str(jax.make_jaxpr(score)(random_params(config), rows, rows, rows, *contexts))
    assert ("pallas_call" in text) == (not said)


def test_lengths_of_padded_rows_are_named_too():
    fields = {"model.attention": "tpu_kernel", "mesh.context": 2, "batch.share_prompts": False}
    fields |= {"task.max_prompt_tokens": 256, "search.max_new_tokens": 768}
    assert notes(make_config({**fields, "batch.num_length_buckets": 1})) == []
    (note,) = notes(make_config({**fields, "batch.num_length_buckets": 2}))
    assert "xla for rows of 640, 896 tokens. Make each length" in note
