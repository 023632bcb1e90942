# SPDX-License-Identifier: Apache-2.0
"""Imports point from higher layers to strictly lower ones; modules stay readable."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tba_jax"

# Folder names stand for all their modules, which may import one another.
LAYERS = {
    "trajectory": 0,
    "trees": 0,
    "config_rules": 0,
    "config": 1,
    "metrics": 0,
    "command_line": 2,
    "config_devices": 2,
    "background": 0,
    "rounds": 1,
    "prompt_pool": 1,
    "replay_draws": 2,
    "step_plan": 1,
    "cluster": 1,
    "repartition": 4,
    "trajectory_store": 2,
    "models": 1,
    "objectives": 1,
    "edit_distance": 1,
    "log_z": 2,
    "optimizers": 1,
    "rewards": 1,
    "sharding": 0,
    "device_turns": 0,
    "tokenizer": 1,
    "fused_logprobs": 1,
    "decoding": 2,
    "logprobs": 2,
    "lora": 2,
    "micro_batches": 2,
    "reward_models": 2,
    "outbox": 3,
    "replay_buffer": 3,
    "weight_sync": 3,
    "checkpointing": 3,
    "tasks": 3,
    "data": 4,
    "searcher": 5,
    "start_data": 5,
    "train_step": 3,
    "reference": 3,
    "trainer": 5,
    "evaluation": 4,
    "evaluation_metrics": 5,
    "attack_metrics": 5,
    "response_classifiers": 3,
    "victim_reward": 4,
    "sft": 7,
    "plots": 4,
    "report_page": 5,
    "frontier": 5,
    "parts": 6,
    "reward_parts": 7,
    "run": 7,
    "run_report": 8,
    "wiring": 8,
    "report": 6,
    "generate": 6,
    "assets": 8,
    "buffer": 6,
    "planning": 8,
    "plan": 9,
    "bench": 6,
    "drivers": 9,
    "schedule_replay": 10,
    "saved_run": 7,
    "evaluate": 8,
    "export": 8,
    "main": 11,
    "launch_processes": 11,
    "study": 12,
}


def _layer_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def _imports(path: Path) -> set[str]:
    """First components, below tba_jax, of everything a module imports from the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tba_jax":
            rest = (node.module or "").split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("tba_jax."):
                    found.add(alias.name.split(".")[1])
    return found


def violations(path: Path) -> list[str]:
    """Imports of a module that do not point strictly downwards."""
    name = _layer_name(path)
    return [
        f"{path.name} (layer {LAYERS[name]}) imports {other} (layer {LAYERS.get(other)})"
        for other in sorted(_imports(path))
        if other != name and LAYERS.get(other, 99) >= LAYERS[name]
    ]


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def test_every_module_has_a_layer():
    assert {_layer_name(p) for p in MODULES} <= set(LAYERS)


def test_imports_point_down():
    assert [line for path in MODULES for line in violations(path)] == []


def test_a_violation_is_seen(tmp_path, monkeypatch):
    bad = tmp_path / "trainer.py"
    bad.write_text("from tba_jax.searcher import Searcher\n")
    monkeypatch.setattr("test_architecture.PACKAGE", tmp_path)
    assert violations(bad) == ["trainer.py (layer 5) imports searcher (layer 5)"]


def test_no_module_is_longer_than_600_lines():
    too_long = {
        str(p.relative_to(ROOT)): n for p in MODULES if (n := len(p.read_text().splitlines())) > 600
    }
    assert too_long == {}


def test_configs_cannot_be_imported_by_accident():
    # configs/math.py on sys.path would hide the standard library's math.
    assert not (ROOT / "configs" / "__init__.py").exists()
