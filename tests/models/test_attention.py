# SPDX-License-Identifier: Apache-2.0
"""Every implementation of attention against float64: values, gradients, choice, meshes.

Contract: the output of a valid position is softmax attention of the positions that it sees, with
cap, window and sinks, and so is the gradient; padding is never read and comes out finite. Splash is
interpreted, cuDNN's interface is computed by XLA.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config, tiny_decoder
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.decoding.shardings import weight_shardings
from tba_jax.devices import site as site_module
from tba_jax.devices.site import Site
from tba_jax.evaluation.metrics import make_distance_program
from tba_jax.models import attention, cudnn_attention, splash, transformer
from tba_jax.models.logprobs import Scoring
from tba_jax.search.start_data import make_start_program

B, S, G, R, E = 4, 12, 2, 3, 16
SINKS = jnp.asarray(np.linspace(-1.1, 2.3, G * R).reshape(G, R), jnp.float32)
# Padding in front, behind, on both sides; none.
MASK = np.array(
    [[j >= a and j < b for j in range(S)] for a, b in ((3, 12), (0, 7), (2, 9), (0, 12))]
)
# A prompt and its two responses, twice; one response and padding; sequences of 1; padding alone.
SEGMENTS = np.zeros((B, S), np.int32)
SEGMENTS[0], SEGMENTS[1, :9] = np.repeat([1, 2, 3, 4, 5, 6], 2), [1, 1, 1, 2, 2, 2, 2, 2, 2]
SEGMENTS[2] = 1 + np.arange(S)
CONTEXTS, IS_PROMPT = np.zeros((B, S), np.int32), np.zeros((B, S), bool)
CONTEXTS[0], CONTEXTS[1, :9] = np.repeat([1, 2], 6), 3
CONTEXTS[2] = 4 + np.arange(S)
IS_PROMPT[0, [0, 1, 6, 7]] = IS_PROMPT[1, :3] = True


def rows_of(kind):
    """(visibility as the model builds it, which keys each query sees [b s s], written down)."""
    index = np.arange(S)
    seen = np.broadcast_to(index[None, :] <= index[:, None], (B, S, S))
    if kind == "padded":
        return attention.causal(jnp.asarray(MASK)), seen & MASK[:, None]
    same = SEGMENTS[:, None] == SEGMENTS[:, :, None]
    if kind == "packed":
        rows = attention.packed(jnp.asarray(SEGMENTS))
    else:
        rows = attention.packed(*map(jnp.asarray, (SEGMENTS, CONTEXTS, IS_PROMPT)))
        # A prompt is seen by all responses to it.
        same = same | (IS_PROMPT[:, None] & (CONTEXTS[:, None] == CONTEXTS[:, :, None]))
    return rows, seen & same & (SEGMENTS > 0)[:, None]


def arrays(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def sequences(dtype=jnp.float32):
    return arrays((B, S, G, R, E), (B, S, G, E), (B, S, G, E), dtype=dtype)


def squares(out, valid):
    """(sum of the squares at valid positions, output)."""
    return jnp.sum(jnp.where(valid[:, :, None, None, None], out, 0).astype(out.dtype) ** 2), out


def with_gradients(run, args, valid):
    """(output, gradients of the sum of its squares at valid positions)."""
    how = {"argnums": tuple(range(len(args))), "has_aux": True}
    grads, out = jax.jit(jax.grad(lambda *args: squares(run(*args), valid), **how))(*args)
    return jax.device_get((out, grads))


@jax.jit
@functools.partial(jax.grad, argnums=(0, 1, 2, 3), has_aux=True)
def formula(q, k, v, sinks, seen, valid, cap):
    """Softmax attention of visible keys [b s c] and sinks, which are -inf if there are none."""
    scores = jnp.einsum("bsgre,bcge->bgrsc", q, k) / np.sqrt(E)
    scores = cap * jnp.tanh(scores / cap)
    weights = jnp.where(seen[:, None, None], jnp.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sinks)[None, :, :, None, None]
    out = jnp.einsum("bgrsc,bcge->bsgre", weights / jnp.where(total > 0, total, 1), v)
    return squares(out, valid)


def in_float64(args, valid, seen, cap=None):
    """`formula` in float64 for exactly these arguments, in one program; three without sinks."""
    given = [*args, np.full((G, R), -np.inf)][:4]
    with jax.enable_x64(True):
        q, k, v, sinks = (jnp.asarray(np.asarray(x, np.float64)) for x in given)
        # A cap of 1e8 changes scores of 10 by their last digit.
        grads, out = jax.device_get(formula(q, k, v, sinks, seen, valid, cap or 1e8))
        return out, grads[: len(args)]


PLAIN, ALL = (None, None, False), (4, 2.0, True)


@pytest.mark.parametrize(
    ("implementation", "kind", "window", "cap", "has_sinks"),
    [
        *(("xla", kind, *scores) for kind in ("padded", "packed") for scores in (PLAIN, ALL)),
        *(("splash", kind, *ALL) for kind in ("padded", "packed", "shared")),
        ("xla", "shared", *ALL),
        # What cuDNN is given for packed rows, here to XLA.
        ("mask", "packed", None, None, False),
        ("mask", "shared", 2, None, True),
    ],
)
def test_values_and_gradients_are_those_of_float64(implementation, kind, window, cap, has_sinks):
    rows, seen = rows_of(kind)
    valid = MASK if kind == "padded" else SEGMENTS > 0
    args = [*sequences(), *[SINKS] * has_sinks]

    def run(q, k, v, sinks=None):
        scores = attention.Scores(window, cap, sinks)
        if implementation != "mask":
            kernels = attention.Kernels(implementation)
            return attention.attend_causal(q, k, v, rows, scores=scores, kernels=kernels)
        how = {"seen": rows.seen(window), "implementation": "xla"}
        return cudnn_attention.attend(q, k, v, rows.mask, sinks=sinks, **how)

    out, grads = with_gradients(run, args, valid)
    near = np.arange(S)[:, None] - np.arange(S) < (window or S)
    wanted, wanted_grads = in_float64(args, valid, seen & near, cap)
    assert np.isfinite(out).all()
    # Float32 sums of 12 terms, in values of order 1 and gradients of order 10.
    np.testing.assert_allclose(out[valid], wanted[valid], atol=1e-5, rtol=1e-5)
    for got, expected in zip(grads, wanted_grads, strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got, expected, atol=3e-5, rtol=2e-5)


@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_padding_is_never_read_and_bfloat16_rounds_weights_alone(implementation):
    q, k, v = sequences(jnp.bfloat16)
    rows, seen = rows_of("padded")

    @jax.jit
    def run(q, k, v):
        return attention.attend_causal(q, k, v, rows, kernels=attention.Kernels(implementation))

    out = np.asarray(run(q, k, v))
    assert out.dtype == jnp.bfloat16
    wanted, _ = in_float64((q, k, v), MASK, seen)
    # Weights and results are rounded to 2^-9 of values of about 1.
    np.testing.assert_allclose(out[MASK].astype(np.float64), wanted[MASK], atol=2e-2, rtol=2e-2)
    padded = ~MASK[:, :, None, None]
    other = run(q, jnp.where(padded, 1e3, k), jnp.where(padded, 1e3, v))
    np.testing.assert_array_equal(out[MASK], np.asarray(other)[MASK])


@pytest.fixture
def cudnn_in_xla(monkeypatch):
    """cuDNN's interface (causal; row lengths or a mask) by XLA, with nan at its padding."""
    real = jax.nn.dot_product_attention

    def fake(q, k, v, *, implementation, query_seq_lengths=None, **options):
        assert implementation == "cudnn" and options["is_causal"]
        assert q.shape[1] % 2 == 0 and q.shape[-1] % 8 == 0
        assert q.shape == (*k.shape[:2], G * R, v.shape[3])
        for x in (q, k, v):
            assert x.dtype in (jnp.bfloat16, jnp.float16)
        if query_seq_lengths is None:
            return real(q, k, v, **options)
        out = real(q, k, v, query_seq_lengths=query_seq_lengths, **options)
        index = jnp.arange(q.shape[1])[None]
        is_padding = index >= query_seq_lengths[:, None]
        return jnp.where(is_padding[:, :, None, None], jnp.nan, out)

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)


@pytest.mark.parametrize(
    ("is_right_padded", "size", "has_sinks", "window"),
    [(False, S, False, None), (False, S, True, 4), (True, S, True, None), (False, S - 1, False, 4)],
)
def test_cudnn_gets_rows_that_begin_at_0(cudnn_in_xla, is_right_padded, size, has_sinks, window):
    """Forward and gradient are those of float64; a nan at padded positions goes nowhere."""
    mask = (np.sort(MASK, axis=1)[:, ::-1] if is_right_padded else MASK)[:, :size]
    args = [*(x[:, :size] for x in sequences(jnp.bfloat16)), *[SINKS] * has_sinks]

    def run(q, k, v, sinks=None):
        visible = attention.causal(jnp.asarray(mask), is_right_padded=is_right_padded)
        scores = attention.Scores(window, sinks=sinks)
        kernels = attention.Kernels("cudnn")
        return attention.attend_causal(q, k, v, visible, scores=scores, kernels=kernels)

    out, grads = with_gradients(run, args, mask)
    distance = np.arange(size)[:, None] - np.arange(size)
    seen = (distance >= 0) & (distance < (window or S)) & mask[:, None]
    wanted, wanted_grads = in_float64(args, mask, seen)
    # Rows are moved there and back; nothing is added up into places.
    assert "scatter" not in str(jax.make_jaxpr(lambda *args: jax.vjp(run, *args)[1](out))(*args))
    assert np.isfinite(np.asarray(out, np.float32)).all()
    np.testing.assert_allclose(out[mask].astype(float), wanted[mask], atol=2e-2, rtol=2e-2)
    for got, expected in zip(grads[:3], wanted_grads, strict=False):
        got = np.asarray(got, np.float32)
        assert np.isfinite(got).all() and (got[~mask] == 0).all()
        # Gradients of 12 outputs add up at one key: values of about 8, half a unit of 2^-7.
        np.testing.assert_allclose(got[mask], expected[mask], atol=6e-2, rtol=4e-2)
    # Sums of 39 to 83 over the positions; their terms are bfloat16, with errors of 2^-9 each.
    for got, expected in zip(grads[3:], wanted_grads[3:], strict=True):
        np.testing.assert_allclose(got, expected, rtol=2**-8)


def test_kernels_are_selected_where_they_support_the_arguments():
    """Platforms, dtypes, head sizes, scores, two blocks at least, and meshes that divide heads."""
    sinks, mesh = SINKS, Mesh(np.array(jax.devices()[:4]), ("model",))
    divided, whole = (NamedSharding(mesh, PartitionSpec(None, x)) for x in ("model", None))
    cuda, tpu = attention.Kernels("auto", "cuda"), attention.Kernels("auto", "tpu")
    low, plain, scores = jnp.bfloat16, attention.PLAIN, attention.Scores
    for kernels, dtype, head_dim, wanted, *options in (
        (cuda, low, 64, "cudnn"),
        (tpu, low, 64, "splash"),
        (cuda, jnp.float16, 128, "cudnn"),
        (cuda, jnp.float32, 64, "xla"),
        (tpu, jnp.float32, 64, "xla"),
        (cuda, low, 12, "xla"),
        (tpu, low, 32, "xla"),
        (cuda, low, 256, "xla"),
        (tpu, low, 256, "splash"),
        *((attention.Kernels("auto", x), low, 64, "xla") for x in ("any", "cpu", "rocm")),
        *((attention.Kernels("xla", x), low, 64, "xla") for x in ("cuda", "tpu")),
        (cuda, low, 128, "cudnn", scores(4)),
        (cuda, low, 120, "cudnn", scores(4, sinks=sinks)),
        (cuda, low, 128, "xla", scores(4, sinks=sinks)),
        (cuda, low, 64, "xla", scores(cap=30.0)),
        (tpu, low, 64, "splash", scores(4, 30.0, sinks)),
        (tpu, low, 64, "xla", plain, 255),
        (tpu, low, 64, "splash", plain, 256),
        (cuda, low, 64, "cudnn", plain, 1),
        (tpu._replace(sharding=divided), low, 64, "splash"),
        (cuda._replace(sharding=divided), low, 64, "cudnn"),
        # Each device would compute all heads, or the program be refused.
        (tpu._replace(sharding=whole), low, 64, "xla"),
        (cuda._replace(sharding=whole), low, 64, "xla"),
    ):
        assert kernels.select(dtype, head_dim, *options) == wanted


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_cudnn_equals_the_einsum(has_sinks, window):
    scores = attention.Scores(window, sinks=SINKS if has_sinks else None)
    run = functools.partial(attention.attend_causal, *sequences(jnp.bfloat16), scores=scores)
    visible = attention.causal(jnp.asarray(MASK))
    kernels = map(attention.Kernels, ("cudnn", "xla"))
    got, wanted = (run(visible, kernels=x)[MASK] for x in kernels)
    np.testing.assert_allclose(*(x.astype(np.float32) for x in (got, wanted)), atol=2e-2, rtol=2e-2)


def test_kernels_run_on_each_devices_part_of_a_mesh():
    """Key/value heads over two devices, rows over two: the same numbers as one device."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.NamedSharding(mesh, jax.P("data", "model"))
    q, k, v = sequences()
    scores = attention.Scores(4, sinks=SINKS)

    @functools.partial(jax.jit, static_argnames="sharding")
    def run(q, k, v, mask, sharding):
        return splash.attend(q, k, v, attention.causal(mask), scores, sharding)

    out = run(q, k, v, MASK, sharding=sharding)
    wanted = attention.attend_causal(q, k, v, attention.causal(jnp.asarray(MASK)), scores=scores)
    np.testing.assert_allclose(out[MASK], wanted[MASK], atol=1e-5, rtol=1e-5)


@pytest.fixture
def chosen(monkeypatch):
    """Devices count as GPUs. Returns a list that gets (sharding of the cache, chosen kernel)."""
    real, select, calls = jax.nn.dot_product_attention, attention.Kernels.select, []

    def attend(q, k, v, *, implementation, query_seq_lengths, key_value_seq_lengths, **options):
        return real(q, k, v, **options)

    def noted(self, *args):
        calls.append((self.sharding, select(self, *args)))
        return calls[-1][1]

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(attention.Kernels, "select", noted)
    monkeypatch.setattr(site_module, "platform_of", lambda device: "cuda")
    return calls


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_programs_of_several_gpus_use_cudnn_where_they_divide_all_heads(chosen, num_kv_heads):
    """JAX refuses to compile other divisions, and two meshes in a program that calls cuDNN."""
    config = tiny_config(num_kv_heads=num_kv_heads, head_dim=8, vocab_size=24)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    site = Site(mesh)
    held = jax.device_put(
        transformer.unstack_layers(random_params(config), config), weight_shardings(config, mesh)
    )
    tokens = jnp.ones((2, 6), jnp.int32)
    lengths = jnp.full((2,), 2), jnp.full((2, 2), 2)
    scoring = Scoring(compute_dtype="bfloat16")
    decoder = tiny_decoder(config, compute_dtype=jnp.bfloat16, max_length=16, site=site)
    start = make_start_program(config, scoring, max_new_tokens=2, site=site)
    distances = make_distance_program(config, scoring, site)
    for program in (
        lambda: start(held, tokens, *lengths),
        lambda: distances(held, held, tokens, lengths[0], lengths[0], t=2),
        lambda: decoder.extend(
            held, decoder.new_cache(decoder.num_rows, held), tokens, lengths[0], None
        ),
    ):
        chosen.clear()
        jax.eval_shape(program)
        wanted = "cudnn" if num_kv_heads == 2 else "xla"
        assert {name for _, name in chosen} == {wanted}
        specs = {where.spec for where, name in chosen if name == "cudnn"}
        assert specs <= {PartitionSpec(None, "model")}
