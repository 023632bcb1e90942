# SPDX-License-Identifier: Apache-2.0
"""The main command in both drivers: kills, reports, own tasks, episodes; sync is reproducible."""

import json
import shutil
import signal

import pytest
from commands import (
    ROOT,
    SYNC,
    assert_trained,
    evaluated,
    exported,
    lines,
    losses,
    report,
    run,
    start,
    wait_for,
)
from fake_models import load_folder

import tba_jax
from tba_jax.commands import export
from tba_jax.run import model_parts


@pytest.fixture(scope="module")
def reference(tmp_path_factory, cache):
    """An uninterrupted run of 8 steps."""
    workdir = tmp_path_factory.mktemp("reference") / "run"
    run(workdir, *SYNC, cache=cache)
    return workdir


def test_two_searchers_sigkill_and_resume_have_the_losses_of_the_reference(
    reference, cache, tmp_path
):
    workdir, two = tmp_path / "run", (*SYNC, "placement=shared", "num_searchers=2")
    process = start(workdir, *two, cache=cache)
    wait_for(
        lambda: max(losses(workdir), default=0) >= 6 and (workdir / "checkpoints" / "4").exists(),
        process=process,
    )
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.communicate()
    # The killed one agrees as far as it got.
    before = losses(workdir)
    expected = losses(reference)
    assert len(expected) == 8
    assert before == {step: expected[step] for step in before}

    done = run(workdir, *two, cache=cache)
    assert "resumed" in done.stdout and "step 4 of 8" in done.stdout
    assert losses(workdir) == expected
    steps = [[x["step"] for x in lines(y / "samples.jsonl")] for y in (workdir, reference)]
    assert steps[0] == steps[1]
    for name in ("eval", "ledger", "staleness"):
        assert report(workdir)[name] == report(reference)[name]
    assert report(reference)["ledger"]["generated"] == 8 * 4 * 16
    assert_trained(reference, 8)
    records = [r for r in lines(reference / "metrics.jsonl") if "train/loss" in r]
    # Sampler and trainer compute the same log-probs, up to float32 rounding over 48 tokens.
    assert all(0 <= r["train/sampler_gap"] < 1e-4 for r in records)


def test_evaluate_and_export_agree_with_the_run(reference, tmp_path, capsys):
    result, after = evaluated(reference, capsys)
    assert (result["pass_at_1"], result["n"]) == (after["pass_at_1"], after["n"])
    config, _ = exported(reference, tmp_path / "model")
    assert config == load_folder(str(model_parts.START_MODEL))[0]
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| pass@1 | 37.5% | {after['pass_at_1']:.1%} |" in card and "after 8 steps" in card
    capsys.readouterr()
    with pytest.raises(ValueError, match="is not empty"):
        export.main([f"--workdir={reference}", f"--out={tmp_path / 'model'}"])


IN_AN_ENVIRONMENT = (
    "task.environment=tba_jax.tasks.arithmetic:Calculator",
    "search.stop_strings=:",
    "search.max_new_tokens=24",
    "search.max_turns=4",
)
# An agent writes its episodes over HTTP.
WITH_AN_AGENT = (
    f"task.environment={ROOT / 'tests/serving/agents_for_tests.py'}:arithmetic",
    "search.max_new_tokens=40",
)
SHARED_BY_ALL = (
    "JAX_NUM_CPU_DEVICES=8",
    "placement=shared",
    "mesh.fsdp=2",
    "search.num_devices=2",
    "num_searchers=2",
    "sync_period=2",
    "objective.importance=none",
)


# Searchers and a trainer on devices of their own are in the run of a chat data set below.
@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("num_searchers=2", *IN_AN_ENVIRONMENT),
        ("num_searchers=2", *WITH_AN_AGENT),
        SHARED_BY_ALL,
    ],
    ids=("environment", "agent", "two devices each"),
)
def test_async_run_trains_on_searcher_data(overrides, cache, tmp_path):
    workdir = tmp_path / "run"
    run(workdir, *overrides, cache=cache, timeout=240)
    assert_trained(workdir, 8)
    stored = [y for group in tba_jax.load_run(workdir).buffer().values() for y in group]
    # In 8 steps one searcher may run all tickets; with driver=sync they share them evenly.
    assert stored and {y.searcher for y in stored} <= {0, 1}


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# As published for TRL: message lists in and out, columns as keywords, None where it does not apply.
REWARDS = """
import re

def accuracy_reward(completions, target, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if t in c else 0.0 for c, t in zip(contents, target)]

def format_reward(prompts, completions, kind, log_metric=None, **kwargs):
    assert all(p[0]["role"] == "system" and p[-1]["role"] == "user" for p in prompts), prompts
    scores = [len(set(c[0]["content"])) / 20 for c in completions]
    return [None if k == "any" else s for s, k in zip(scores, kind)]

def length_penalty(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]
"""


@pytest.mark.slow
def test_a_chat_data_set_trains_with_trl_rewards_from_elsewhere(cache, tmp_path):
    model = shutil.copytree(ROOT / "tba_jax" / "assets" / "start_model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Add up."},
                {"role": "user", "content": f"{a}+{b}"},
            ],
            "target": str(a + b),
            "kind": "any" if b == 0 else "sum",
        }
        for a in range(10)
        for b in range(5)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = tmp_path / "elsewhere" / "rewards.py"
    rewards.parent.mkdir()
    rewards.write_text(REWARDS)
    names = ("accuracy_reward", "format_reward", "length_penalty")
    workdir = tmp_path / "run"
    done = run(
        workdir,
        "task.name=custom",
        f"task.data_path={data}",
        f"task.reward={','.join(f'{rewards}:{name}' for name in names)}",
        "task.reward_weights=1.0,0.5,0.01",
        "task.max_prompt_tokens=64",
        "task.num_eval_prompts=8",
        f"model.path={model}",
        "num_steps=3",
        "eval.period=0",
        "checkpoint.period=0",
        "JAX_NUM_CPU_DEVICES=2",
        "placement=split",
        cache=cache,
        cwd=tmp_path,
    )
    assert "custom: 42 prompts, 8 held out" in done.stdout
    assert_trained(workdir, 3)

    report = json.loads((workdir / "report.json").read_text())
    for when in ("before", "after"):
        values = report["eval"][when]
        assert (values["metric"], values["n"], values["num_failed"]) == ("reward_mean", 8, 0)
        parts = [values[f"reward_part_{name}"] for name in names]
        assert 0 <= parts[0] <= 1 and 0 < parts[1] < 1 and parts[2] <= -1
    assert report["ledger"]["rejected"] == {}
    prompt = report["samples"][0]["prompt"]
    assert prompt.startswith("<bos><system>Add up.<user>") and prompt.endswith("<assistant>")
