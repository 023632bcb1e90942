# SPDX-License-Identifier: Apache-2.0
"""Live comparison with transformers, where torch is installed (the extra `parity`).

Both directions for every family and option: its folder read by us, and ours read by it. How the
random models are made, and ties between greedy tokens kept out, is in tests/golden/make_golden.py.
"""

import asyncio
import copy

import pytest
from fake_models import (
    adapted,
    assert_close,
    load_folder,
    logits_of,
    random_params,
    tiny_config,
    trained_adapters,
    write_word_tokenizer,
)

pytest.importorskip("torch")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from golden import make_golden
from hf_settings import hf_config
from jax.sharding import Mesh

from tba_jax.devices.site import Site
from tba_jax.models import classifier, lora, rope
from tba_jax.models.hf import adapter_files, families, hf_weights
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.reward_models import RewardModel
from tba_jax.rewards.scores import Completions

NUM_GREEDY = 200
MODELS = make_golden.MODELS
_NEW = (
    *("qwen3", "qwen3_moe", "gemma2", "gemma3_text", "mistral", "olmo3", "gpt_oss"),
    *("qwen3_5_text", "qwen3_5_moe_text"),
)
torch.set_num_threads(1)


def ours(config, params, tokens, mask):
    """Logits, or scores of a classifier."""
    tokens, mask = jnp.asarray(tokens), jnp.asarray(mask)
    if not config.num_labels:
        return logits_of(config, params, tokens, mask)
    return classifier.classify(params, tokens, mask, config=config, compute_dtype=jnp.float32)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_are_the_same_here_and_after_export(name, tmp_path):
    longer = copy.deepcopy(MODELS[name])
    longer.max_position_embeddings = 256
    model, found = make_golden.model_and_outputs(longer, NUM_GREEDY)
    model.save_pretrained(tmp_path / "theirs")
    config, params, _ = load_folder(tmp_path / "theirs")
    tokens = found["tokens"]
    plain = ours(config, params, tokens, tokens >= 0)
    assert_close(plain, found["logits"])
    for side in ("left", "right"):
        mask = found[f"{side}_mask"]
        got, want = ours(config, params, found[f"{side}_tokens"], mask), found[f"{side}_logits"]
        assert_close(*((got, want) if config.num_labels else (got[mask], want[mask])))
    if not config.num_labels:
        whole = np.concatenate([tokens, found["greedy"]], axis=1)
        greedy = logits_of(config, params, whole, whole >= 0).argmax(-1)
        np.testing.assert_array_equal(greedy[:, tokens.shape[1] - 1 : -1], found["greedy"])

    # Our own config.json, not theirs: it must say the same architecture.
    written = hf_config(config, eos_token_id=2, pad_token_id=make_golden.PAD)
    hf_weights.save(tmp_path / "ours", config, params, written)
    again, report = make_golden.model_class(MODELS[name]).from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float32
    )
    assert type(again) is type(model)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = again.eval()(torch.tensor(tokens)).logits.numpy()
    # The same code on the same weights; 1 ulp of slack for another order of threads.
    np.testing.assert_allclose(logits, found["logits"], rtol=0, atol=1e-6 * np.abs(plain).max())


@pytest.mark.parametrize("family", ["llama", "gpt2", *_NEW])
def test_transformers_computes_what_base_and_adapters_do_from_a_merged_export(family, tmp_path):
    config = tiny_config(family=family)
    further = ("delta_q", "delta_o") if "delta" in config.pattern else ()
    of_mlp = () if config.num_experts else ("down",)
    policy = lora.with_adapters(config, 4, 16.0, ("q", "v", "o", *of_mlp, *further))
    adapters, tokens = trained_adapters(policy), np.arange(12).reshape(2, 6)
    for seed in range(20):
        base = random_params(config, seed)
        merged = lora.merge(base, adapters, config=policy)
        hf_weights.save(tmp_path, config, merged, hf_config(config))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        with torch.no_grad():
            want = theirs(torch.tensor(tokens)).logits.numpy()
        # Random delta layers amplify rounding: transformers itself is 6e-5 from its float64 logits
        # with the first seed. As in `make_golden`, such a seed is passed over.
        if "delta" not in config.pattern or (
            make_golden.amplified(theirs, tokens, want) <= make_golden.MAX_AMPLIFIED
        ):
            break
    else:
        pytest.fail("every seed amplifies rounding")
    got = adapted(base, adapters, policy)
    assert np.abs(want).max() > 0.5
    # Float32 products summed in another order, and merged before.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


# peft 0.21 reads a property that transformers 5.24 calls deprecated.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("family", ["llama", *(x for x in _NEW if not x.startswith("qwen3_5"))])
def test_peft_reads_the_adapters_that_a_server_gets_and_writes_the_same(family, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed (the extra `parity`)")
    config = tiny_config(family=family)
    of_mlp = () if config.num_experts else ("gate", "up", "down")
    policy = lora.with_adapters(config, 4, 16.0, ("q", "k", "v", "o", *of_mlp))
    base, adapters = random_params(config), trained_adapters(policy)
    hf_weights.save(tmp_path / "base", config, base, hf_config(config))
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
    jax.tree.map(np.testing.assert_array_equal, read, adapters)


REWARD_MODELS = {
    "gpt_neox": MODELS["gpt_neox_reward"],
    "llama": make_golden._llama(num_labels=1, architectures=["LlamaForSequenceClassification"]),
}


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_scores_of_a_reward_model_equal_those_of_transformers(name, tmp_path):
    """Prompts and responses of many lengths through the scorer; there row by row."""
    model, _ = make_golden.model_and_outputs(REWARD_MODELS[name])
    model.save_pretrained(tmp_path / "model")
    config = load_folder(tmp_path / "model")[0]
    write_word_tokenizer(tmp_path / "model", config.vocab_size, eos=1, pad=0)
    path = str(tmp_path / "model")
    site = Site(Mesh(jax.devices()[:1], ("model",)))
    scorer = RewardModel(path, policy_tokenizer=Tokenizer.load(path), site=site)
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, config.vocab_size, rng.integers(4, 100)) for _ in range(20)]
    rows = [np.append(row, 1) for row in rows]
    texts = [" ".join(f"<{i}>" for i in row) for row in rows]
    responses = Completions(
        [text.split(" ", 3)[0] for text in texts],
        [""] * len(rows),  # same vocabulary: the ids are scored
        {},
        [row[1:] for row in rows],
        [True] * len(rows),
    )
    got = [score.reward for score in asyncio.run(scorer.score(responses))]
    with torch.no_grad():
        want = [model.eval()(torch.tensor(row[None])).logits[0, 0].item() for row in rows]
    assert np.std(want) > 0.01
    np.testing.assert_allclose(got, want, atol=1e-4)


# The rotary settings of Llama 3.1, Qwen2.5 with its extension, Llama 2 stretched, and Pythia.
_LONG = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 131072}
REAL_SCALINGS = {
    "plain": {"rope_theta": 1000000.0, "rope_type": "default"},
    "llama3": make_golden.LLAMA3
    | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    "yarn": make_golden.YARN | {"rope_theta": 1000000.0, "original_max_position_embeddings": 32768},
    "linear": make_golden.LINEAR | {"rope_theta": 10000.0},
}


@pytest.mark.parametrize("name", REAL_SCALINGS)
def test_rotary_frequencies_of_real_sizes_equal_those_of_transformers(name):
    """Short rows do not show them; at position 10^5 a relative error of 1e-6 is 0.1 radians."""
    theirs = transformers.LlamaConfig(**_LONG, rope_parameters=dict(REAL_SCALINGS[name]))
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    config = families.transformer_config(theirs.to_dict() | {"architectures": None})
    found = rope.frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
    # One unit in the last place of float32 (1.2e-7), or two after a scaling.
    np.testing.assert_allclose(found, embedding.inv_freq.numpy(), rtol=2.5e-7)
    if name == "yarn":
        factor = config.rope_scaling.attention_factor
        assert factor == pytest.approx(embedding.attention_scaling, rel=1e-12)
