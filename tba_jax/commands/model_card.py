# SPDX-License-Identifier: Apache-2.0
"""README.md of an exported model: source, training, evaluation, and how to load it.

Local paths are shortened to their last part, because the card is read on other machines.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from tba_jax.config.presets import load, names
from tba_jax.config.schema import defaults, flatten
from tba_jax.report.files import Run
from tba_jax.report.words import format_duration, format_metric, metric_label

_OBJECTIVES = {"tb": "Trajectory Balance", "rloo": "RLOO", "online_dpo": "online DPO"}
_ALWAYS = ("objective.name", "objective.beta", "objective.group_size", "optimizer.learning_rate")


def hub_id(model_path: str) -> str:
    """Return the hub ID in a config's `model.path`; "" for a folder or an embedded model."""
    is_local = model_path.startswith((".", "/", "~", "embedded:")) or model_path.count("/") > 1
    return "" if is_local or not model_path or Path(model_path).is_dir() else model_path


def command(config: Mapping[str, Any]) -> str:
    """Return the command that runs this config again.

    Args:
        config: field name -> value, as in config.json.
    """
    name = str(config["name"]).replace("/", ":")
    is_preset = name in names()
    start = f"--config={name if is_preset else 'YOUR_CONFIG.py'}"
    # config.json does not say which settings come from a user's config file.
    base = json.loads(json.dumps(flatten(load(name)))) if is_preset else config
    changes = [
        f"--config.{field}={shlex.quote(_text(tuple(v) if isinstance(v, list) else v))}"
        for field, v in sorted(config.items())
        if field != "name" and v != base.get(field)
    ]
    return " \\\n    ".join(["python -m tba_jax.main " + start, *changes])


def model_card(run: Run, step: int, name: str) -> str:
    """Return the card as Markdown with the hub's YAML header.

    Args:
        name: argument of `from_pretrained`: a hub ID or the folder.
    """
    from huggingface_hub import ModelCardData

    config, report = run.config, run.report
    source = str(config["model.path"]) or "embedded:start_model"
    base = hub_id(source)
    objective = _OBJECTIVES.get(config["objective.name"], str(config["objective.name"]))
    header = ModelCardData(
        base_model=base or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["tba_jax", "reinforcement-learning", objective.lower().replace(" ", "-")],
    )
    default = defaults(config["objective.name"])
    evaluation = report.get("eval", {})
    ends = [evaluation.get("before"), evaluation.get("after")]
    ends = ends if all(ends) else []
    named = [ends[0]["metric"], "reward_mean", "response_length_mean"] if ends else []
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return jinja2.Template(template, trim_blocks=True, keep_trailing_newline=True).render(
        header=header.to_yaml().strip(),
        title=name.rstrip("/").split("/")[-1],
        name=name,
        base=base,
        source=_text(source),
        step=step,
        objective=objective,
        config=config,
        data=_text(config["task.data_path"]),
        after=ends[1] if ends else None,
        evaluations=[
            (metric_label(x), [format_metric(x, end[x]) for end in ends])
            for x in dict.fromkeys(named)
            if all(end.get(x) is not None for end in ends)
        ],
        hardware=report.get("hardware"),
        wall_time=format_duration(report.get("wall_s", 0.0)),
        versions=", ".join(f"{k} {v}" for k, v in sorted(run.versions.items())),
        command=command(config),
        settings=[
            (field, _text(value))
            for field, value in sorted(config.items())
            if field in _ALWAYS or (field.startswith("objective.") and value != default.get(field))
        ],
    )


def _text(value: Any) -> str:
    """Return a value in command-line syntax; a local path is shortened to its last part."""
    text = str(value)
    return text.rstrip("/").split("/")[-1] if text.startswith(("/", "~")) else text
