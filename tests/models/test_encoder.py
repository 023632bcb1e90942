# SPDX-License-Identifier: Apache-2.0
"""The RoBERTa classifier and BERT sentence embeddings: values, padding, and bad files.

The golden files come from tests/golden/make_golden.py (transformers 5.23.0, torch 2.13.0), and
test_parity computes them with the transformers that is installed.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tba_jax.models import encoder

GOLDEN = Path(__file__).parents[1] / "golden"
STATIC = ("config", "compute_dtype")
CLASSIFY = jax.jit(encoder.classify, static_argnames=STATIC)
EMBED = jax.jit(encoder.embed_sentences, static_argnames=STATIC)
ENCODE = jax.jit(encoder.encode, static_argnames=STATIC)


@pytest.fixture(scope="module")
def roberta():
    return encoder.load(GOLDEN / "roberta")


@pytest.fixture(scope="module")
def bert():
    return encoder.load(GOLDEN / "roberta_bert")


def run(function, model, tokens, mask, compute_dtype=jnp.float32):
    config, params = model
    return function(params, tokens, mask, config=config, compute_dtype=compute_dtype)


def assert_close(got, want):
    # float32 sums in another order; the bound is 1e-4.
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def to_the_left(tokens, mask, extra, content):
    """The rows right-aligned, `extra` more padding before them, `content` in the padding."""
    out = np.full((len(tokens), tokens.shape[1] + extra), content, np.int32)
    out_mask = np.zeros(out.shape, bool)
    for i, row in enumerate(mask):
        out[i, out.shape[1] - row.sum() :] = tokens[i, row]
        out_mask[i, out.shape[1] - row.sum() :] = True
    return out, out_mask


@pytest.mark.parametrize(
    ("name", "function", "key"),
    [("roberta", CLASSIFY, "logits"), ("roberta_bert", EMBED, "embeddings")],
)
def test_answers_equal_those_of_transformers_whatever_the_padding(name, function, key):
    """Its side, its amount, and what stands in it; each row is as if it were alone."""
    model, golden = encoder.load(GOLDEN / name), np.load(GOLDEN / f"{name}.npz")
    tokens, mask, want = golden["tokens"], golden["mask"], golden[key]
    # A padding token that is written in a text.
    assert tokens[0, 4] == (model[0].pad_id or 0) and mask[0, 4]
    assert np.ptp(want, axis=0).max() > 0.3  # the golden rows differ
    hidden = run(ENCODE, model, tokens, mask)
    assert_close(hidden[mask], golden["hidden"][mask])
    for given in (
        (tokens, mask),
        (np.where(mask, tokens, 7), mask),
        to_the_left(tokens, mask, 0, 7),
        to_the_left(tokens, mask, 3, 10**6),
    ):
        assert_close(run(function, model, *given), want)
    alone = run(function, model, tokens[1:2, :5], mask[1:2, :5])
    assert_close(alone, want[1:2])


def test_rows_without_tokens_are_finite(roberta, bert):
    tokens, mask = np.full((2, 5), 4, np.int32), np.zeros((2, 5), bool)
    assert np.isfinite(run(CLASSIFY, roberta, tokens, mask)).all()
    np.testing.assert_array_equal(run(EMBED, bert, tokens, mask), np.zeros((2, 16)))


def test_bfloat16_stays_near_float32(roberta):
    """Eight bits of mantissa through two layers; measured: KL 3e-5."""
    golden = np.load(GOLDEN / "roberta.npz")
    low = run(CLASSIFY, roberta, golden["tokens"], golden["mask"], jnp.bfloat16)
    assert low.dtype == jnp.float32
    assert np.abs(low - golden["logits"]).max() > 1e-5  # it is another computation
    p, q = (jax.nn.log_softmax(x) for x in (golden["logits"], low))
    assert np.sum(np.exp(p) * (p - q), axis=1).max() < 2e-4


def test_settings_are_read_or_refused_by_name():
    found = json.loads((GOLDEN / "roberta" / "config.json").read_text())
    assert encoder.encoder_config(found | {"id2label": None}).labels == ("LABEL_0", "LABEL_1")
    # Labels follow their numbers and not their order in the file.
    names = {str(i): f"c{i}" for i in reversed(range(12))}
    labels = encoder.encoder_config(found | {"id2label": names}).labels
    assert labels == tuple(f"c{i}" for i in range(12))
    for setting, value in {
        "model_type": "xlm-roberta-xl",
        "architectures": ["RobertaForMaskedLM"],
        "hidden_act": "gelu_new",
        "position_embedding_type": "relative_key",
        "is_decoder": True,
        "add_cross_attention": True,
        "pruned_heads": {"0": [1]},
        "quantization_config": {"quant_method": "gptq"},
    }.items():
        with pytest.raises(ValueError, match=f"config.json has {setting} = .*not implement"):
            encoder.encoder_config(found | {setting: value})
    del found["hidden_size"], found["vocab_size"]
    with pytest.raises(ValueError, match="roberta model lacks (vocab_size|hidden_size)"):
        encoder.encoder_config(found)


def test_what_old_checkpoints_carry_beside_the_parameters_is_accepted(roberta, tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "roberta", tmp_path / "model"))
    unused = {
        "roberta.embeddings.position_ids": np.arange(24)[None],
        "roberta.pooler.dense.weight": np.ones((16, 16), np.float32),
        "roberta.pooler.dense.bias": np.ones(16, np.float32),
    }
    file = folder / "model.safetensors"
    save_file(load_file(file) | unused, file)
    same = jax.tree.map(np.array_equal, encoder.load(folder)[1], roberta[1])
    assert jax.tree.all(same)
