# SPDX-License-Identifier: Apache-2.0
"""The card of an export says what the run was, in a form that the hub reads."""

import json
import shlex
from pathlib import Path

from huggingface_hub import ModelCard

from tba_jax.commands.model_card import command, hub_id, model_card
from tba_jax.config.command_line import override
from tba_jax.config.schema import flatten
from tba_jax.report.files import Metrics, Run


def fields(*arguments):
    """Flat config, as config.json has it."""
    return json.loads(json.dumps(flatten(override(None, arguments))))


def test_a_local_folder_has_no_link_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "model").mkdir(parents=True)
    local = ("me/model", "./me/other", "/a/b", "embedded:start_model", "")
    assert [hub_id(path) for path in ("me/other", *local)] == ["me/other"] + [""] * len(local)


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
    text = model_card(run, 700, "me/solver")
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
    program, *again = shlex.split(command(config).replace("\\\n", " "))[2:]
    assert program == "tba_jax.main" and fields(*again) == config
