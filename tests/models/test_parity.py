# SPDX-License-Identifier: Apache-2.0
"""Live comparison with transformers and peft, where torch is installed (the extra `parity`).

test_families and test_encoder compare whole models with golden files, which transformers wrote.
"""

import pytest
from fake_models import adapted, assert_equal, make_folder, trained_adapters

pytest.importorskip("torch")

import numpy as np
import torch
import transformers

from tba_jax.models import lora, rope
from tba_jax.models.hf import adapter_files, families

torch.set_num_threads(1)


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
