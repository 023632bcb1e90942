# SPDX-License-Identifier: Apache-2.0
"""Real clients, each in the venv of an interpreter that a variable of the environment names.

TBA_JAX_OPENAI=venv2/bin/python:venv3/bin/python python -m pytest -m slow tests/serving

TBA_JAX_TRL, TBA_JAX_VERIFIERS and TBA_JAX_OPENENV name one interpreter each (docs/guide/serve.md).
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from fake_models import START_MODEL_LOGIT, logprob_bound, scored_tokens
from qwen_tokenizer import qwen_like_tokenizer
from served_model import TEMPLATE, ServedModel, folder_with_template

from tba_jax.serving.chat import RendererFormat
from tests.environments.fake_sessions import Scripted
from tests.integration import commands

PYTHONS = [path for path in os.environ.get("TBA_JAX_OPENAI", "").split(":") if path]
SCRIPT = Path(__file__).with_name("openai_client.py")
pytestmark = pytest.mark.slow


def client(python, model, what):
    return run_client([python, str(SCRIPT), f"{model.url}/v1", what])


def run_client(command, timeout=170):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("python", PYTHONS)
def test_a_client_gets_text_tokens_streams_stops_and_errors(python, tmp_path):
    model = ServedModel(folder_with_template(tmp_path), token="secret")
    with model.running():
        assert client(python, model, "plain") == "plain: all checks passed\n"


@pytest.mark.parametrize("name", ["trl", "openenv"])
def test_training_clients_get_the_tokens_and_log_probs_of_the_model(name, tmp_path):
    python = os.environ.get(f"TBA_JAX_{name.upper()}")
    if not python:
        pytest.skip(f"TBA_JAX_{name.upper()} names no interpreter")
    model = ServedModel(folder_with_template(tmp_path))
    with model.running():
        url = model.url if name == "trl" else f"{model.url}/v1"
        command = [python, str(SCRIPT.with_name(f"{name}_client.py")), url, str(tmp_path)]
        rows = json.loads(run_client(command))
    assert len(rows) == {"trl": 8, "openenv": 2}[name]
    assert_log_probs_are_those_of_the_scorer(rows, model)


def assert_log_probs_are_those_of_the_scorer(rows, model):
    for row in rows:
        ids, mask = np.array(row["ids"], np.int32), np.array(row["is_sampled"], bool)
        assert mask.any()
        scored = scored_tokens(model.config, model.params, ids[:1], ids[1:])[mask[1:]]
        bound = logprob_bound(model.config, len(ids), START_MODEL_LOGIT)
        np.testing.assert_allclose(np.array(row["logprobs"])[mask], scored, rtol=0, atol=bound)


def verifiers_python():
    python = os.environ.get("TBA_JAX_VERIFIERS")
    if not python:
        pytest.skip("TBA_JAX_VERIFIERS names no interpreter")
    return python


def test_a_taskset_of_verifiers_runs_through_its_training_client(tmp_path):
    python, script = verifiers_python(), SCRIPT.with_name("verifiers_tasksets.py")
    model = ServedModel(folder_with_template(tmp_path))
    with model.running():
        command = [python, str(script), f"{model.url}/v1", str(tmp_path), "start", "2"]
        traces = json.loads(run_client(command))
    assert [len(trace["branches"]) for trace in traces] == [2, 2]
    assert_log_probs_are_those_of_the_scorer([y for x in traces for y in x["branches"]], model)


@pytest.mark.timeout(900)
def test_tasksets_of_verifiers_are_environments_of_a_training_run(tmp_path, monkeypatch):
    """Episodes of two paths: the harness drops its history after a turn."""
    monkeypatch.setenv("AGENT_PYTHON", verifiers_python())
    # The task's prompts begin with the token of the beginning, so chats do, too.
    folder = folder_with_template(tmp_path / "model", "{{ bos_token }}" + TEMPLATE)
    monkeypatch.setenv("AGENT_MODEL", str(folder))
    workdir = tmp_path / "run"
    agent = SCRIPT.with_name("agents_for_tests.py")
    small = ("samples_per_prompt=2", "num_slots=2", "max_new_tokens=60")
    done = commands.run(
        workdir,
        *commands.SYNC,
        f"task.environment={agent}:with_verifiers",
        "task.num_eval_prompts=1",
        "eval.period=0",
        "num_steps=1",
        "batch.num_prompts=1",
        "objective.group_size=2",
        "reward.timeout_s=300",
        *(f"search.{each}" for each in small),
        cache=tmp_path / "cache",
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    ledger = json.loads((workdir / "report.json").read_text())["ledger"]
    assert ledger["rejected"] == {} and ledger["generated"] == 2
    (record,) = (r for r in commands.lines(workdir / "metrics.jsonl") if "train/loss" in r)
    assert record["search/episode_paths"] == 2
    # Forked episodes: as of agents whose paths are scored (test_agents).
    assert record["train/sampler_gap"] < 1e-4


class ToolCalls(Scripted):
    """In the place of a decode session: a model that calls a tool in every turn."""

    def submit(self, prompt, keys, settings):
        return super().submit(prompt, keys, settings, None)

    def cancel(self, request): ...

    def unfinished(self, request):
        return {}


@pytest.mark.parametrize("python", PYTHONS)
def test_a_client_calls_tools(python, tmp_path):
    pytest.importorskip("renderers")
    model = ServedModel(folder_with_template(tmp_path), token="secret")
    tokenizer = qwen_like_tokenizer(tmp_path / "qwen")
    chat = RendererFormat(tokenizer, "qwen3")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>'
    served = model.served._replace(tokenizer=tokenizer, chat=chat, eos_ids=tokenizer.eos_ids)
    served = served._replace(max_length=4096)
    model.queue._served = served
    model.session = ToolCalls(tokenizer, [call] * 3)
    with model.running():
        assert client(python, model, "tools") == "tools: all checks passed\n"
    first, second, _ = model.session.contexts
    # The sampled call is in the second prompt as it was sampled.
    sampled = tokenizer.encode(call, add_bos=False)
    ids = [*first.tolist(), *sampled.tolist()]
    messages = [{"role": "assistant", "content": ""}, {"role": "tool", "content": "10"}]
    bridged = chat.bridge(first, sampled, messages, [])
    assert bridged[: len(ids)].tolist() == ids and len(second) > len(ids)
