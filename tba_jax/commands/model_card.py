# SPDX-License-Identifier: Apache-2.0
"""README.md of an exported model: source, training, evaluation, and how to load it.

Local paths are shortened to their last part, because the card is read on other machines.
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from tba_jax.config.presets import load, names
from tba_jax.config.schema import defaults, flatten
from tba_jax.report.files import Run
from tba_jax.report.words import format_duration, format_metric, metric_label

_OBJECTIVES = {"tb": "Trajectory Balance", "rloo": "RLOO", "online_dpo": "online DPO"}
_ALWAYS = ("objective.name", "objective.beta", "objective.group_size", "optimizer.learning_rate")
_PAPER = "https://arxiv.org/abs/2503.18929"


def hub_id(model_path: str) -> str:
    """Return the hub ID in a config's `model.path`; "" for a folder or an embedded model."""
    is_local = model_path.startswith((".", "/", "~", "embedded:")) or model_path.count("/") > 1
    return "" if is_local else model_path


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

    config = run.config
    source = str(config["model.path"]) or "embedded:start_model"
    base = hub_id(source)
    objective = _OBJECTIVES.get(config["objective.name"], str(config["objective.name"]))
    front = ModelCardData(
        base_model=base or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["tba_jax", "reinforcement-learning", objective.lower().replace(" ", "-")],
    )
    default = defaults(config["objective.name"])
    settings = "\n".join(
        f"| `{field}` | {_text(value)} |"
        for field, value in sorted(config.items())
        if field in _ALWAYS or (field.startswith("objective.") and value != default.get(field))
    )
    group, prompts = config["objective.group_size"], config["batch.num_prompts"]
    data = str(config["task.data_path"])
    licence = (
        f"The licence of [{base}](https://huggingface.co/{base}) also holds for these weights"
        if base
        else "These weights have the licence of the start model"
    )
    return f"""---
{front.to_yaml().strip()}
---

# {name.rstrip("/").split("/")[-1]}

{f"[{base}](https://huggingface.co/{base})" if base else f"`{_text(source)}`"} after {step} steps of
off-policy reinforcement learning with the objective **{objective}** on the task
`{config["task.name"]}`, made with `tba_jax` ([the method]({_PAPER})).

## Evaluation

{_evaluation(run)}

## Training

- Data: task `{config["task.name"]}`{f", `{_text(data)}`" if data else ""}.
- {step} steps of {prompts} prompts with {group} responses each (driver `{config["driver"]}`, number
  of searchers: {config["num_searchers"]}).
{_hardware(run)}- Versions: {", ".join(f"{k} {v}" for k, v in sorted(run.versions.items()))}.

```sh
{command(config)}
```

| setting | value |
|---|---|
{settings}

## Load

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

## Licence

{licence}. Training added no other terms.
"""


def _evaluation(run: Run) -> str:
    """Return a table of the first and the last evaluation, or a sentence if there is none."""
    evaluations = run.report.get("eval", {})
    before, after = evaluations.get("before"), evaluations.get("after")
    if before is None or after is None:
        return "Not evaluated: the run was exported before its end."
    lines = [f"| | before | step {after['step']} |", "|---|---|---|"]
    shown = [before["metric"], "reward_mean", "response_length_mean"]
    for metric in dict.fromkeys(shown):
        if None not in (before.get(metric), after.get(metric)):
            values = [format_metric(metric, e[metric]) for e in (before, after)]
            lines.append(f"| {metric_label(metric)} | {' | '.join(values)} |")
    temperature = run.config["eval.temperature"]
    how = f"sampled at temperature {temperature}" if temperature else "greedy"
    return "\n".join(lines) + f"\n\nOn {after['n']} held-out prompts, {how}."


def _hardware(run: Run) -> str:
    if "hardware" not in run.report:
        return ""
    return f"- {format_duration(run.report['wall_s'])} of wall time on {run.report['hardware']}.\n"


def _text(value: Any) -> str:
    """Return a value in command-line syntax; a local path is shortened to its last part."""
    text = str(value)
    return text.rstrip("/").split("/")[-1] if text.startswith(("/", "~")) else text
