# SPDX-License-Identifier: Apache-2.0
"""Tensor names and layouts of Hugging Face checkpoints: what belongs where, and nothing twice."""

import math

import jax
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


@pytest.mark.parametrize("name", ALL)
def test_every_element_of_every_leaf_belongs_to_one_tensor(name):
    config = tiny_config(**ALL[name])
    counts = jax.tree.map(
        lambda x: np.zeros(x.shape, int), dict(transformer.abstract_params(config))
    )
    for tensor in families.tensors(config).values():
        tree = counts["layers"] if tensor.at else counts
        for leaf, shape in zip(tensor.leaves, tensor.shapes, strict=True):
            assert tree[leaf][tensor.at].shape == shape
            tree[leaf][tensor.at] += 1
        assert sum(map(math.prod, tensor.shapes)) == math.prod(tensor.shape)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 1), counts)


def test_join_undoes_split_without_copies_or_casts():
    rng = np.random.default_rng(0)
    tensors = {}
    for changes in ALL.values():
        found = families.tensors(tiny_config(**changes)).values()
        tensors |= {(x.pattern, len(x.leaves), len(x.at)): x for x in found}
    assert len(tensors) > 20
    for tensor in tensors.values():
        theirs = rng.normal(size=tensor.shape).astype(ml_dtypes.bfloat16)
        ours = tensor.split(theirs)
        assert tuple(x.shape for x in ours) == tensor.shapes
        assert all(np.shares_memory(x, theirs) for x in ours)
        back = tensor.join(ours)
        assert back.dtype == theirs.dtype
        np.testing.assert_array_equal(back, theirs)


@pytest.mark.parametrize(
    ("family", "name", "written"),
    [
        ("llama", "model.norm.weight", "model.norm.weight"),
        ("llama", "score.weight", "score.weight"),
        # Files of the trunk alone, of a head with two names, and of multimodal models.
        ("gpt2", "h.0.ln_1.bias", "transformer.h.0.ln_1.bias"),
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
        ("gemma3_text", "language_model.model.norm.weight", "model.norm.weight"),
        ("gemma3_text", "model.language_model.norm.weight", "model.norm.weight"),
        # Tensors without use.
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("gpt_neox", "gpt_neox.layers.5.attention.bias", None),
        ("gpt_neox", "gpt_neox.layers.5.attention.masked_bias", None),
        ("gpt2", "h.0.attn.bias", None),
        ("gemma3_text", "model.vision_tower.x", None),
        ("qwen3_5_text", "mtp.x", None),
        ("llama", "model.layers.0.attention.dense.bias", "model.layers.0.attention.dense.bias"),
    ],
)
def test_names_in_files_become_those_that_are_written(family, name, written):
    assert families.written_name(name, tiny_config(family=family)) == written


def test_written_names_stay():
    for changes in ALL.values():
        config = tiny_config(**changes)
        assert all(families.written_name(x, config) == x for x in families.tensors(config))
