# SPDX-License-Identifier: Apache-2.0
"""Every implementation of attention against the einsum, at every padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.shardings import weight_shardings
from tba_jax.devices import site as site_module
from tba_jax.devices.site import Site
from tba_jax.evaluation.metrics import make_distance_program
from tba_jax.models import attention, cudnn_attention, splash, transformer
from tba_jax.models.kv_cache import KVCache
from tba_jax.models.scoring import Scoring
from tba_jax.search.start_data import make_start_program

B, S, G, R, E = 4, 12, 2, 3, 16
# Rounding of float32 sums in another order; of bfloat16 weights (2^-9 of values of about 1).
TOLERANCES = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda d: d.__name__)
SINKS = np.linspace(-1.1, 2.3, G * R).reshape(G, R)
# Padding in front, behind, on both sides; none.
MASK = np.array(
    [[j >= a and j < b for j in range(S)] for a, b in ((3, 12), (0, 7), (2, 9), (0, 12))]
)


def arrays(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def sequences(dtype=jnp.float32):
    return arrays((B, S, G, R, E), (B, S, G, E), (B, S, G, E), dtype=dtype)


def by_hand(q, k, v, visible):
    """Softmax attention in float64; visible [b s c]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("bsgre,bcge->bgrsc", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(visible[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bgrsc,bcge->bsgre", weights / weights.sum(-1, keepdims=True), v)


def assert_close_where_valid(out, wanted, dtype=jnp.float32, mask=MASK):
    out, wanted = (np.asarray(x, np.float64)[mask] for x in (out, wanted))
    np.testing.assert_allclose(out, wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@functools.cache
def compiled(implementation):
    """(output, gradients of the sum of squared valid outputs), jitted."""

    def run(q, k, v, mask):
        visible = attention.causal(mask)
        return attention.attend_causal(q, k, v, visible, implementation=implementation)

    def loss(q, k, v, mask):
        out = run(q, k, v, mask).astype(jnp.float32)
        return jnp.sum(jnp.where(mask[:, :, None, None, None], out, 0) ** 2)

    return jax.jit(run), jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_sequences_of_a_packed_row_do_not_see_one_another(implementation):
    q, k, v = sequences()
    index = np.arange(S)
    segments = np.stack([1 + (index >= 2 + b) + (index >= S // 2) for b in range(B)])
    segments[1, S // 2 + 3 :] = 0
    segments[2] = 0
    visible = np.tril(np.ones((S, S), bool))[None] & (segments[:, None] == segments[:, :, None])

    @jax.jit
    def run(q, k, v):
        rows = attention.packed(jnp.asarray(segments, jnp.int32))
        return attention.attend_causal(q, k, v, rows, implementation=implementation)

    def loss(q, k, v):
        return jnp.sum(jnp.where(segments[:, :, None, None, None] > 0, run(q, k, v), 0) ** 2)

    assert_close_where_valid(run(q, k, v), by_hand(q, k, v, visible), mask=segments > 0)
    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize(
    ("shares", "has_sinks", "window"), [(False, False, None), (False, True, 2), (True, True, 2)]
)
def test_a_mask_of_pairs_is_what_the_einsum_sees(shares, has_sinks, window):
    """What cuDNN is given for packed rows, here to XLA: values and gradients, at an odd length."""
    segments = np.array([[1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4], [1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0]])
    contexts = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0]])
    is_prompt = np.array([[1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0]]) > 0
    n = segments.shape[1]
    args = [*arrays((2, n, G, R, E), (2, n, G, E), (2, n, G, E)), jnp.asarray(SINKS)]
    segments, *shared = (jnp.asarray(x) for x in (segments, contexts, is_prompt))
    rows = attention.packed(segments.astype(jnp.int32), *(shared if shares else ()))

    def run(q, k, v, sinks, attend):
        scores = attention.Scores(window, sinks=sinks if has_sinks else None)
        out = attend(q, k, v, rows, scores=scores)
        return jnp.sum(jnp.where(segments[:, :, None, None, None] > 0, out, 0) ** 2), out

    def values(attend):
        function = functools.partial(run, attend=attend)
        return jax.jit(jax.grad(function, argnums=(0, 1, 2, 3), has_aux=True))(*args)

    def by_mask(q, k, v, visible, scores):
        how = {"seen": visible.seen(scores.window), "implementation": "xla"}
        return cudnn_attention.attend(q, k, v, visible.mask, sinks=scores.sinks, **how)

    grads, out = values(by_mask)
    wanted_grads, wanted = values(attention.attend_causal)
    assert np.isfinite(out).all()
    assert_close_where_valid(out, wanted, mask=np.asarray(segments > 0))
    for got, expected in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


@DTYPES
@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_each_implementation_is_softmax_attention_of_what_is_visible(dtype, implementation):
    """Splash is interpreted here; test_splash compiles it."""
    q, k, v = sequences(dtype)
    visible = np.tril(np.ones((S, S), bool))[None] & MASK[:, None, :]
    visible |= np.eye(S, dtype=bool) & ~MASK[:, :, None]  # padded queries: anything finite
    out = compiled(implementation)[0](q, k, v, MASK)
    assert out.dtype == dtype
    assert_close_where_valid(out, by_hand(q, k, v, visible), dtype)
    if dtype == jnp.float32 and implementation != "xla":
        gradients = (compiled(name)[1](q, k, v, MASK) for name in (implementation, "xla"))
        for one, other in zip(*gradients, strict=True):
            assert_close_where_valid(one, other)


def test_padding_is_never_read_and_comes_out_finite():
    q, k, v = sequences()
    padded = ~MASK[:, :, None, None]
    for name in ("xla", "splash"):
        out = compiled(name)[0](q, k, v, MASK)
        assert np.isfinite(out).all()
        other = compiled(name)[0](q, jnp.where(padded, 1e3, k), jnp.where(padded, 1e3, v), MASK)
        np.testing.assert_array_equal(np.asarray(out)[MASK], np.asarray(other)[MASK])


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


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("is_right_padded", "size"), [(False, S), (True, S), (False, S - 1)])
def test_cudnn_gets_rows_that_begin_at_0(cudnn_in_xla, is_right_padded, size, has_sinks, window):
    """Forward and gradient equal the einsum; a nan at padded positions goes nowhere."""
    mask = (np.sort(MASK, axis=1)[:, ::-1] if is_right_padded else MASK)[:, :size]
    args = [*(x[:, :size] for x in sequences(jnp.bfloat16)), jnp.asarray(SINKS)]

    def run(q, k, v, sinks):
        visible = attention.causal(jnp.asarray(mask), is_right_padded=is_right_padded)
        scores = attention.Scores(window, sinks=sinks if has_sinks else None)
        return attention.attend_causal(q, k, v, visible, scores=scores, implementation="cudnn")

    def wanted(q, k, v, sinks):
        scores = attention.Scores(sinks=sinks if has_sinks else None)
        bias = attention.causal_bias(attention.causal(jnp.asarray(mask)), window)
        return attention.attend(q, k, v, bias, scores)

    def value_and_grad(f):
        def loss(*args):
            out = f(*args)
            valid = jnp.where(mask[:, :, None, None, None], out, 0).astype(jnp.float32)
            return jnp.sum(valid**2), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*args)

    (*grads, of_sinks), out = value_and_grad(run)
    (*wanted_grads, wanted_of_sinks), wanted_out = value_and_grad(wanted)
    # Sums of 39 to 83 over the positions; their terms are bfloat16, with errors of 2^-9 each.
    np.testing.assert_allclose(of_sinks, wanted_of_sinks, rtol=2**-9)
    # Rows are moved there and back; nothing is added up into places.
    assert "scatter" not in str(jax.make_jaxpr(lambda *args: jax.vjp(run, *args)[1](out))(*args))
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert_close_where_valid(out, wanted_out, jnp.bfloat16, mask)
    for one, other in zip(grads, wanted_grads, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.isfinite(one).all() and (one[~mask] == 0).all()
        # Gradients of 12 outputs add up at one key: values of about 8, half a unit of 2^-7.
        np.testing.assert_allclose(one[mask], other[mask], atol=6e-2, rtol=4e-2)


def test_kernels_are_selected_where_they_support_the_arguments():
    """Platforms, dtypes, head sizes, scores, two blocks at least, and meshes that divide heads."""
    sinks, mesh = jnp.asarray(SINKS), Mesh(np.array(jax.devices()[:4]), ("model",))
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
    scores = attention.Scores(window, sinks=jnp.asarray(SINKS) if has_sinks else None)
    run = functools.partial(attention.attend_causal, *sequences(jnp.bfloat16), scores=scores)
    visible = attention.causal(jnp.asarray(MASK))
    got, wanted = (run(visible, implementation=name) for name in ("cudnn", "xla"))
    assert_close_where_valid(got, wanted, jnp.bfloat16)


N, C, M = 5, 40, 8
LENGTHS = np.array([0, 1, 16, 17, 40], np.int32)  # none, one, a whole block, one more, all


def cached(dtype, index):
    """Arguments of attend_cached."""
    q, k, v = arrays((N, G, R, E), (N, G, E), (N, G, E), dtype=dtype)
    old = arrays((N, G, C, E), (N, G, C, E), dtype=dtype, seed=1)
    new = arrays((N, G, M, E), (N, G, M, E), dtype=dtype, seed=2)
    return {
        "q": q,
        "k": k,
        "v": v,
        "history": KVCache(*old),
        "recent": KVCache(*new),
        "index": jnp.int32(index),
        "history_length": jnp.asarray(LENGTHS),
    }


@DTYPES
def test_one_token_over_both_parts_of_the_cache_is_attention_over_all(dtype):
    """Slots of every length."""
    index = 3
    args = cached(dtype, index)
    out, recent = jax.jit(attention.attend_cached)(**args)
    np.testing.assert_array_equal(recent.keys[:, :, index], args["k"])
    np.testing.assert_array_equal(recent.values[:, :, index], args["v"])
    for slot, length in enumerate(LENGTHS):
        parts = [
            np.concatenate(
                [
                    np.asarray(x, np.float32)[slot, :, :n]
                    for x, n in ((old, length), (new, index + 1))
                ],
                axis=1,
            ).swapaxes(0, 1)[None]
            for old, new in zip(args["history"], recent, strict=True)
        ]
        all_visible = np.ones((1, 1, length + index + 1), bool)
        wanted = by_hand(args["q"][slot][None, None], *parts, all_visible)[0, 0]
        tolerance = TOLERANCES[dtype]
        np.testing.assert_allclose(
            np.asarray(out[slot], np.float64), wanted, atol=tolerance, rtol=tolerance
        )


def test_kernels_run_on_each_devices_part_of_a_mesh():
    """Key/value heads over two devices, rows over two: the same numbers as one device."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.NamedSharding(mesh, jax.P("data", "model"))
    q, k, v = sequences()
    scores = attention.Scores(4, sinks=jnp.asarray(SINKS))

    @functools.partial(jax.jit, static_argnames="sharding")
    def run(q, k, v, mask, sharding):
        return splash.attend(q, k, v, attention.causal(mask), scores, sharding)

    out = run(q, k, v, MASK, sharding=sharding)
    wanted = attention.attend_causal(q, k, v, attention.causal(jnp.asarray(MASK)), scores=scores)
    assert_close_where_valid(out, wanted)
    with pytest.raises(ValueError, match="only slots and heads can be divided"):
        run(q, k, v, MASK, sharding=jax.NamedSharding(mesh, jax.P(None, None, "model")))


@pytest.fixture
def cudnn_calls(monkeypatch):
    """Devices count as GPUs, and cuDNN's attention has JAX's rule for its arguments on a mesh.

    Returns a list that gets the number of parts of the heads in each call.
    """
    real, calls = jax.nn.dot_product_attention, []

    def fake(q, k, v, *, implementation, query_seq_lengths, key_value_seq_lengths, **options):
        assert implementation == "cudnn"

        def run(q, k, v):
            return real(q, k, v, **options)

        def partition(mesh, shapes, result):
            own = tuple(x.sharding for x in shapes)
            if len({x.spec for x in own}) > 1:
                raise ValueError("Query, key and value should have same sharding.")
            calls.append(q.shape[2] // own[0].shard_shape(q.shape)[2])
            return mesh, run, own[0], own

        divided = custom_partitioning(run)
        rule = "b t n h, b0 s g h0, b1 s1 g1 h1 -> b t n h"
        divided.def_partition(partition=partition, sharding_rule=rule)
        return divided(q, k, v)

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    monkeypatch.setattr(site_module, "platform_of", lambda device: "cuda")
    return calls


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_programs_of_several_gpus_use_cudnn_where_they_divide_all_heads(cudnn_calls, num_kv_heads):
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
    decoder = Decoder(
        config,
        compute_dtype=jnp.bfloat16,
        eos_ids=(),
        pad_id=0,
        prompt_tokens=8,
        max_length=16,
        site=site,
    )
    start = make_start_program(config, scoring, max_new_tokens=2, site=site)
    distances = make_distance_program(config, scoring, site)
    for program in (
        lambda: start(held, tokens, *lengths),
        lambda: distances(held, held, tokens, lengths[0], lengths[0], t=2),
        lambda: decoder.extend(
            held, decoder.new_cache(decoder.num_rows, held), tokens, lengths[0], None
        ),
    ):
        cudnn_calls.clear()
        assert np.isfinite(np.asarray(jax.tree.leaves(program())[0], np.float32)).all()
        assert set(cudnn_calls) == ({2} if num_kv_heads == 2 else set())
