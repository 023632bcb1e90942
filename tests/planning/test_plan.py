# SPDX-License-Identifier: Apache-2.0
"""The plan command: figures of the real run's programs, a verdict, a remedy, an exit code."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax.config.rules import validate
from tba_jax.config.schema import freeze, plain, replace
from tba_jax.models.transformer import num_params
from tba_jax.planning import command as plan
from tba_jax.planning import compile_one
from tba_jax.planning.children import Answer
from tba_jax.planning.model_shapes import PUBLISHED, published_config
from tba_jax.planning.verdict import GIB, Program, occupancies

ROOT = Path(__file__).parents[2]
START_MODEL = ROOT / "tba_jax" / "assets" / "start_model"
PRESETS = runpy.run_path(str(ROOT / "configs" / "math.py"))


def in_process(request, *, timeout_s):
    del timeout_s
    return Answer(json.loads(json.dumps(compile_one.answer(request))))


def planner(topology=""):
    model, _ = published_config(str(START_MODEL))
    return plan.Planner(
        {"topology": topology, "model": model, "judges": {}, "cache": ""}, 60.0, in_process
    )


def start_config(**fields):
    config = freeze(PRESETS["get_config"]("arithmetic"))
    # The devices of this process are there already.
    config = replace(config, {"num_cpu_devices": 1, "placement": "split", **fields})
    validate(config)
    return plain(config)


@pytest.fixture(scope="module")
def facts():
    return planner().describe(start_config(), chooses=False)


def test_residents_are_those_of_the_run(facts):
    size = 4 * facts["num_params"]
    trainer = facts["groups"]["trainer"]["residents"]
    assert trainer["parameters"] == size
    assert trainer["optimiser state"] == pytest.approx(2 * size, abs=64)  # and two counters
    searcher = facts["groups"]["searcher"]["residents"]
    assert searcher["weights in use"] == searcher["reference parameters"] == size


@pytest.mark.slow
def test_a_run_that_trains_adapters_holds_and_moves_them_alone():
    size = {"lora.rank": 4, "lora.modules": ("q", "v")}
    facts = planner().describe(start_config(**size), chooses=False)
    whole = 4 * facts["num_params"]
    trainer = facts["groups"]["trainer"]["residents"]
    searcher = facts["groups"]["searcher"]["residents"]
    assert trainer["frozen parameters"] == searcher["frozen parameters"] == whole
    assert trainer["parameters"] < whole / 20
    assert trainer["optimiser state"] == pytest.approx(2 * trainer["parameters"], abs=64)
    assert searcher["weights in use"] == searcher["next weights"] < whole / 4
    names = ["train_step", "publish", "merge"]
    programs = plan.plan(planner(), facts, names, lambda _: None).programs
    by_name = {p.name: p for p in programs}
    assert by_name["merge"].hbm["next weights"] >= searcher["next weights"]
    assert by_name["publish"].hbm["parameters"] == trainer["parameters"]
    assert by_name["train_step"].hbm["frozen parameters"] == whole


def test_every_program_compiles_and_the_verdict_is_their_sum(facts):
    names = [p["name"] for p in facts["programs"]]
    assert names == [
        "train_step", "publish", "prefill", "admit", "decode_chunk", "score_reference",
    ]  # fmt: skip
    done = plan.plan(planner(), facts, names, lambda _: None)
    assert done.fits and done.weighed is not None and done.advice
    by_name = {p.name: p for p in done.programs}
    step = by_name["train_step"]
    assert step.hbm["parameters"] == 4 * facts["num_params"]
    # Arguments beyond the state are the batch: 256 rows of 28 tokens, 16 log-probs and a slot, and
    # six numbers of each of 256 responses.
    assert step.hbm["inputs"] == pytest.approx(4 * 256 * (28 + 16 + 1 + 6), rel=0.01)
    # Forward, again for the backward pass, and twice that: 2 FLOPs a weight and token at least.
    assert step.flops > 6 * 0.8 * facts["num_params"] * 256 * 28
    figures = (done.programs, done.found, done.weighed, done.advice, done.fits)
    out = json.loads(json.dumps(plan.table.as_json(facts, *figures)))
    for name in names:
        figures = out["programs"][name]
        assert {"hbm_gib", "flops", "bytes", "compile_s", "roofline_s"} <= figures.keys()
        assert figures["compile_s"] > 0 and figures["bytes"] > 0
    assert {"fits", "chip", "placement", "programs", "advice"} <= out.keys()


def test_a_plan_with_an_environment_has_the_prompts_of_later_turns_and_kept_conversations():
    changes = {"task.environment": "game.py:Game", "search.max_new_tokens": 40}
    found = planner().describe(start_config(**changes), chooses=False)
    done = plan.plan(planner(), found, ["prefill", "extend"], lambda _: None)
    sizes = {p["name"]: p["sizes"] for p in found["programs"]}
    # A prompt of 12 tokens and 40 tokens of an episode.
    assert sizes["prefill"] == "4 prompts of 52 tokens"
    prefill, extend = done.programs
    kept = "caches of waiting conversations"
    waiting = found["groups"]["searcher"]["transients"]
    # 64 slots of training, 512 of an evaluation.
    assert 8 * extend.hbm[kept] == waiting[kept] == waiting["KV cache"] > 0
    assert extend.with_cache and extend.hbm["parameters"] == prefill.hbm["parameters"]
    # Arguments beyond weights and caches are tokens and lengths.
    assert extend.hbm["inputs"] < 2**14 and extend.hbm["temporaries"] > 0


def test_a_run_that_does_not_fit_is_reported_with_a_remedy(facts):
    small = json.loads(json.dumps(facts))
    small["chip"]["hbm_bytes"] = 16 * 2**20
    done = plan.plan(planner(), small, ["train_step"], lambda _: None)
    assert not done.fits
    assert "over by" in plan.table.occupancy_table(done.found)
    assert "train_step needs" in done.advice[0]


@pytest.mark.parametrize("limit", [0, 1, 5, 8, 100])
def test_bisection_finds_the_largest_that_fits(limit):
    asked = []
    candidates = [1, 2, 4, 8, 16, 32]
    found = plan.largest(candidates, lambda n: asked.append(n) or n <= limit)
    assert found == max((n for n in candidates if n <= limit), default=None)
    assert len(asked) <= 3


def test_published_shapes_are_the_models_they_name():
    from tba_jax.models.hf import config_json

    sizes = {
        "realtreetune/rho-1b-sft-GSM8K": 1_100_048_384,
        "Qwen/Qwen2.5-7B": 7_615_616_512,
        "EleutherAI/pythia-410m": 405_334_016,
        "EleutherAI/pythia-1b": 1_011_781_632,
        "EleutherAI/pythia-2.8b": 2_775_208_960,
        "openai-community/gpt2": 124_439_808,
        "meta-llama/Llama-3.2-1B": 1_235_814_400,
    }
    for name, size in sizes.items():
        assert num_params(config_json.transformer_config(PUBLISHED[name])) == size, name


def test_an_unknown_model_is_refused(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="Give a folder with the model's config"):
        published_config("nobody/nothing")
    _, source = published_config("Qwen/Qwen2.5-7B")
    assert "the hub could not be reached" in source


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tba_jax.plan", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=False,
    )


def test_the_command_plans_the_attached_devices():
    done = run("--config=configs/math.py", "--programs=publish", "--json")
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["fits"] and out["programs"]["publish"]["hbm_gib"]["parameters"] > 0
    assert "publish" in done.stdout and "fits" in done.stdout


def test_a_senseless_slice_is_one_line_and_exit_code_2():
    done = run("--config=configs/math.py", "--topology=v5e:3")
    assert done.returncode == 2
    assert "expected CHIP:AxB" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--programs=nothing",
            "--programs=nothing: no such program; programs: train_step, publish",
        ),
        ("--config.model.path=/nowhere", "Give a folder with the model's config.json"),
        ("--config.num_step=3", "did you mean num_steps"),
        ("--config.placement=fleet --compare", "with placement=fleet the whole slice trains"),
    ],
)
def test_an_invalid_command_is_refused(monkeypatch, capsys, argument, message):
    ready = planner()
    monkeypatch.setattr(plan, "Planner", lambda *_: ready)
    config = f"--config={ROOT / 'configs' / 'math.py'}"
    assert plan.main([config, "--config.num_cpu_devices=1", *argument.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_billion_parameters_on_a_tpu_slice():
    pytest.importorskip("libtpu")
    done = run(
        "--config=configs/math.py:gsm8k",
        "--topology=v5e:2x4",
        "--programs=train_step,publish",
        "--json",
    )
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["placement"]["layout"] == "interleaved"
    # bfloat16, an eighth on each device.
    held = out["programs"]["publish"]["hbm_gib"]["parameters"]
    assert held == pytest.approx(1_100_048_384 * 2 / 8 / 2**30, rel=0.01)
    assert done.returncode == (0 if out["fits"] else 1)
    if not out["fits"]:
        assert out["advice"]


@pytest.mark.slow
def test_a_trainer_group_of_a_fleet_is_planned_over_all_of_its_hosts():
    pytest.importorskip("libtpu")
    done = run(
        "--config=configs/math.py",
        "--topology=v5e:2x4",
        "--config.placement=fleet",
        "--config.fleet.trainer_hosts=2",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    placed = out["placement"]
    assert (placed["layout"], placed["trainer_devices"]) == ("fleet", 8)
    assert {p["failure"] for p in out["programs"].values()} == {""}
    # Gradients of eight devices are summed.
    assert out["programs"]["train_step"]["collective_bytes"] > 0
    assert "elsewhere, planned for devices like these" in done.stdout


@pytest.mark.slow
def test_a_run_finds_every_program_of_its_plan_in_the_cache(tmp_path):
    """The keys of the cache are those of the programs: a plan lowers what the run executes."""
    cache = tmp_path / "cache"
    fields = [
        "--config=configs/math.py",
        "--config.num_steps=2",
        "--config.task.num_eval_prompts=8",
    ]
    assert run(*fields, f"--write_cache={cache}").returncode == 0
    done = subprocess.run(
        [sys.executable, "-m", "tba_jax.main", *fields, f"--workdir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=True,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_LOGGING_LEVEL": "DEBUG"},
    )
    hits = set(re.findall(r"Persistent compilation cache hit for '(\w+)'", done.stderr))
    programs = {"train_step", "publish", "prefill", "admit", "run_chunk", "_score"}
    assert {f"jit_{name}" for name in programs} <= hits


class _Described:
    """Answers with what it is asked for, as a planner that chooses nothing."""

    def describe(self, config, *, chooses):
        assert not chooses
        return {"config": config, "changed_fields": {}, "notes": ("another",)}


def test_rows_that_the_command_asks_for_are_kept():
    facts = {
        "config": {"batch": {"micro_batch_rows": 32}},
        "changed_fields": {"batch.micro_batch_rows": 32, "mesh.fsdp": 8},
        "sizes": {"micro_batch_options": [8, 16, 32]},
        "notes": ["idle"],
    }
    kept = plan.keep_rows(_Described(), facts, 16)
    assert kept["config"]["batch"]["micro_batch_rows"] == 16
    assert kept["changed_fields"] == {"mesh.fsdp": 8} and kept["notes"] == ["idle"]
    assert plan.keep_rows(_Described(), facts, 32) is facts
    changed = plan.keep_rows(_Described(), facts, 12)
    assert changed["config"] == facts["config"] and "=12 is changed" in changed["notes"][-1]


class _Compiler(plan.Planner):
    """Compiles train steps that need 1 GiB a row, and describes as a planner does."""

    def __init__(self, limit):
        self.limit, self.compiled = limit, []

    def describe(self, config, *, chooses, trainer_devices=0.0):
        rows = config["batch"]["micro_batch_rows"]
        return {**FACTS, "config": config, "sizes": {**FACTS["sizes"], "micro_batch_rows": rows}}

    def compile(self, facts, name):
        rows = facts["config"]["batch"]["micro_batch_rows"]
        self.compiled.append(rows)
        return Program(name, "trainer", failure="" if rows <= self.limit else "too large")


FACTS = {
    "config": {"batch": {"micro_batch_rows": 160}, "driver": "async"},
    "sizes": {
        "useful_rows": [8, 16, 32, 40, 80, 160],
        "micro_batch_rows": 160,
        "least_rows": 40,
    },
    "changed_fields": {"mesh.fsdp": 8},
    "notes": [],
    "groups": {},
    "shares_devices": False,
}


@pytest.mark.parametrize("limit, rows", [(160, 160), (100, 80), (39, 32), (1, 8)])
def test_chosen_rows_are_those_of_which_the_compiled_step_fits(limit, rows):
    compiler, said = _Compiler(limit), []
    found = plan.confirm(compiler, FACTS, said.append, names=["batch.micro_batch_rows"])
    assert found["config"]["batch"]["micro_batch_rows"] == rows
    assert found["changed_fields"].get("batch.micro_batch_rows", 160) == rows
    assert bool(found["notes"]) == (rows != 160)
    assert ("nor with any smaller value" in "".join(found["notes"])) == (limit == 1)
    assert compiler.compiled[0] == 160 and len(compiler.compiled) <= 4
    assert said[0] == f"batch.micro_batch_rows=160: {'fits' if limit >= 160 else 'does not fit'}"


@pytest.mark.parametrize(
    "limit, remat, rows",
    [(160, "dots", 160), (90, "dots", 80), (40, "dots", 40), (39, "layers", 160), (1, "layers", 8)],
)
def test_products_are_kept_for_at_least_one_group_on_each_device(limit, remat, rows):
    """Fewer rows with kept products are faster than all rows that compute the products again.

    A row without kept products needs a fifth of the memory.
    """

    class Compiler(_Compiler):
        def compile(self, facts, name):
            rows, remat = facts["sizes"]["micro_batch_rows"], facts["config"]["model"]["remat"]
            fits = rows <= self.limit * (1 if remat == "dots" else 5)
            return Program(name, "trainer", failure="" if fits else "too large")

    config = {**FACTS["config"], "model": {"remat": "dots"}}
    facts = {**FACTS, "config": config, "changed_fields": {"model.remat": "dots"}}
    found = plan.confirm(Compiler(limit), facts, lambda line: None, names=[plan._ROWS])
    assert found["changed_fields"]["model.remat"] == found["config"]["model"]["remat"] == remat
    assert found["config"]["batch"]["micro_batch_rows"] == rows


def test_a_size_that_is_left_open_is_compiled_once():
    """`confirm` asks for it by its value."""
    asked = []

    def ask(request, *, timeout_s):
        asked.append(request["config"])
        work = ("flops", "num_bytes", "collective_bytes", "network_bytes", "launches", "compile_s")
        return Answer({**dict.fromkeys(work, 1.0), "hbm": {}, "uncounted": []})

    rates = ("flops_per_s", "bytes_per_s", "link_bytes_per_s", "network_bytes_per_s")
    fixed = {"name": "train_step", "group": "trainer", "variants": 1, "with_cache": False}
    facts = {
        "config": {"batch": {"micro_batch_rows": 0}, "search": {"num_slots": 0}},
        "sizes": {"micro_batch_rows": 160, "num_slots": 64},
        "programs": [{**fixed, "calls_per_round": 0}],
        "chip": dict.fromkeys(rates, 1.0),
    }
    planner = plan.Planner({}, 1.0, ask)
    config = {"batch": {"micro_batch_rows": 160}, "search": {"num_slots": 64}}
    for given in (facts, {**facts, "config": config}):
        assert planner.compile(given, "train_step").bound == "compute"
    assert asked == [facts["config"]]
    other = {**facts, "sizes": {"micro_batch_rows": 80, "num_slots": 64}}
    planner.compile(other, "train_step")
    assert len(asked) == 2


@pytest.mark.parametrize("code, slots", [(1, 160), (3, 128), (4, 64), (20, 160)])
def test_slots_are_fewer_where_all_programs_do_not_fit_together(code, slots):
    """Ten GiB for the cache of 160 slots, and for the code of two programs; 21 GiB in all."""

    class Compiler(plan.Planner):
        def __init__(self):
            self.compiled = []

        def describe(self, config, *, chooses, trainer_devices=0.0):
            cache = {"KV cache": config["search"]["num_slots"] / 16 * GIB}
            searcher = {"residents": {"weights in use": 6 * GIB}, "transients": cache}
            return {
                **FACTS,
                "config": config,
                "sizes": {"num_slots": config["search"]["num_slots"], "round_rows": 160},
                "groups": {"searcher": searcher},
                "chip": {"hbm_bytes": 21 * GIB, "overheads": {}},
            }

        def compile(self, facts, name):
            self.compiled.append(name)
            hbm = {"code": code * GIB}
            return Program(name, "searcher", hbm, variants=1, with_cache=name == "decode_chunk")

    compiler = Compiler()
    facts = compiler.describe({**FACTS["config"], "search": {"num_slots": 160}}, chooses=False)
    programs = [compiler.compile(facts, name) for name in ("decode_chunk", "score_reference")]
    done = plan.Plan(facts, programs, occupancies(facts, programs), None)
    assert done.fits == (code == 1)
    found = plan.with_fewer_slots(compiler, done, lambda line: None)
    assert found.fits == (code < 20)
    assert found.facts["sizes"]["num_slots"] == slots
    assert compiler.compiled.count("score_reference") == 1


def test_chosen_slots_are_those_of_which_the_compiled_decoder_fits():
    class Compiler(plan.Planner):
        def describe(self, config, *, chooses, trainer_devices=0.0):
            slots = config["search"]["num_slots"]
            return {**FACTS, "config": config, "sizes": {"num_slots": slots, "round_rows": 72}}

        def compile(self, facts, name):
            fits = facts["config"]["search"]["num_slots"] <= 20
            return Program(name, "searcher", failure="" if fits else "too large")

    compiler = Compiler({}, 1.0)
    facts = compiler.describe({**FACTS["config"], "search": {"num_slots": 72}}, chooses=False)
    found = plan.confirm(compiler, facts, lambda line: None, names=["search.num_slots"])
    assert found["changed_fields"]["search.num_slots"] == 16
    assert "the compiled decode_chunk does not fit" in found["notes"][-1]
