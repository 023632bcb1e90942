# SPDX-License-Identifier: Apache-2.0
"""The decoding benchmark counts what it says it counts."""

import json

import pytest

from tba_jax.bench import decode
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
    assert rates.bound_s(work) == 2.0


@pytest.mark.slow
def test_figures_of_a_small_load(capsys):
    argv = ["--shape=tiny", "--workload=rl", "--repeats=1", "--num_samples=64", "--json"]
    sizes = ["--prompt_tokens=8", "--max_new_tokens=24", "--num_slots=16"]
    assert decode.main(argv + sizes) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["num_slots"] == 16 and result["recompiled"] == 0
    # 512 responses that end with a probability of 1/8 at each token, cut at 24: 7.7 on average.
    assert 6 < result["response_length"] < 9.5
    assert result["prefill_s"] + result["decode_s"] < result["wall_s"]
    assert 0 < result["roofline_share"] and 0 < result["slot_share"] <= 1
