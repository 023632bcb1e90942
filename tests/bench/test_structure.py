# SPDX-License-Identifier: Apache-2.0
"""What programs are made of: counts beside a minimum that no program goes below."""

import importlib.util
import json
import runpy
from pathlib import Path

import pytest

from tba_jax.bench import structure
from tba_jax.config.schema import freeze, plain, replace
from tba_jax.planning import compile_one
from tba_jax.planning.children import Answer
from tba_jax.planning.command import Planner
from tba_jax.planning.hlo_cost import program_cost
from tba_jax.planning.minimum import _Products
from tba_jax.planning.model_shapes import published_config

HAS_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
needs_plugin = pytest.mark.skipif(
    not HAS_PLUGIN, reason="JAX's CUDA plugin is not installed (pip install 'tba_jax[cuda]')"
)
ROOT = Path(__file__).parents[2]
START_MODEL = ROOT / "tba_jax" / "assets" / "start_model"


def in_process(request, *, timeout_s):
    del timeout_s
    return Answer(json.loads(json.dumps(compile_one.answer(request))))


@pytest.fixture(scope="module")
def rows():
    """The miniature's programs on this machine's devices."""
    presets = runpy.run_path(str(ROOT / "configs" / "math.py"))
    config = replace(
        freeze(presets["get_config"]("arithmetic")),
        {"num_cpu_devices": 1, "placement": "split", "batch.num_length_buckets": 1},
    )
    model, _ = published_config(str(START_MODEL))
    request = {"topology": "", "model": model, "judges": {}, "cache": ""}
    planner = Planner(request, 60.0, in_process)
    facts = planner.describe(plain(config), chooses=False)
    planned = {p["name"]: p for p in facts["programs"]}
    return {
        name: structure.row(planned[name], planner.compile(facts, name), 4)
        for name in structure.PROGRAMS
    }


def test_no_program_does_less_than_its_minimum(rows):
    assert set(rows) == set(structure.PROGRAMS)
    for name, r in rows.items():
        assert r["bytes_ratio"] >= 0.99, name
        assert r["launches"] > 0, name
        if name in ("publish", "admit"):
            assert r["flops"] == r["min_flops"] == 0
        else:
            assert 0.99 <= r["flops_ratio"], name


def test_a_decode_step_computes_what_it_must(rows):
    """Products of all slots with every weight, and attention over the whole cache."""
    assert rows["decode_chunk"]["flops_ratio"] == pytest.approx(1, abs=0.05)


def test_the_table_names_every_program_and_what_failed(rows):
    failed = rows["admit"] | {"failure": "the compiler aborted"}
    result = {
        "command": "python -m tba_jax.bench.structure",
        "date": "today",
        "model": "m",
        "targets": {"v5e:2x4": {"programs": [rows["decode_chunk"], failed]}},
    }
    lines = list(structure.table(result))
    assert lines[-1].startswith("| `v5e:2x4` | `admit` | the compiler aborted |")
    assert "`decode_chunk`" in lines[-2] and len({line.count("|") for line in lines[2:]}) == 1


LAUNCHES = """HloModule m
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8]{0} exponential(%x)
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %y)
}
%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}
ENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body, \
backend_config={"known_trip_count": {"n": "5"}}
}"""


def test_launches_of_a_loop_are_those_of_its_trips_without_scalars():
    assert program_cost(LAUNCHES).launches == 5


def test_an_unknown_program_is_refused(capsys):
    arguments = ["--config=math", "--targets=nowhere:2x2"]
    assert structure.main(arguments) == 1
    assert "unknown chip 'nowhere'" in capsys.readouterr().err


def two_layers(target, *names):
    """Programs of a RhoMath-1B of two layers, compiled for devices that are not there."""
    presets = runpy.run_path(str(ROOT / "configs" / "math.py"))
    config = freeze(presets["get_config"]("gsm8k"))
    model, _ = published_config("realtreetune/rho-1b-sft-GSM8K")
    request = {"topology": target, "model": model | {"num_hidden_layers": 2}, "judges": {}}
    planner = Planner(request | {"cache": ""}, 600.0)
    facts = planner.describe(plain(config), chooses=True)
    planned = {p["name"]: p for p in facts["programs"]}
    return [structure.row(planned[n], planner.compile(facts, n), 2) for n in names]


@pytest.mark.timeout(900)
def test_a_tpu_reads_weights_and_cache_once_and_admits_in_place():
    pytest.importorskip("libtpu")
    decode, admit = two_layers("v5e:2x4", "decode_chunk", "admit")
    assert not decode["failure"] and not admit["failure"]
    assert decode["bytes_ratio"] <= 1.15 and decode["flops_ratio"] <= 1.05
    assert admit["bytes_ratio"] <= 1.05


@needs_plugin
@pytest.mark.timeout(900)
def test_a_gpu_reads_weights_and_cache_once_and_admits_in_place():
    decode, admit = two_layers("h100:8", "decode_chunk", "admit")
    assert not decode["failure"] and not admit["failure"]
    assert decode["bytes_ratio"] <= 1.3  # the aim is 1.15
    assert decode["launches"] <= 45  # with what is outside of the two layers
    assert admit["bytes_ratio"] <= 1.05


def test_a_shared_prompt_is_counted_once():
    of = _Products(layers=7.0, head=1.0, pair=2.0, near_pair=0.0, window=8)
    assert of.after_prompt(2, 3, 1, 5) == of.causal(2, 8) == 2 * (8 * 7 + 36 * 2)
    # 3 + 2 x 5 tokens; six pairs of the prompt, of each response 15 with it and 15 of its own.
    assert of.after_prompt(1, 3, 2, 5) == 13 * 7 + (6 + 2 * 30) * 2
