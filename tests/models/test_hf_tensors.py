# SPDX-License-Identifier: Apache-2.0
"""Tensor names and layouts of Hugging Face checkpoints: what belongs where, and nothing twice."""

import ml_dtypes
import numpy as np
import pytest
from fake_models import FAMILIES, tiny_config

from tba_jax.models import transformer
from tba_jax.models.hf import families

ALL = {name: {"family": name} for name in FAMILIES} | {
    "llama_biased": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "tie_embeddings": False},
    "gpt_neox_without_bias": {"family": "gpt_neox", "qkv_bias": False, "o_bias": False},
    "gpt2_reward": {"family": "gpt2", "num_labels": 1},
    "qwen3_classifier": {"family": "qwen3", "num_labels": 3, "tie_embeddings": False},
}


def leaf_of(params, tensor, name):
    """A leaf of our tree, or the tensor's layer of it, as a view."""
    return params["layers"][name][tensor.layer] if tensor.layer >= 0 else params[name]


@pytest.mark.parametrize("name", ALL)
def test_every_element_of_every_leaf_belongs_to_one_tensor(name):
    config = tiny_config(**ALL[name])
    abstract = transformer.abstract_params(config)
    counts = {k: np.zeros(x.shape, int) for k, x in abstract.items() if k != "layers"}
    counts["layers"] = {k: np.zeros(x.shape, int) for k, x in abstract["layers"].items()}
    for tensor in families.tensors(config).values():
        size = np.prod(tensor.shape) * max(1, tensor.num_experts)
        assert sum(leaf_of(counts, tensor, p).size for p in tensor.leaves) == size
        for leaf in tensor.leaves:
            view = leaf_of(counts, tensor, leaf)
            view += 1
    for leaf in [*counts.pop("layers").values(), *counts.values()]:
        np.testing.assert_array_equal(leaf, 1)


@pytest.mark.parametrize("name", ALL)
def test_join_undoes_split_without_copies_or_casts(name):
    config = tiny_config(**ALL[name])
    abstract = transformer.abstract_params(config)
    rng = np.random.default_rng(0)
    for full_name, tensor in families.tensors(config).items():
        theirs = rng.normal(size=tensor.shape).astype(ml_dtypes.bfloat16)
        ours = tensor.split(theirs)
        for leaf, array in zip(tensor.leaves, ours, strict=True):
            spec = (abstract["layers"] if tensor.layer >= 0 else abstract)[leaf]
            shape = spec.shape[1:] if tensor.layer >= 0 else spec.shape
            shape = shape[1:] if tensor.num_experts else shape
            assert array.shape == shape, full_name
            assert np.shares_memory(array, theirs) and array.dtype == theirs.dtype
        back = tensor.join(ours)
        assert back.shape == tensor.shape and back.dtype == theirs.dtype
        np.testing.assert_array_equal(back, theirs)


def test_names_without_the_trunk_prefix_are_aliases():
    """The files of GPT-2 itself say wte.weight; GPT-NeoX has had two names for its head."""
    gpt2, neox = tiny_config(family="gpt2"), tiny_config(family="gpt_neox")
    assert families.aliases("transformer.h.0.ln_1.bias", gpt2) == ("h.0.ln_1.bias",)
    assert families.aliases("embed_out.weight", neox) == ("lm_head.weight",)
    assert families.aliases("score.weight", tiny_config(num_labels=1)) == ()
    for family in FAMILIES:
        config = tiny_config(family=family, tie_embeddings=False)
        names = list(families.tensors(config))
        names += [other for name in names for other in families.aliases(name, config)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama", "lm_head.weight"),
        ("gpt_neox", "gpt_neox.layers.5.attention.bias"),
        ("gpt_neox", "gpt_neox.layers.5.attention.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.5.attention.rotary_emb.inv_freq"),
        ("gpt2", "h.0.attn.bias"),
        ("gpt2", "transformer.h.0.attn.masked_bias"),
        ("gpt2", "lm_head.weight"),
    ],
)
def test_buffers_and_copies_of_a_tied_head_are_spare(family, name):
    assert families.is_spare(name, tiny_config(family=family))


def test_parameters_are_never_spare():
    for changes in ALL.values():
        config = tiny_config(**changes)
        assert not any(families.is_spare(name, config) for name in families.tensors(config))
    assert not families.is_spare("lm_head.weight", tiny_config(tie_embeddings=False))
    assert not families.is_spare("lm_head.weight", tiny_config(num_labels=1))
    assert not families.is_spare("score.weight", tiny_config())
    assert not families.is_spare("model.layers.0.attention.dense.bias", tiny_config())
