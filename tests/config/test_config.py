# SPDX-License-Identifier: Apache-2.0
"""Schema, validation and presets: every mistake is one clear line before anything is written."""

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tba_jax.config import document
from tba_jax.config.presets import load
from tba_jax.config.resolved import asked, cpu_devices
from tba_jax.config.rules import validate
from tba_jax.config.schema import SETTINGS, ConfigError, make_config
from tba_jax.devices.placement import divide
from tba_jax.settings import Schedule
from tba_jax.train.optimizers import value_at

SERVER, STOPS = "http://127.0.0.1:8000/v1", {"search.stop_strings": ("a",)}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["agent", "math", "tldr", "redteam"])
def test_default_presets_run_offline_on_one_device(name):
    config = load(name)
    assert config.task.data_path == ""
    for value in (config.model.path, config.reward.model_path):
        assert value == "" or value.startswith("embedded:")
    number = cpu_devices(config)
    devices = [SimpleNamespace(id=i, process_index=0, platform="cpu") for i in range(number)]
    divide(config.placement, devices, asked(config))


def test_gsm8k_is_the_papers_figure_1_run():
    config = load("math:gsm8k")
    # paper.md 3.1, column "Figure-1 run": 700 x 140 = 98,000 responses
    assert config.num_steps * config.batch.num_prompts * config.objective.group_size == 98_000
    assert (config.objective.group_size, config.search.samples_per_prompt) == (20, 24)
    assert str(config.objective.beta) == "linear(0.014, 0.004, 500)"
    assert (config.replay.recency_prob, config.sync_period, config.num_searchers) == (0.95, 2, 3)
    assert (config.model.param_dtype, config.optimizer.clip_norm) == ("bfloat16", 0.0)


def test_the_red_team_preset_is_appendix_b3():
    config = load("redteam:gpt2")
    # paper.md 3.3
    assert (config.num_steps, config.sync_period, config.eval.num_samples) == (5000, 10, 1024)
    assert config.batch.num_prompts * config.objective.group_size == 128
    assert (config.objective.beta, config.objective.built.needs.head) == (Schedule(0.05), "log_z")
    assert (config.search.min_new_tokens, config.search.max_new_tokens) == (5, 20)
    assert (config.replay.recency_prob, config.replay.capacity_per_prompt) == (0.5, 100_000)
    assert str(config.objective.reward_temperature) == "linear(2, 1, 500)"


def test_the_papers_other_runs_differ_where_they_say():
    # Their update counts from 1: 31 updates of the line, 0.777 at the last, then the jump.
    config = load("tldr:pythia410m")
    beta = config.objective.beta.over(config.num_steps)
    np.testing.assert_allclose([value_at(beta, 30), value_at(beta, 31)], [0.777, 0.05], rtol=1e-3)
    slow = load("tldr:pythia2.8b_slow")
    beta = slow.objective.beta.over(slow.num_steps)
    assert slow.num_steps == 825 and value_at(beta, 138) > 0.6
    assert value_at(beta, 139) == np.float32(0.05)
    # Their rate has lost 12 % at the end.
    gpt2 = load("redteam:gpt2")
    rate = gpt2.optimizer.learning_rate.over(gpt2.num_steps)
    np.testing.assert_allclose([value_at(rate, i) for i in (99, 4999)], [1e-4, 877e-7], rtol=1e-3)


def test_the_page_of_settings_is_as_declared():
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == document.page(), "run python -m tba_jax.config.document docs/config.md"
    assert [name for name, setting in SETTINGS.items() if not setting.meaning] == []


def test_no_field_is_dead():
    """Each field's name is read somewhere outside the declarations, as attribute or keyword."""
    used = set()
    for path in (ROOT / "tba_jax").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text())) if path.name != "config.py" else ()
        used |= {getattr(node, "attr", getattr(node, "arg", None)) for node in nodes}
    # search.engine is read in its own config.py, as search.server.
    assert {name.split(".")[-1] for name in SETTINGS} - used == {"engine"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "config.num_steps = 0: must be at least 1"),
        ({"objective.group_size": 32}, "a group needs objective.group_size=32 responses"),
        ({"replay.capacity_per_prompt": 8}, "capacity_per_prompt = 8: must hold at least one gro"),
        ({"search.exact_lag": 2}, "search.exact_lag = 2: with driver=async the staleness of data"),
        ({"replay.max_staleness": 1, "sync_period": 4}, "are up to 3 steps stale at their"),
        ({"task.name": "custom"}, "task.data_path = '': task custom needs data"),
        (
            {"task.name": "math", "task.chat": "yes"},
            "task.chat = 'yes': must be True, False, or op",
        ),
        ({"task.reward": "a:f,b:g", "task.reward_weights": (1.0,)}, "reward names 2 functions"),
        ({"search.explore": (0.5, 1.5, 1.0)}, "search.explore = .*two ascending temperatures"),
        ({"task.name": "redteam", "victim.template": "{question}"}, "contain .attack. once"),
        ({"search.engine": SERVER, "num_searchers": 2}, f"engine = '{SERVER}': a server has one"),
        ({"search.engine": SERVER, "lora.rank": 4, "search.top_p": 0.9}, "top_p = 0.9: with a s"),
        ({"mesh.fsdp": 2, "batch.micro_batch_rows": 1}, "rows = 1: cannot .*rows=2 or a multiple"),
        ({"search.min_new_tokens": 49}, "must not exceed search.max_new_tokens = 48"),
        ({"search.stop_strings": ("a", "")}, "an empty text would end every response"),
        (STOPS | {"search.min_new_tokens": 2}, "a stop string may appear before .* = 2"),
        ({"search.stop_ids": (3, -1)}, "token ids are not negative"),
        ({"reward.num_workers": 100_000}, r"num_workers = 100000: must lie in \[0, 512\]. The def"),
        (
            {"replay.max_bytes": 3_000},
            "replay.max_bytes = 3000: too small for a batch of 16 prompts. One response of "
            r"maximum length to each prompt takes about (\d+) bytes. Set .*replay.max_bytes=\1 or",
        ),
    ],
)
def test_a_mistake_is_one_line_with_field_value_and_rule(changes, message):
    with pytest.raises(ConfigError, match=message) as info:
        validate(make_config(changes))
    assert not any("\n" in line for line in info.value.args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective.name": "rloo"}, "accepts any sampler.*objective.importance=none"),
        ({"objective.importance": "token_clip"}, "accepts any sampler.*objective.importance=none"),
        ({"driver": "sync", "search.exact_lag": 2}, "search.exact_lag=0"),
    ],
)
def test_start_data_that_a_run_cannot_take_is_refused(tmp_path, changes, message):
    path = tmp_path / "start.jsonl"
    path.write_text('{"prompt_id": 0, "response": "1"}\n')
    given = {"task.start_path": str(path)}
    validate(make_config({**given, "objective.importance": "none"}))
    if "objective.name" not in changes:
        given["objective.importance"] = "none"
    with pytest.raises(ConfigError, match=f"task.start_path.*{message}"):
        validate(make_config({**given, **changes}))
