# SPDX-License-Identifier: Apache-2.0
"""The RL-step benchmark: what it reads from the metrics, and that its load is what it says."""

import json

import pytest

from tba_jax.bench import rl_step
from tba_jax.bench.harness import SHAPES
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import num_params


def test_prompts_have_the_tokens_that_were_asked_for(tmp_path):
    job = {"folder": str(tmp_path), "model_shape": "tiny", "seed": 3, "warm_steps": 1, "steps": 2}
    written = rl_step.write({**job, "prompts": 2, "prompt_tokens": 7})
    assert written["num_params"] == num_params(SHAPES["tiny"])
    tokenizer = Tokenizer.load(tmp_path / "model")
    rows = (tmp_path / "data" / "train.jsonl").read_text().splitlines()
    lengths = [len(tokenizer.encode(json.loads(row)["prompt"], add_bos=True)) for row in rows]
    assert lengths == [7] * 6


@pytest.mark.slow
def test_figures_of_a_small_load(capsys):
    sizes = ["--model_shape=tiny", "--prompts=2", "--group=4", "--micro_batch_rows=4"]
    sizes += ["--prompt_tokens=8", "--response_tokens=6", "--peer_micro_batch_rows=4"]
    assert rl_step.main([*sizes, "--repeats=1", "--steps=2", "--remat=dots", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    parts = [result[part] for part in rl_step._PARTS]
    assert all(part > 0 for part in parts)
    # Few of them end before the limit: with probability of about 1/128 at each token.
    assert 4 < result["mean_response_tokens"] <= 6
    assert result["remat"] == "dots"
    assert result["peers"] == {} and len(result["step_s_of_repeats"]) == 1
