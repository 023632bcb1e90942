# SPDX-License-Identifier: Apache-2.0
"""The decoding benchmark counts what it says it counts; our side only."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.bench import decode, decode_engine, decode_peers
from tba_jax.models import transformer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import roofline


def test_work_by_hand():
    config = TransformerConfig(
        vocab_size=10,
        hidden_size=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        mlp_size=3,
        qkv_bias=True,
    )
    # q 16, kv 16, o 16, gate and up 24, down 12; output 40.
    assert roofline.matrix_entries(config) == 124
    # And three norms of 4, biases of 4 (q) and 4 (k, v).
    assert roofline.step_entries(config) == 144
    work = roofline.decode_work(
        config, itemsize=4, num_steps=3, prompt_tokens=5, response_lengths=[2, 3]
    )
    # Tokens see 5 + 6 and 5 + 6 + 7 positions: 29, of 2 (k, v) x 1 head x 2 entries x 4 bytes.
    assert work.num_bytes == 3 * 144 * 4 + 29 * 16
    # Scores and sums: 2 x 2 operations for each of 2 heads x 2 entries.
    assert work.num_flops == 5 * 2 * 124 + 29 * 16
    rates = roofline.Rates(bytes_per_s=work.num_bytes / 2, flops_per_s=work.num_flops)
    assert (rates.bound_s(work), rates.sum_s(work)) == (2.0, 3.0)


def test_an_untied_embedding_is_not_read_by_a_step():
    tied = decode_engine.SHAPES["tiny"]
    untied = dataclasses.replace(tied, tie_embeddings=False)
    assert roofline.step_entries(untied) == roofline.step_entries(tied)
    assert transformer.num_params(untied) - transformer.num_params(tied) == 128 * 32


def test_the_shape_of_the_goal():
    config = decode_engine.SHAPES["39m"]
    # 8 layers of q and o 2 x 512 x 512, kv 512 x 256, MLP 3 x 512 x 1408; the tied table.
    assert roofline.matrix_entries(config) == 8 * (524_288 + 131_072 + 2_162_688) + 16_384_000
    # And the biases of q, k, v and the norms.
    assert transformer.num_params(config) == 38_928_384 + 8 * (512 + 256) + 17 * 512


def test_rates_are_of_this_order():
    rates = roofline.measure_rates("float32", 2**22)
    # Any machine of the last twenty years, and none yet.
    assert 1e8 < rates.bytes_per_s < 1e14
    assert 1e8 < rates.flops_per_s < 1e16


def test_length_statistics_by_hand():
    # One or two tokens, half and half.
    assert decode.length_statistics(0.5, 2) == (1.5, 0.5)
    mean, _ = decode.length_statistics(1 / 85, 256)
    assert math.isclose(mean, 85 * (1 - (84 / 85) ** 256))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eos_is_as_probable_after_every_context(dtype):
    config, wanted = decode_engine.SHAPES["tiny"], 0.1
    params = transformer.init_params(config, jax.random.key(3), jnp.dtype(dtype))
    params, reported = decode_engine.with_eos(params, config, wanted, dtype)
    tokens = jax.random.randint(jax.random.key(5), (4, 40), 0, config.vocab_size - 1)
    positions = jnp.broadcast_to(jnp.arange(40), (4, 40))
    hidden = transformer.apply(
        params, tokens, positions, tokens >= 0, config=config, compute_dtype=jnp.dtype(dtype)
    )
    logits = transformer.unembed(params, hidden, config=config, compute_dtype=jnp.dtype(dtype))
    probs = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    # Of 32 dimensions, the norm of the residual stream varies by a few per cent between contexts,
    # and the logit of about 5 with it; the mean is over 160 of them. bfloat16 has 8 bits.
    assert abs(probs[..., -1].mean() / wanted - 1) < 0.1
    assert probs[..., -1].std() / wanted < 0.3
    assert abs(reported.mean() / probs[..., -1].mean() - 1) < 0.1
    # The other tokens still differ: the model is no constant.
    assert 0.1 < np.log(probs[..., :-1]).std() < 1


@pytest.mark.slow
def test_figures_of_a_small_load(capsys):
    argv = ["--shape=tiny", "--workload=rl", "--repeats=1", "--num_samples=64", "--json"]
    sizes = ["--prompt_tokens=8", "--max_new_tokens=24", "--num_slots=16", "--queued=64,128"]
    assert decode.main(argv + sizes) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    lengths = result["response_length"]
    assert (lengths["n"], result["num_slots"]) == (8 * 64, 16)
    # Chance of a false alarm: 1 in 10,000 (and the seed is fixed).
    assert abs(lengths["z"]) < 4
    # 0.125 per token: a third of the limit, cut at it.
    assert abs(lengths["expected_mean"] - 7.7) < 0.5
    assert lengths["percentile_25"] < lengths["percentile_75"] <= lengths["max"] <= 24
    assert result["programs"] > 0 and result["warm_up_runs"] >= 3
    assert result["prefill_s"] + result["decode_s"] < result["wall_s"]
    assert 0 < result["roofline_share_of_sum"] and 0 < result["slot_share"] <= 1
    assert 1 <= result["roofline_share_of_sum"] / result["roofline_share"] <= 2
    by_length = result["queued"]["by_length"]
    assert {n: x["recompiled"] for n, x in by_length.items()} == {"64": 0, "128": 0}
    assert result["queued"]["spread"] >= 0
    assert result["peers"] == {}


def test_the_faster_variant_counts_with_the_median_of_its_repeats():
    def run(tokens_per_s):
        names = ("wall_s", "first_token_s", "prefill_s", "decode_s", "cpu_s")
        return {**dict.fromkeys(names, 1.0), "tokens_per_s": tokens_per_s, "lengths": [1, 3]}

    about = {"num_threads": 2, "device": "cpu", "versions": {}}
    reports = [{"runs": {"slow": run(10.0), "fast": run(20.0)}, **about}]
    reports += [{"runs": {"fast": run(x)}, **about} for x in (40.0, 25.0)]
    figures = decode._peer_figures(reports, 100.0, decode.WORKLOADS["rl"], {})
    assert (figures["variant"], figures["tokens_per_s"], figures["ratio"]) == ("fast", 25.0, 4.0)
    assert figures["tokens_per_s_of_variants"] == {"slow": 10.0, "fast": 20.0}
    assert (figures["response_length"]["mean"], figures["response_length"]["n"]) == (2.0, 6)


def test_lengths_count_the_first_eos():
    rows = np.array([[5, 9, 9, 7], [9, 5, 5, 5], [5, 5, 5, 5]])
    assert decode_peers._lengths(rows, [9, 7]) == [2, 1, 4]
    assert decode_peers._lengths(rows, []) == [4, 4, 4]


def test_a_missing_package_names_the_extra(capsys, monkeypatch):
    monkeypatch.setitem(decode_peers.PACKAGES, "hf", ("json", "no_such_package"))
    assert decode.main(["--peers=hf"]) == 1
    error = capsys.readouterr().err
    assert "hf needs no_such_package" in error and "extra `bench`" in error
    assert len(error.splitlines()) == 1


def test_an_interpreter_that_does_not_run(capsys):
    assert decode.main(["--peers=hf", "--peer_python=/no/python"]) == 1
    assert "--peer_python=/no/python does not run" in capsys.readouterr().err
