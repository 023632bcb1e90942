# SPDX-License-Identifier: Apache-2.0
"""Sums, fit, balance and advice from figures made by hand."""

import dataclasses

import pytest

from tba_jax.planning.table import balance_text
from tba_jax.planning.verdict import GIB, Program, advice, balance, occupancies

SIZES = {
    "batch_rows": 64,
    "round_rows": 32,
    "num_slots": 16,
    "response_tokens": 128.0,
    "prompts_per_round": 8,
    "wanted_ratio": 1.0,
    "micro_batch_rows": 64,
    "useful_rows": [4, 8, 16, 32, 64],
    "next_group": 2,
}
CONFIG = {
    "driver": "async",
    "num_searchers": 2,
    "optimizer": {"name": "adamw"},
    "model": {"param_dtype": "float32", "rollout_dtype": "bfloat16"},
    "search": {"quantization": "none"},
    "lora": {"rank": 0},
}


def facts(**changes):
    return {
        "chip": {"hbm_bytes": 16 * GIB, "overheads": {}},
        "num_devices": 8,
        "shares_devices": False,
        "has_remote_searchers": False,
        "trainer_options": [2, 4, 6],
        "sizes": SIZES,
        "config": CONFIG,
        "groups": {
            "trainer": {
                "devices": 4,
                "count": 1,
                "residents": {"parameters": 2 * GIB, "optimiser state": 4 * GIB},
                "transients": {},
            },
            "searcher": {
                "devices": 1,
                "count": 4,
                "residents": {"weights in use": 3 * GIB},
                "judges": [],
                "transients": {"KV cache": 5 * GIB},
            },
        },
    } | changes


def programs(temporaries=1.0, slots_temporaries=1.0):
    return [
        Program("train_step", "trainer", {"temporaries": temporaries * GIB}, roofline_s=2.0),
        Program("publish", "trainer", {"outputs": 3 * GIB}),
        Program("prefill", "searcher", {}, roofline_s=0.5, with_cache=True, calls_per_round=2),
        Program(
            "decode_chunk",
            "searcher",
            {"temporaries": slots_temporaries * GIB, "code": 0.25 * GIB},
            roofline_s=0.1,
            with_cache=True,
            variants=4,
            calls_per_round=32,
        ),
    ]


def test_memory_is_residents_and_the_hungriest_program():
    trainer, searcher = occupancies(facts(), programs())
    assert trainer.peak_bytes == (2 + 4 + 3) * GIB  # publication wants more than the step
    assert searcher.peak_bytes == (3 + 5 + 1 + 4 * 0.25) * GIB
    assert trainer.over_bytes == searcher.over_bytes == 0


def test_parts_that_take_turns_share_a_device():
    (both,) = occupancies(facts(shares_devices=True), programs())
    # The trainer publishes (3 GiB) between two chunks of a round, so the cache is there.
    assert both.peak_bytes == (2 + 4 + 3 + 5 + 3 + 4 * 0.25) * GIB
    alone = facts(shares_devices=True, config=CONFIG | {"driver": "sync"})
    (both,) = occupancies(alone, programs())
    # Searching is at its fullest with the trainer's state beside it, or publishing without a cache.
    assert both.peak_bytes == (2 + 4 + 3 + 5 + 1 + 4 * 0.25) * GIB


def test_slots_of_a_victim_count_during_trainer_programs():
    victim = Program("victim_chunk", "searcher", {"inputs": 6 * GIB, "temporaries": GIB})
    (both,) = occupancies(facts(shares_devices=True), [*programs(temporaries=4.0), victim])
    assert dict(both.parts)["decode slots of the victim"] == 6 * GIB
    assert both.peak_bytes == (2 + 4 + 3 + 6 + 4 + 4 * 0.25) * GIB


def test_a_step_that_is_too_large_gets_a_micro_batch_that_fits():
    compiled = programs(temporaries=30.0)
    found = occupancies(facts(), compiled)
    assert found[0].over_bytes == 20 * GIB
    lines = advice(facts(), compiled, found, None)
    # (16 - 6) * 0.95 GiB are free: 9.5 / 30 of 64 rows are 20.
    assert lines == [
        "train_step needs 30.0 GiB and 9.5 GiB are free: set --config.batch.micro_batch_rows=16 "
        "(now 64; temporaries shrink less than in proportion; check with --search)",
        "missing 20 GiB; these settings also free memory: "
        "--config.optimizer.name=adafactor 4.0 GiB; "
        "--config.model.param_dtype=bfloat16 3.0 GiB (rounding loses small updates)",
    ]


def test_advice_counts_the_code_and_never_names_the_size_there_is():
    step = Program("train_step", "trainer", {"temporaries": 9 * GIB, "code": GIB}, variants=2)
    found = occupancies(facts(), [step])
    assert found[0].over_bytes == GIB
    # (16 - 6 - 2) * 0.95 GiB are free.
    assert "9.0 GiB and 7.6 GiB are free" in advice(facts(), [step], found, None)[0]
    assert "micro_batch_rows=32 " in advice(facts(), [step], found, None)[0]
    small = CONFIG | {
        "optimizer": {"name": "adafactor"},
        "model": {"param_dtype": "bfloat16"},
    }
    assert len(advice(facts(config=small), [step], found, None)) == 1  # nothing is left to save
    least = facts(sizes=SIZES | {"micro_batch_rows": 4})
    assert "no smaller micro-batch" in advice(least, [step], found, None)[0]


def test_no_larger_group_is_advised_to_a_searcher_with_all_devices_of_its_host():
    crowded = facts(sizes=SIZES | {"next_group": 0})
    crowded["groups"]["searcher"]["residents"] = {"weights in use": 20 * GIB}
    lines = advice(crowded, programs(), occupancies(crowded, programs()), None)
    assert any("use chips with more memory" in x and "--config.lora.rank" in x for x in lines)
    # 20 GiB of bfloat16; what has adapters or eight bits already is not told so.
    assert any("--config.search.quantization=int8 9.0 GiB of weights" in line for line in lines)
    less = {"lora": {"rank": 8}, "search": CONFIG["search"] | {"quantization": "int8"}}
    given = crowded | {"config": CONFIG | less}
    lines = advice(given, programs(), occupancies(given, programs()), None)
    assert not any("lora" in line or "quantization" in line for line in lines)
    assert not any("num_devices" in line for line in lines)


def test_a_step_that_the_compiler_refused_is_helped_by_what_it_said():
    failed = Program(
        "train_step", "trainer", failure="too large", is_too_large=True, needed_bytes=40 * GIB
    )
    lines = advice(facts(), [failed], occupancies(facts(), [failed]), None)
    assert "micro_batch_rows=8 " in lines[0]


def test_a_cache_that_is_too_large_gets_fewer_slots():
    compiled = programs(slots_temporaries=20.0)
    found = occupancies(facts(), compiled)
    assert found[1].over_bytes > 0
    # (16 - 3) * 0.95 GiB for what takes 25: 7 of 16 slots, so 4.
    assert "--config.search.num_slots=4" in advice(facts(), compiled, found, None)[0]


def test_residents_that_do_not_fit_are_spread():
    crowded = facts()
    crowded["groups"]["searcher"]["residents"] = {"weights in use": 20 * GIB}
    found = occupancies(crowded, programs())
    lines = advice(crowded, programs(), found, None)
    assert any("is 20.0 GiB per device" in x and "search.num_devices=2" in x for x in lines)


def test_larger_micro_batches_are_advised_to_a_step_limited_by_links():
    small = facts(sizes=SIZES | {"micro_batch_rows": 8})
    for bound, given, is_reported in (("links", small, True), ("compute", small, False),
                                  ("links", facts(), False)):  # fmt: skip
        step, *others = programs()
        found = [dataclasses.replace(step, bound=bound), *others]
        lines = advice(given, found, occupancies(given, found), balance(given, found))
        assert any("limited by its links" in line for line in lines) == is_reported


def test_judges_that_no_mesh_divides_are_named():
    given = facts()
    searcher = given["groups"]["searcher"]
    searcher["residents"]["gold reward model"] = 24 * GIB
    searcher["judges"].append("gold reward model")
    found = occupancies(given, programs())
    lines = advice(given, programs(), found, None)
    assert any("24.0 GiB of it for gold reward model" in line for line in lines)


def test_a_placement_that_does_not_compile_is_reported():
    failed = Program("publish", "trainer", failure="the compiler aborted: chips")
    lines = advice(facts(), [failed], [], None)
    assert lines[0].startswith("publish does not compile: the compiler aborted: chips.")


def test_the_balance_compares_device_seconds():
    weighed = balance(facts(), programs())
    # 32 responses x 128 tokens in 16 slots: 256 steps, 32 chunks of 0.1 s, and two prefills.
    assert weighed.round_s == pytest.approx(32 * 0.1 + 2 * 0.5)
    rate = 4 * 32 / weighed.round_s
    assert weighed.made_per_trained == pytest.approx(rate * 2.0 / 64)
    # 8 device-seconds of training against 64 / rate * 4 of searching, over 8 devices.
    search = 64 / rate * 4
    assert weighed.trainer_devices == pytest.approx(8 * 8 / (8 + search))
    assert weighed.steps_per_hour == pytest.approx(3600 / max(2.0, 64 / rate))
    lines = advice(facts(), programs(), occupancies(facts(), programs()), weighed)
    assert lines == ["the split is balanced: 4 trainer devices are the best that this slice allows"]


def test_no_balance_without_all_programs():
    assert balance(facts(), programs()[:2]) is None


def test_the_advice_for_a_fleet_has_the_number_of_searchers():
    given = facts(has_remote_searchers=True)
    weighed = balance(given, programs())
    # A searcher makes 32 responses in 4.2 s, and a step takes 64 in 2 s.
    assert weighed.searchers == pytest.approx(64 / 2.0 / (32 / weighed.round_s)) == 4.2
    assert weighed.steps_per_hour == pytest.approx(3600 / (64 / (4 * 32 / weighed.round_s)))
    assert "with 4.2 searchers" in balance_text(given, weighed)
    # By processes of two.
    (line,) = advice(given, programs(), [], weighed)
    assert line.startswith("searchers would be the bottleneck: 4.2 searchers keep the trainer busy")
    assert "--config.fleet.max_searchers=6 (now 4)" in line
    (slow,) = advice(given, programs(), [], dataclasses.replace(weighed, searchers=1.5))
    assert slow.startswith("the trainer would be the bottleneck: 1.5 ") and "searchers=2 (" in slow
