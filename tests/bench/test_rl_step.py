# SPDX-License-Identifier: Apache-2.0
"""The RL-step benchmark: what it reads from the metrics, and that its load is what it says."""

import json

import pytest

from tba_jax.bench import rl_step
from tba_jax.bench.harness import SHAPES
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import num_params


def test_the_parts_of_a_step_are_what_was_spent_since_the_step_before(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rl_step.time, "perf_counter", lambda: now[0])

    def work(seconds):
        now[0] += seconds

    parts = rl_step.Parts()
    decode, score = (parts.timed(part, work) for part in ("decode_s", "reference_s"))
    for decode_s, reference_s, step_s in ((50, 20, 30), (4, 1, 3), (3, 1, 2)):
        decode(decode_s)
        score(reference_s)
        work(step_s - reference_s + 0.5)  # the run counts the reference as part of its step
        parts.note(1, {"train/step_s": step_s, "train/response_tokens": 10 * step_s})
    second = {"step_s": 7.5, "decode_s": 4, "reference_s": 1, "train_s": 2, "rest_s": 0.5}
    third = {"step_s": 5.5, "decode_s": 3, "reference_s": 1, "train_s": 1, "rest_s": 0.5}
    assert parts.of_steps() == [{**second, "tokens": 30}, {**third, "tokens": 20}]


def test_prompts_have_the_tokens_that_were_asked_for(tmp_path):
    job = {"folder": str(tmp_path), "model_shape": "tiny", "seed": 3, "warm_steps": 1, "steps": 2}
    written = rl_step.write({**job, "prompts": 2, "prompt_tokens": 7})
    assert written["num_params"] == num_params(SHAPES["tiny"])
    tokenizer = Tokenizer.load(tmp_path / "model")
    rows = (tmp_path / "data" / "train.jsonl").read_text().splitlines()
    assert len(rows) == 6
    for row in rows:
        prompt = json.loads(row)["prompt"]
        ids = tokenizer.encode(prompt, add_bos=True)
        assert len(ids) == 7 and prompt == " ".join(f"w{i}" for i in ids)
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((127,), 0)


def test_figures_of_a_process_are_medians_over_its_steps():
    timed = [dict.fromkeys(rl_step._PARTS, x) for x in (9.0, 6.0, 7.0)]
    found = rl_step._with_medians({"steps": timed, "max_rss_bytes": 5})
    assert found == {"max_rss_bytes": 5, **dict.fromkeys(rl_step._PARTS, 7.0)}


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
