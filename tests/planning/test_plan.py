# SPDX-License-Identifier: Apache-2.0
"""The plan command: figures of the real run's programs, a verdict, a remedy, an exit code."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax.config import presets
from tba_jax.config.command_line import override
from tba_jax.config.presets import load as load_preset
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, make_config, replace
from tba_jax.models.hf import families
from tba_jax.models.transformer import num_params
from tba_jax.planning import child, command, shapes
from tba_jax.planning.chips import Chip
from tba_jax.planning.verdict import GIB, Facts, Group, Plan, Program
from tba_jax.run.model_parts import model_path

PROGRAM = Program("publish", "trainer")
REQUEST = child.Request("", {}, {}, "", (), Config(), PROGRAM)


@pytest.mark.parametrize(
    ("source", "words", "is_too_large"),
    [
        (
            "print('F0101 x.cc:1] Check failed: chips are contiguous', file=sys.stderr)\n"
            "sys.stderr.flush(); os.abort()",
            "the compiler aborted.*chips are contiguous.*Set other mesh sizes",
            False,
        ),
        (
            "raise RuntimeError('RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory "
            "on HBM, the total memory required for HLO temporaries (25.05G) exceeds available HBM "
            "(15.75G). HLO module: jit_train_step.')",
            "25.05G",
            True,
        ),
    ],
)
def test_a_compiler_that_fails_is_a_verdict(source, words, is_too_large, monkeypatch):
    monkeypatch.setattr(child, "_CODE", f"import os, pickle, sys\n{source}")
    program = child.ask(REQUEST)
    assert re.search(words, program.failure, re.DOTALL), program.failure
    assert program.is_too_large == is_too_large


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
    assert line.startswith("20 GiB are missing on each device (trainer): set a smaller ")
    for flag in ("name=adafactor", "lora.rank=16", "param_dtype=bfloat16"):
        assert flag in line
    searcher = FACTS.searcher._replace(residents={"weights in use": 20 * GIB})
    crowded = dataclasses.replace(FACTS, searcher=searcher)
    (line,) = Plan(crowded, programs()).advice()
    assert "search.quantization=int8" in line and "search.num_devices" in line


ROOT = Path(__file__).parents[2]
START_MODEL = ROOT / "tba_jax" / "assets" / "start_model"


def request(**fields):
    config = load_preset("math:arithmetic")
    # The devices of this process are there already.
    config = replace(config, {"placement": "split", **fields})
    validate(config)
    return child.Request("", shapes.config_of(str(START_MODEL)), {}, "", (), config)


@pytest.fixture(scope="module")
def facts():
    return child.answer(request())


@pytest.mark.slow
def test_programs_of_a_run_are_compiled_with_their_memory_and_least_times(facts):
    names = ["train_step", "publish", "decode_chunk"]
    done = command.plan(request(), facts, names, child.answer)
    assert done.fits
    step, publish, chunk = done.programs
    held, size = facts.trainer.residents, 4 * facts.num_params
    assert held["parameters"] == facts.searcher.residents["weights in use"] == size
    assert held["optimiser state"] == pytest.approx(2 * size, abs=64)  # and two counters
    assert step.hbm["parameters"] == publish.hbm["parameters"] == held["parameters"]
    assert publish.hbm["outputs"] == pytest.approx(held["parameters"], rel=0.01)
    assert chunk.hbm["KV cache"] > 0 and step.hbm["temporaries"] > 0
    # Forward, again for the backward pass, and twice that: 2 FLOPs a weight and token at least.
    assert step.flops > 6 * 0.8 * facts.num_params * 256 * 28 / 16
    # Each of the steps reads the weights.
    assert chunk.num_bytes > 8 * 4 * facts.num_params
    out = json.loads(json.dumps(done.as_json()))
    assert {"fits", "chip", "placement", "programs", "advice"} <= out.keys()
    for name in names:
        figures = out["programs"][name]
        assert {"hbm_gib", "roofline_s", "bound", "compile_s"} <= figures.keys()
        assert figures["compile_s"] > 0 and figures["roofline_s"] > 0


@pytest.mark.slow
def test_a_plan_with_an_environment_has_the_prompts_of_later_turns_and_kept_conversations():
    given = request(**{"task.environment": "game.py:Game", "search.max_new_tokens": 40})
    found = child.answer(given)
    (extend,) = command.plan(given, found, ["extend"], child.answer).programs
    kept = "caches of waiting conversations"
    assert found.searcher.transients[kept] > 0 < extend.hbm[kept]
    assert extend.hbm["parameters"] == 4 * found.num_params


def test_judges_count_with_their_parameters():
    config = override(None, ["--config=redteam:llama"])
    models = {role: shapes.config_of(path) for role, path in shapes.judge_paths(config).items()}
    held = shapes.judge_bytes(config, models, 4)
    size = 2 * 8_030_261_248
    assert held["searcher"] == {"victim": size, "classifier": size}  # whole on the first device
    assert held["trainer"]["sentence embedder"] == pytest.approx(4 * 22.6e6, rel=0.01)
    config = override(None, ["--config=tldr:pythia410m"])
    models = {role: shapes.config_of(path) for role, path in shapes.judge_paths(config).items()}
    one, four = (shapes.judge_bytes(config, models, n)["searcher"] for n in (1, 4))
    assert four == {role: size / 4 for role, size in one.items()} and len(one) == 2


@pytest.mark.parametrize("preset", presets.names())
def test_the_models_of_every_preset_have_shapes_without_network(preset, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = override(None, [f"--config={preset}"])
    assert num_params(families.transformer_config(shapes.config_of(model_path(config)))) > 0
    if not preset.startswith("custom"):
        for path in shapes.judge_paths(config).values():
            assert shapes.config_of(path)["model_type"]


def test_sizes_are_lowered_until_the_compiled_programs_fit(facts, capsys):
    """A row of a train step takes 1 GiB with kept products, a fifth of it without; a slot 1 GiB."""
    compiled = []

    def ask(request):
        config, program = request.config, request.program
        rows, remat = config.batch.micro_batch_rows, config.model.remat
        slots = config.search.num_slots
        if program is None:
            options = [n for n in (8, 16, 32, 40, 80) if n >= 40 or remat == "layers"]
            smaller = [n for n in options if n < rows]
            trainer = {"batch.micro_batch_rows": 160, "model.remat": "layers"}
            if smaller:
                trainer = {"batch.micro_batch_rows": smaller[-1], "model.remat": remat}
            return dataclasses.replace(
                facts,
                config=config,
                chip=Chip("chip", 40 * GIB, 1.0, 1.0),
                trainer=Group(4, {}),
                searcher=Group(1, {}, {"KV cache": slots * GIB}),
                changed_fields={"mesh.fsdp": 8},
                lower={"trainer": trainer, "searcher": {"search.num_slots": slots // 2}},
            )
        compiled.append(program.name)
        if program.name != "train_step":
            return program
        if rows > 100 and remat == "dots":
            return dataclasses.replace(program, failure="too large", is_too_large=True)
        size = rows * GIB / (1 if remat == "dots" else 5)
        return dataclasses.replace(program, hbm={"temporaries": size})

    sizes = {"batch.micro_batch_rows": 160, "model.remat": "dots", "search.num_slots": 100}
    given = request(**sizes)
    names = ["train_step", "decode_chunk", "publish"]
    done = command.plan(given, ask(given), names, ask)
    assert done.fits
    # 160 rows, 80 and then 40, which fit with kept products; 100 slots, 50 and then 25.
    chosen = {"batch.micro_batch_rows": 40, "model.remat": "dots", "search.num_slots": 25}
    assert done.facts.changed_fields == {"mesh.fsdp": 8, **chosen}
    assert [compiled.count(x) for x in names] == [3, 3, 1]
    assert capsys.readouterr().err.count("does not fit; trying") == 4


@pytest.mark.slow
def test_the_command_plans_the_attached_devices(capsys, monkeypatch):
    config = "--config=math"
    assert command.main([config, "--programs=publish", "--json"]) == 0
    told = capsys.readouterr().out
    out = json.loads(told.splitlines()[-1])
    assert out["fits"] and out["programs"]["publish"]["hbm_gib"]["parameters"] > 0
    assert "publish" in told and "fits" in told
    monkeypatch.setattr(command, "ask", child.answer)
    with pytest.raises(ValueError, match="--programs=none: no such program; programs: train_step"):
        command.main([config, "--config.placement=split", "--programs=none"])
    with pytest.raises(ValueError, match="a plan is for the devices of one slice"):
        command.main([config, "--config.placement=fleet"])


@pytest.mark.slow
def test_a_run_finds_every_program_of_its_plan_in_the_cache(tmp_path):
    """The keys of the cache are those of the programs: a plan lowers what the run executes."""
    cache = tmp_path / "cache"
    fields = [
        "--config=configs/math.py",
        "--config.num_steps=2",
        "--config.task.num_eval_prompts=8",
    ]

    def run(module, flag, **variables):
        command = [sys.executable, "-m", f"tba_jax.{module}", *fields, flag]
        options = {"capture_output": True, "text": True, "check": True, "cwd": ROOT}
        return subprocess.run(command, timeout=600, env=os.environ | variables, **options)

    run("plan", f"--write_cache={cache}")
    debug = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_LOGGING_LEVEL": "DEBUG"}
    done = run("main", f"--workdir={tmp_path / 'run'}", **debug)
    hits = set(re.findall(r"Persistent compilation cache hit for '(\w+)'", done.stderr))
    programs = {"train_step", "publish", "_extend", "_copy", "_run_chunk"}
    assert {f"jit_{name}" for name in programs} <= hits
