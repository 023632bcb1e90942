# SPDX-License-Identifier: Apache-2.0
"""Sums, fit and advice from figures made by hand."""

import dataclasses

from tba_jax.config.schema import make_config
from tba_jax.planning.chips import Chip
from tba_jax.planning.verdict import GIB, Facts, Group, Plan, Program

FACTS = Facts(
    config=make_config(),
    changed_fields={},
    chip=Chip("chip", 16 * GIB, 1.0, 1.0),
    num_devices=8,
    num_hosts=1,
    layout="split",
    shares_devices=False,
    num_params=1,
    trainer=Group(4, {"parameters": 2 * GIB, "optimiser state": 4 * GIB}),
    searcher=Group(1, {"weights in use": 3 * GIB}, {"KV cache": 5 * GIB}, count=4),
    lower={},
    programs=(),
)


def programs(temporaries=1.0):
    chunk = {"temporaries": GIB, "code": 0.25 * GIB}
    return [
        Program("train_step", "trainer", hbm={"temporaries": temporaries * GIB}),
        Program("publish", "trainer", hbm={"outputs": 3 * GIB}),
        Program("prefill", "searcher"),
        Program("decode_chunk", "searcher", hbm=chunk, variants=4),
    ]


def test_memory_is_residents_and_the_hungriest_program():
    plan = Plan(FACTS, programs())
    trainer, searcher = plan.occupancies()
    assert trainer.peak_bytes == (2 + 4 + 3) * GIB  # publication wants more than the step
    assert searcher.peak_bytes == (3 + 5 + 1 + 4 * 0.25) * GIB
    assert trainer.over_bytes == searcher.over_bytes == 0
    assert plan.fits and plan.advice() == []


def test_advice_names_what_is_missing_and_the_settings_that_free_memory():
    (line,) = Plan(FACTS, programs(temporaries=30.0)).advice()
    assert line.startswith("20 GiB are missing on each trainer device: set a smaller ")
    for flag in ("name=adafactor", "lora.rank=16", "param_dtype=bfloat16"):
        assert flag in line
    searcher = FACTS.searcher._replace(residents={"weights in use": 20 * GIB})
    crowded = dataclasses.replace(FACTS, searcher=searcher)
    (line,) = Plan(crowded, programs()).advice()
    assert "search.quantization=int8" in line and "search.num_devices" in line
