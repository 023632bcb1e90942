# SPDX-License-Identifier: Apache-2.0
"""Commands that need no run: generate, serve, and the card of an export."""

import json
import shlex
from pathlib import Path

import pytest
from fake_models import start_model, teacher_forced
from huggingface_hub import ModelCard

from tba_jax.commands import evaluate, export, generate, serve, sweep
from tba_jax.commands import model_card as cards
from tba_jax.commands.entry_point import run_command
from tba_jax.config.command_line import override
from tba_jax.config.schema import flatten
from tba_jax.report.files import Metrics, Run

MODEL, MATH, ADDRESS = "--model=embedded:start_model", "--config=math", "gs://bucket/run"
MOUNT = f"--out={ADDRESS} is an address; wanted a folder. Mount the bucket (gcsfuse) and give"


def test_a_generated_text_is_the_most_probable_and_the_last_line_an_object(capsys):
    prompt = "7+5-3+8-6+2"
    assert generate.main([MODEL, f"--prompt={prompt}", "--temperature=0", "--json"]) == 0
    printed, line = capsys.readouterr().out.splitlines()
    result, (config, params, tokenizer) = json.loads(line), start_model()
    (text,), before = result["texts"], tokenizer.encode(prompt, add_bos=True)
    ids = [*tokenizer.encode(text, add_bos=False), tokenizer.eos_ids[0]]
    assert teacher_forced(config, params, before, ids).argmax(-1).tolist() == ids
    assert (printed, result["num_tokens"]) == (prompt + text, [len(ids)])


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (serve, [], "give --model=FOLDER or --workdir=RUN"),
        (serve, [MODEL, "--workdir=runs/a"], "and not both"),
        (serve, [MODEL, "--host=0.0.0.0"], "Add --token=SECRET"),
        (serve, [MODEL, "--num_slots=0"], "--num_slots"),
        (serve, ["--model=no/such/folder", "--port=0"], "no/such/folder"),
        (evaluate, [MATH, "--workdir=here"], "Leave out --config and --model, or --workdir"),
        (evaluate, ["--config.num_steps=1"], "Add --workdir=DIR, or --config"),
        (export, ["--workdir=run", f"--out={ADDRESS}"], MOUNT),
        (sweep, [MATH, f"--out={ADDRESS}"], MOUNT),
    ],
)
def test_a_flag_that_cannot_be_used_is_refused_in_one_line(
    command, flags, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_command(lambda: command.main(flags)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and list(tmp_path.iterdir()) == []


def fields(*arguments):
    """Flat config, as config.json has it."""
    return json.loads(json.dumps(flatten(override(None, arguments))))


def test_a_card_of_a_model_of_the_hub():
    config = fields("--config=math:gsm8k", "--config.objective.beta=0.02")
    common = {"metric": "pass_at_1", "reward_mean": 0.5, "n": 512}
    evals = {
        "before": common | {"pass_at_1": 0.403, "step": 0},
        "after": common | {"pass_at_1": 0.546, "step": 700},
    }
    report = {"eval": evals, "wall_s": 4920.0, "hardware": "4 x A100"}
    versions = {"tba_jax": "0.1.0", "jax": "0.10.2"}
    run = Run(Path("run"), report=report, config=config, versions=versions, metrics=Metrics())
    text = cards.model_card(run, 700, "me/solver")
    data = ModelCard(text).data.to_dict()
    assert data["base_model"] == "realtreetune/rho-1b-sft-GSM8K"
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert data["tags"] == ["tba_jax", "reinforcement-learning", "trajectory-balance"]
    for part in (
        "| pass@1 | 40.3% | 54.6% |",
        "- 700 steps of 7 prompts with 20 responses each",
        "- 1:22:00 of wall time on 4 x A100.",
        "python -m tba_jax.main --config=math:gsm8k \\\n    --config.objective.beta=0.02\n",
        "| `objective.beta` | 0.02 |",
        "The licence of [realtreetune/rho-1b-sft-GSM8K](https://huggingface.co/realtreetune/",
    ):
        assert part in text
    # The command of a card makes the same config again.
    config = fields("--config=redteam:gpt2", "--config.lora.modules=('q', 'v')")
    program, *again = shlex.split(cards.command(config).replace("\\\n", " "))[2:]
    assert program == "tba_jax.main" and fields(*again) == config


def test_a_local_folder_has_no_link_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "model").mkdir(parents=True)
    local = ("me/model", "./me/other", "/a/b", "embedded:start_model", "")
    assert [cards.hub_id(path) for path in ("me/other", *local)] == ["me/other"] + [""] * len(local)
