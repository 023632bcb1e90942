# SPDX-License-Identifier: Apache-2.0
"""Windows, sinks, caps and experts: in decoding, on meshes, and in files."""

import functools
import json

import fake_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import slow
from fake_models import FAMILIES, load_folder, make_folder, random_params, tiny_config
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.placement import MeshShape, trainer_mesh
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.models import activations, experts, quantized, transformer
from tba_jax.models.hf import families
from tba_jax.models.logprobs import packed_token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding, param_shardings

WITH_DELTA = ("qwen3_5_text", "qwen3_5_moe_text")
NEW = ("qwen3_moe", "gemma2", "gemma3_text", "mistral", "olmo3", "gpt_oss", *WITH_DELTA)
WITH_EXPERTS = ("qwen3_moe", "gpt_oss", "qwen3_5_moe_text")
# Sizes that meshes of two devices divide.
EVEN = {"vocab_size": 24, "head_dim": 8}
PROMPTS = [np.array(p, np.int32) for p in ([3, 4, 5, 6, 7, 8, 9], [6], [7, 8, 9, 10, 11])]


@functools.partial(jax.jit, static_argnames="config")
def scoring_logits(params, row, config):
    """Logits [t v] of one plain forward pass."""
    positions = jnp.arange(row.shape[1])[None]
    kwargs = {"config": config, "compute_dtype": jnp.float32}
    hidden = transformer.apply(params, row, positions, row >= 0, **kwargs)
    return transformer.unembed(params, hidden, **kwargs)[0]


def scored(config, params, prompt, response, temperature):
    """Log-probs [t] of a response."""
    row = np.zeros((1, 32), np.int32)  # one length, one program; what follows a token is not seen
    n, end = len(prompt), len(prompt) + len(response)
    row[0, :end] = np.concatenate([prompt, response])
    logits = np.asarray(scoring_logits(params, row, config))[n - 1 : end - 1]
    logprobs = np.asarray(jax.nn.log_softmax(logits / temperature))
    return np.take_along_axis(logprobs, response[:, None], axis=-1)[:, 0]


@pytest.mark.parametrize("num_devices", [1, slow(2)])
@pytest.mark.parametrize("family", NEW)
def test_decoding_draws_from_what_scoring_computes(family, num_devices):
    """Chunks of 4 steps and windows of 4 tokens, so that windows span both parts of the cache."""
    config = tiny_config(family=family, **EVEN)
    params = random_params(config)
    site = ANY_DEVICE
    if num_devices > 1:
        site = Site(Mesh(np.array(jax.devices()[:num_devices]), ("model",)))
        params = jax.device_put(params, param_shardings(config, site.mesh))
    decoder = Decoder(
        config,
        compute_dtype=jnp.float32,
        eos_ids=(),
        pad_id=2,
        prompt_tokens=8,
        max_length=32,
        chunk_steps=4,
        site=site,
    )
    settings = SamplingSettings(20, temperature=1.3)
    out = fake_models.decode(
        decoder,
        params,
        PROMPTS,
        num_samples=2,
        settings=settings,
        key=jax.random.key(0),
        num_slots=3,
    )
    for i, prompt in enumerate(PROMPTS):
        for j in range(2):
            want = scored(config, params, prompt, out.tokens[i, j, :20], 1.3)
            np.testing.assert_allclose(out.token_logprobs[i, j, :20], want, atol=2e-5)


def mesh_of(*shape):
    return trainer_mesh(np.array(jax.devices()[: np.prod(shape)]), MeshShape(*shape))


MESHES = [(family, (2, 2, 2)) for family in NEW]
MESHES += [(family, shape) for family in WITH_EXPERTS for shape in ((1, 2, 2, 2), (1, 1, 1, 4))]
BY_DEFAULT = [("gemma3_text", (2, 2, 2)), ("gpt_oss", (1, 2, 2, 2))]


def log_probs_and_gradients(family, site):
    """Log-probs of packed rows, and the gradients of the sum of their squares."""
    config = tiny_config(family=family, **EVEN)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 23, (8, 16)).astype(np.int32)
    segments = np.repeat([[1, 2]], 8, axis=0).repeat(8, axis=1).astype(np.int32)
    positions = np.tile(np.arange(8), (8, 2)).astype(np.int32)
    params = random_params(config)
    if site is not ANY_DEVICE:
        params = jax.device_put(params, param_shardings(config, site.mesh))

    def total(params):
        found = packed_token_logprobs(
            params,
            tokens,
            segments,
            positions,
            config=config,
            scoring=Scoring(),
            remat="layers",
            sharding=ComputeSharding(config, site),
        )
        return jnp.sum(found**2), found

    return jax.device_get(jax.jit(jax.value_and_grad(total, has_aux=True))(params))


@functools.cache
def on_one_device(family):
    return log_probs_and_gradients(family, ANY_DEVICE)


@pytest.mark.parametrize(
    ("family", "shape"),
    # By default windows, and experts over an axis of their own.
    [x if x in BY_DEFAULT else slow(*x) for x in MESHES],
)
def test_log_probs_and_gradients_on_a_mesh_are_those_of_one_device(family, shape):
    got = log_probs_and_gradients(family, Site(mesh_of(*shape)))
    wanted = on_one_device(family)
    assert np.abs(wanted[0][1]).max() > 1
    # Float32 sums in another order, of gradients of order 1 to 1000. Delta layers amplify rounding
    # tenfold (see `bfloat16_kl`): their gradients of 180 differ by 4e-3.
    atol = 2e-3 * (10 if family in WITH_DELTA else 1)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=atol),
        got,
        wanted,
    )
    np.testing.assert_allclose(got[0][1], wanted[0][1], atol=2e-5)


def test_experts_are_divided_over_their_axis():
    config = tiny_config(family="qwen3_moe", **EVEN)
    shardings = param_shardings(config, mesh_of(1, 2, 1, 2))["layers"]
    assert tuple(shardings["expert_gate"].spec) == (None, ("expert", "fsdp"), None, "model")
    with pytest.raises(ValueError, match="axis 'experts' of size 4 cannot be divided over 8"):
        param_shardings(config, mesh_of(1, 1, 1, 8))
    with pytest.raises(ValueError, match="mesh.expert=2: this model .llama. has no experts"):
        param_shardings(tiny_config(), mesh_of(1, 1, 1, 2))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_token_gets_the_weighted_sum_of_its_best_experts(family):
    config = tiny_config(family=family)
    layer = jax.tree.map(lambda x: np.asarray(x[0], np.float64), random_params(config)["layers"])
    rows = np.random.default_rng(1).normal(size=(9, config.hidden_size))
    leaves = {name: layer[name] for name in experts.LEAVES if name in layer}
    logits = rows @ layer["router"] + layer.get("router_bias", 0)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.zeros_like(rows)
    for n, (row, each) in enumerate(zip(rows, weights, strict=True)):
        best = np.argsort(-each)[: config.experts_per_token]
        for i in best:

            def product(name, x, i=i):
                bias = layer.get(f"{name}_bias", np.zeros(config.num_experts))
                return x @ layer[name][i] + bias[i]

            inner = activations.gated(
                config.activation, product("expert_gate", row), product("expert_up", row)
            )
            wanted[n] += product("expert_down", np.asarray(inner)) * each[i] / each[best].sum()
    with jax.enable_x64(True):
        got = experts.feed_forward(
            jnp.asarray(rows), jax.tree.map(jnp.asarray, leaves), config=config
        )
    np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("family", dict.fromkeys((*WITH_EXPERTS, *WITH_DELTA)))
def test_eight_bit_matrices_of_experts_and_delta_layers_are_near_exact_ones(family):
    config = tiny_config(family=family)
    exact = transformer.unstack_layers(random_params(config), config)
    tokens = jnp.asarray([[3, 4, 5, 6, 7, 8]])
    kwargs = {"config": config, "compute_dtype": jnp.float32}
    positions = jnp.arange(6)[None]

    def states(weights):
        return transformer.apply(weights, tokens, positions, tokens >= 0, **kwargs)

    rounded = quantized.quantize(exact, "int8")
    of_kind = {"expert_gate": config.num_experts, "delta_q": family in WITH_DELTA}
    for name, has_matrix in of_kind.items():
        assert not has_matrix or rounded["layers"][0][name].dtype == jnp.int8
    wanted, got = states(exact), states(rounded)
    assert 0 < np.abs(wanted - got).max() < 0.1 * np.abs(wanted).max()


def _fused(tensors):
    """The tensors of a folder as transformers 5 has them in memory."""
    out = {name: x for name, x in tensors.items() if ".experts." not in name}
    for i in range(2):
        start = f"model.layers.{i}.mlp.experts."

        def stack(kind, start=start):
            return np.stack([tensors[f"{start}{e}.{kind}_proj.weight"] for e in range(4)])

        gate_up = np.concatenate([stack("gate"), stack("up")], axis=1)
        out |= {f"{start}gate_up_proj": gate_up, f"{start}down_proj": stack("down")}
    return out


def test_fused_and_separate_expert_tensors_are_the_same_model(tmp_path):
    _, params = make_folder(tmp_path, family="qwen3_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert tensors["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (20, 16)
    jax.tree.map(np.testing.assert_array_equal, load_folder(tmp_path)[1], params)
    save_file(_fused(tensors), file, {"format": "pt"})
    jax.tree.map(np.testing.assert_array_equal, load_folder(tmp_path)[1], params)


def test_four_bit_experts_are_read_exactly(tmp_path):
    """Two values per byte, the low half first; a scale 2^(byte - 127) for 32 values."""
    sizes = {"family": "gpt_oss", "hidden_size": 32, "mlp_size": 32, "num_layers": 1}
    _, params = make_folder(tmp_path, **sizes, pattern=("window",))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    rng, wanted = np.random.default_rng(0), {}
    for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
        full = f"model.layers.0.mlp.experts.{name}"
        del tensors[full]
        blocks = rng.integers(0, 256, (4, rows, 1, 16)).astype(np.uint8)
        scales = rng.integers(120, 130, (4, rows, 1)).astype(np.uint8)
        tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
        wanted[name] = np.zeros((4, rows, 32), np.float32)
        for e, row, column in np.ndindex(4, rows, 32):
            byte = blocks[e, row, 0, column // 2]
            half = byte % 16 if column % 2 == 0 else byte // 16
            wanted[name][e, row, column] = values[half] * 2.0 ** (int(scales[e, row, 0]) - 127)
    save_file(tensors, file, {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = load_folder(tmp_path)[1]["layers"]
    gate_up = wanted["gate_up_proj"].swapaxes(1, 2)
    np.testing.assert_array_equal(found["expert_gate"][0], gate_up[..., ::2])
    np.testing.assert_array_equal(found["expert_up"][0], gate_up[..., 1::2])
    np.testing.assert_array_equal(found["expert_down"][0], wanted["down_proj"].swapaxes(1, 2))
    np.testing.assert_array_equal(found["q"], params["layers"]["q"])


def test_the_language_model_of_a_multimodal_folder_is_read(tmp_path):
    _, params = make_folder(tmp_path, family="gemma3_text")
    file = tmp_path / "model.safetensors"
    tensors = {f"language_model.{name}": x for name, x in load_file(file).items()}
    save_file(tensors | {"vision_tower.x": np.zeros(3, np.float32)}, file, {"format": "pt"})
    inner = json.loads((tmp_path / "config.json").read_text())
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": inner,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config, found, hf_config = load_folder(tmp_path)
    assert config == families.transformer_config(inner)
    assert hf_config["model_type"] == "gemma3_text"  # what an export is
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_every_new_family_is_covered():
    assert set(NEW) == set(FAMILIES) - {"llama", "qwen2", "qwen3", "gpt_neox", "gpt2"}
