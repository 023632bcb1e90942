# SPDX-License-Identifier: Apache-2.0
"""The RL-step benchmark: what it reads from a schedule, and that its load is what it says."""

import json

import pytest

from tba_jax.bench import rl_step, rl_step_sides
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import num_params


def event(name, **fields):
    return {"event": name, **fields}


def a_round(merge_step, decode_s, length, generated):
    times = {"decode_s": decode_s, "reward_s": 0.25, "reference_s": 1.0}
    of = {"merge_step": merge_step, "generated": generated, "response_length_mean": length}
    return event("round", **of, **times)


def test_the_parts_of_a_step_come_from_its_own_events():
    events = [
        event("sync", step=0, start_s=1.0, end_s=1.5),
        event("eval", step=0, start_s=1.5, end_s=4.5),
        a_round(0, 2.0, 10.0, 1),
        a_round(0, 3.0, 20.0, 3),
        event("step", step=0, start_s=13.0, end_s=20.0),
        event("sync", step=1, start_s=20.5, end_s=21.0),
        a_round(1, 4.0, 30.0, 2),
        event("step", step=1, start_s=30.0, end_s=31.5),
    ]
    # 1 to 20 without the evaluation's 3; two rounds of 2 and 3 s, 1.25 s each for rewards and
    # reference; lengths weighted by responses: (10 + 60) / 4.
    first = {"step_s": 16.0, "decode_s": 5.0, "reference_s": 2.5, "train_s": 7.0, "rest_s": 1.5}
    second = {"step_s": 11.0, "decode_s": 4.0, "reference_s": 1.25, "train_s": 1.5, "rest_s": 4.25}
    assert rl_step_sides.step_times(events) == [
        {**first, "response_length": 17.5},
        {**second, "response_length": 30.0},
    ]


def test_prompts_have_the_tokens_that_were_asked_for(tmp_path):
    job = {"folder": str(tmp_path), "shape": "tiny", "seed": 3, "warm_steps": 1, "steps": 2}
    written = rl_step_sides.write({**job, "prompts": 2, "prompt_tokens": 7})
    assert written["num_params"] == num_params(rl_step_sides.SHAPES["tiny"])
    tokenizer = Tokenizer.load(tmp_path / "model")
    rows = (tmp_path / "data" / "train.jsonl").read_text().splitlines()
    assert len(rows) == 6
    for row in rows:
        prompt = json.loads(row)["prompt"]
        ids = tokenizer.encode(prompt, add_bos=True)
        assert len(ids) == 7 and prompt == " ".join(f"w{i}" for i in ids)
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((127,), 0)


def test_medians_are_over_the_steps_of_all_repeats():
    def step(*values):
        return dict(zip(rl_step._PARTS, values, strict=True))

    about = {"max_rss_bytes": 5, "mean_response_tokens": 8.0, "versions": {}}
    repeats = [[step(9, 1, 2, 3, 3)], [step(6, 2, 2, 2, 0)], [step(7, 3, 2, 1, 1)]]
    figures = rl_step._figures([{"steps": steps, **about} for steps in repeats])
    assert [figures[part] for part in rl_step._PARTS] == [7, 2, 2, 2, 1]
    assert figures["step_s_of_repeats"] == [9, 6, 7]


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
