# SPDX-License-Identifier: Apache-2.0
"""Live comparison with transformers and peft, where torch is installed (the extra `parity`).

test_families and test_encoder compare our models with golden files. Here the installed transformers
computes the golden numbers from what we write, and we read what it writes.
"""

import pytest
from fake_models import (
    GOLDEN,
    adapted,
    assert_close,
    assert_equal,
    load_folder,
    make_folder,
    trained_adapters,
)

pytest.importorskip("torch")

import numpy as np
import torch
import transformers
from golden import make_golden

from tba_jax.models import encoder, lora, rope
from tba_jax.models.hf import adapter_files, families, hf_weights

torch.set_num_threads(1)


@pytest.mark.parametrize("name", make_golden.MODELS)
def test_transformers_computes_the_golden_numbers_from_our_export_and_is_read(name, tmp_path):
    config, params, settings = load_folder(GOLDEN / name)
    hf_weights.save(tmp_path / "ours", config, params, settings)
    model, report = make_golden.model_class(name).from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    golden = np.load(GOLDEN / f"{name}.npz")
    found = make_golden.outputs(model.eval(), golden["tokens"])
    assert_close(found["logits"], golden["logits"])
    for side in ("left", "right"):
        at = ... if config.num_labels else golden[f"{side}_mask"]
        assert_close(found[f"{side}_logits"][at], golden[f"{side}_logits"][at])
    model.save_pretrained(tmp_path / "theirs")
    again, read, _ = load_folder(tmp_path / "theirs")
    assert again == config
    assert_equal(read, params)


@pytest.mark.parametrize("name", make_golden.ENCODERS)
def test_transformers_computes_the_golden_numbers_of_encoders_and_is_read(name, tmp_path):
    model = make_golden.model_class(name).from_pretrained(GOLDEN / name)
    golden = np.load(GOLDEN / f"{name}.npz")
    found = make_golden.encoder_outputs(model.eval())
    assert_equal(found["tokens"], golden["tokens"])
    for key in golden.keys() - {"tokens", "mask"}:
        assert_close(found[key], golden[key])
    model.save_pretrained(tmp_path)
    config, params = encoder.load(tmp_path)
    wanted_config, wanted = encoder.load(GOLDEN / name)
    assert config == wanted_config
    assert_equal(params, wanted)


# peft 0.21 reads a property that transformers 5.24 calls deprecated. It has no name for the
# tensors of delta layers.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt_oss"])
def test_peft_reads_the_adapters_that_a_server_gets_and_writes_the_same(name, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed (the extra `parity`)")
    config, base = make_folder(tmp_path / "base", name)
    of_mlp = () if config.num_experts else ("gate", "up", "down")
    policy = lora.with_adapters(config, 4, 16.0, ("q", "k", "v", "o", *of_mlp))
    adapters = trained_adapters(policy)
    adapter_files.write(tmp_path / "ours", policy, adapters, str(tmp_path / "base"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    )
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        start = plain(tokens).logits.numpy()
        model = peft.PeftModel.from_pretrained(plain, tmp_path / "ours")
        want = model(tokens).logits.numpy()
    assert np.abs(want - start).max() > 0.1
    # Float32 products summed in another order.
    np.testing.assert_allclose(adapted(base, adapters, policy), want, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "theirs")
    found, read = adapter_files.read(tmp_path / "theirs", config)
    assert found.adapters.scale == policy.adapters.scale
    assert_equal(read, adapters)


# The rotary settings of Llama 3.1, Qwen2.5 with its extension, Llama 2 stretched, and Pythia.
REAL_SCALINGS = {
    "plain": {"rope_theta": 1e6},
    "llama3": {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "linear": {"rope_theta": 1e4, "factor": 2.5},
}


@pytest.mark.parametrize("name", REAL_SCALINGS)
def test_rotary_frequencies_of_real_sizes_equal_those_of_transformers(name):
    """Short rows do not show them; at position 10^5 a relative error of 1e-6 is 0.1 radians."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 131072}
    settings = REAL_SCALINGS[name] | {"rope_type": "default" if name == "plain" else name}
    theirs = transformers.LlamaConfig(**sizes, rope_parameters=settings)
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    config = families.transformer_config(theirs.to_dict() | {"architectures": None})
    found = rope.frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
    # One unit in the last place of float32 (1.2e-7), or two after a scaling.
    np.testing.assert_allclose(found, embedding.inv_freq.numpy(), rtol=2.5e-7)
    if name == "yarn":
        factor = config.rope_scaling.attention_factor
        assert factor == pytest.approx(embedding.attention_scaling, rel=1e-12)
