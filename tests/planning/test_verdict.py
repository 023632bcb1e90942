# SPDX-License-Identifier: Apache-2.0
"""Sums, fit and advice from figures made by hand."""

from tba_jax.planning.verdict import GIB, Program, advice, occupancies

CONFIG = {
    "driver": "async",
    "optimizer": {"name": "adamw"},
    "model": {"param_dtype": "float32"},
    "search": {"quantization": "none"},
    "lora": {"rank": 0},
}


def facts(**changes):
    trainer = {"parameters": 2 * GIB, "optimiser state": 4 * GIB}
    return {
        "chip": {"hbm_bytes": 16 * GIB, "overheads": {}},
        "num_devices": 8,
        "shares_devices": False,
        "config": CONFIG,
        "groups": {
            "trainer": {"devices": 4, "count": 1, "residents": trainer, "transients": {}},
            "searcher": {
                "devices": 1,
                "count": 4,
                "residents": {"weights in use": 3 * GIB},
                "transients": {"KV cache": 5 * GIB},
            },
        },
    } | changes


def programs(temporaries=1.0, slots_temporaries=1.0):
    return [
        Program("train_step", "trainer", {"temporaries": temporaries * GIB}, roofline_s=2.0),
        Program("publish", "trainer", {"outputs": 3 * GIB}),
        Program("prefill", "searcher", {}, roofline_s=0.5, with_cache=True),
        Program(
            "decode_chunk",
            "searcher",
            {"temporaries": slots_temporaries * GIB, "code": 0.25 * GIB},
            roofline_s=0.1,
            with_cache=True,
            variants=4,
        ),
    ]


def test_memory_is_residents_and_the_hungriest_program():
    trainer, searcher = occupancies(facts(), programs())
    assert trainer.peak_bytes == (2 + 4 + 3) * GIB  # publication wants more than the step
    assert searcher.peak_bytes == (3 + 5 + 1 + 4 * 0.25) * GIB
    assert trainer.over_bytes == searcher.over_bytes == 0


def test_advice_names_what_is_missing_and_what_each_setting_frees():
    compiled = programs(temporaries=30.0)
    (line,) = advice(facts(), compiled, occupancies(facts(), compiled))
    assert line.startswith("20 GiB are missing on each trainer device: set a smaller ")
    for flag in ("name=adafactor (4.0", "lora.rank=16 (4.0", "param_dtype=bfloat16 (3.0"):
        assert f"{flag} GiB)" in line
    crowded = facts()
    crowded["groups"]["searcher"]["residents"] = {"weights in use": 20 * GIB}
    (line,) = advice(crowded, programs(), occupancies(crowded, programs()))
    assert "search.quantization=int8 (9.0 GiB)" in line and "search.num_devices" in line
    less = crowded | {"config": CONFIG | {"search": {"quantization": "int8"}}}
    assert "int8" not in advice(less, programs(), occupancies(less, programs()))[0]
    assert advice(facts(), programs(), occupancies(facts(), programs())) == []
