# SPDX-License-Identifier: Apache-2.0
"""Settings that a run chooses itself."""

import json
import types

import jax
import pytest

from tba_jax.config.command_line import override
from tba_jax.config.presets import load as load_preset
from tba_jax.config.rules import validate
from tba_jax.config.schema import flatten, make_config, replace
from tba_jax.devices.placement import MeshShape
from tba_jax.models.hf import families
from tba_jax.planning import choices, estimates
from tba_jax.planning import sizes as planned
from tba_jax.planning.shapes import config_of
from tba_jax.run.model_parts import describe_model

LENGTHS = {"search.max_new_tokens": 256, "task.max_prompt_tokens": 256}
CONFIG = make_config(LENGTHS)
SHAPE = describe_model(CONFIG).config
GPU = types.SimpleNamespace(
    platform="gpu", client=types.SimpleNamespace(platform_version="cuda 12"), process_index=0
)

ONE = MeshShape()


def on_cpu(memory_bytes, **fields):
    given = make_config(LENGTHS | {name.replace("__", "."): x for name, x in fields.items()})
    return choices.on_devices(given, SHAPE, jax.local_devices()[:1], memory_bytes)


def test_rows_of_a_micro_batch_fit_the_memory():
    assert on_cpu(64 * 2**30).batch.micro_batch_rows == 0
    fewer = on_cpu(1000 * 2**20)
    fewest = on_cpu(400 * 2**20).batch.micro_batch_rows
    rows = fewer.batch.micro_batch_rows
    assert 0 < fewest < rows < 256 and 256 % rows == 0
    (line,) = [line for line in choices.lines(fewer) if "rows" in line]
    assert f"batch.micro_batch_rows={rows} (estimated for devices of 1.0 GiB). To change" in line


def preset(name):
    """The config of a preset of configs/math.py, and the shape of its model."""
    config = load_preset(f"math:{name}")
    return config, families.transformer_config(config_of(config.model.path))


def sizes(config, shape, memory_bytes, mesh=ONE, devices=(GPU,)):
    return planned.choose(
        config, shape, mesh, devices, memory_bytes, lambda _: 0, shares_devices=False
    )


def test_a_preset_has_fewer_rows_where_their_products_can_be_kept():
    """One group with kept products takes 26 GiB, and all rows without them 27 GiB."""
    config, shape = preset("gsm8k")
    held = estimates.held_bytes(config, shape)
    config = replace(config, {"batch.micro_batch_rows": 0})
    kept = {"batch.micro_batch_rows": 20, "model.remat": "dots"}
    assert sizes(config, shape, held + 40e9) == kept
    without = replace(config, {"model.remat": "layers"})
    assert sizes(without, shape, held + 40e9) == {"batch.micro_batch_rows": 0}  # all rows
    # Memory is slower than products on CPUs and in float32.
    exact = replace(config, {"model.compute_dtype": "float32"})
    assert "model.remat" not in sizes(exact, shape, held + 400e9)
    assert on_cpu(64 * 2**30, model__compute_dtype="bfloat16").model.remat == "auto"
    # With products that the user keeps, a micro-batch has the most rows that fit.
    given = replace(config, {"model.remat": "dots"})
    assert sizes(given, shape, held + 40e9) == {"batch.micro_batch_rows": 20}
    # The rows of a user stay; products are kept where their memory suffices.
    given = replace(config, {"batch.micro_batch_rows": 8})
    assert sizes(given, shape, held + 40e9) == {"model.remat": "dots"}
    assert sizes(given, shape, held) == {}


def test_a_network_of_gpu_hosts_wants_more_rows_at_once():
    """It carries the weights for each micro-batch; TPU hosts have links."""
    config, shape = preset("math")
    config = replace(config, {"batch.micro_batch_rows": 0})
    other = types.SimpleNamespace(**vars(GPU) | {"process_index": 1})

    def chosen(devices, placement="split"):
        given = replace(config, {"placement": placement})
        return sizes(given, shape, 140 * 2**30, MeshShape(fsdp=4), devices)

    kept = {"batch.micro_batch_rows": 32, "model.remat": "dots"}
    assert chosen([GPU] * 8) == chosen([GPU] * 4 + [other] * 4, "hosts") == kept
    assert chosen([GPU] * 2 + [other] * 2, "shared") == {"batch.micro_batch_rows": 256}
    tpus = [types.SimpleNamespace(platform="tpu", process_index=i) for i in range(2)]
    assert chosen(tpus)["model.remat"] == "dots"


def test_a_resumed_run_takes_what_it_chose(monkeypatch):
    """On another machine and with other data, the choice would be another."""
    monkeypatch.setattr(choices, "with_lengths", lambda config: pytest.fail("chosen again"))
    chosen = {
        "task.max_prompt_tokens": 64,
        "batch.micro_batch_rows": 32,
        "model.remat": "dots",
        "model.compute_dtype": "bfloat16",
        "search.num_slots": 8,
    }
    left_open = make_config({"task.max_prompt_tokens": 0, "model.compute_dtype": "auto"})
    config = choices.choose(left_open, flatten(make_config(chosen)))
    assert choices.lines(config) == [] and flatten(config) == flatten(make_config(chosen))


def test_on_other_devices_only_the_placement_is_chosen_again():
    many = len(jax.local_devices()) + 1
    saved = {"num_searchers": 3, "placement": "split", "mesh.fsdp": many, "seed": 0}
    config = choices.choose(make_config({"num_searchers": 0}), flatten(make_config(saved)))
    assert config.num_searchers == 3 and config.placement == "auto" and config.mesh.fsdp < many


@pytest.mark.parametrize(("fields", "rate"), [({"num_steps": 4}, 1.5e-4), ({"lora.rank": 8}, 1e-4)])
def test_a_learning_rate_of_0_is_chosen_for_the_size_of_the_model(fields, rate):
    """The start model has 296,000 parameters: 1e-6 sqrt(7e9 / 296,000) = 1.54e-4."""
    config = choices.choose(make_config({"optimizer.learning_rate": 0.0} | fields), {})
    found = config.optimizer.learning_rate
    assert (found.start, found.final, found.shape) == (rate, 0.0, "linear")
    assert found.warmup == min(10, config.num_steps // 2)
    assert any("optimizer.learning_rate" in line for line in choices.lines(config))
    assert choices.choose(replace(config, {"seed": 1}), {}).optimizer == config.optimizer


@pytest.mark.parametrize("words", [2, 2000])
def test_lengths_fit_the_data_and_the_context(tmp_path, words):
    path = tmp_path / "train.jsonl"
    rows = [{"prompt": f"{i} " + "12 + 3 " * words} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    given = [f"--config.task.data_path={path}", "--config.task.reward=math:floor"]
    config = override(None, ["--config=custom", *given])
    validate(config)
    kept, _ = choices.with_lengths(replace(config, {"task.num_eval_prompts": 30}))
    assert kept.task.num_eval_prompts == 30
    config, reason = choices.with_lengths(config)
    prompt, response = config.task.max_prompt_tokens, config.search.max_new_tokens
    assert prompt > 0 and prompt % 32 == 0 and response > 0
    if words == 2:
        assert prompt == 32  # the longest of the data, rounded up
    assert config.task.num_eval_prompts == 8  # a fifth of 40 rows
    assert reason.startswith("prompts of up to ") and "a context of " in reason
    validate(config)
