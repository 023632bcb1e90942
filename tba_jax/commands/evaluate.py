# SPDX-License-Identifier: Apache-2.0
"""Command: held-out evaluation of a model folder, a hub id, or the policy of a run.

python -m tba_jax.evaluate --config=math[:PRESET] [--model=DIR_OR_HUB_ID] ...
python -m tba_jax.evaluate --workdir=DIR ...

Both forms accept [--config.FIELD=VALUE ...] and [--json].
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from tba_jax.commands.entry_point import make_parser
from tba_jax.config.command_line import override
from tba_jax.config.resolved import dtypes_on
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, replace
from tba_jax.report.words import format_metric, metric_label


def evaluate(config: Config, model_config: Any, params: Any, folder: str) -> dict[str, Any]:
    """Evaluate params on the task of a config, with the settings of its `eval` section.

    Args:
        params: parameters on the devices of `devices.site.reading_mesh`, layers stacked.

    Raises:
        ValueError: too few devices for search.num_devices, or an unusable reward or judge.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from tba_jax.devices.site import Site, reading_mesh
    from tba_jax.evaluation.metrics import make_measures
    from tba_jax.models.tokenizer import Tokenizer
    from tba_jax.rewards.functions import make_rewards
    from tba_jax.run import model_parts
    from tba_jax.run import shared as parts
    from tba_jax.search.prompts import PromptReader

    devices = jax.local_devices()
    num = config.search.num_devices
    if num > len(devices):
        raise ValueError(
            f"search.num_devices={num}: there are only {len(devices)} devices. Set "
            f"--config.search.num_devices={len(devices)}"
        )
    task = config.task.open()
    tokenizer = Tokenizer.load(folder)
    source = reading_mesh(model_config.hidden_size, devices)
    site = Site(Mesh(np.array(devices[:num]), ("model",)))

    def start_params(_: Site) -> Any:
        found = model_parts.describe_model(config)
        if found.config != model_config:
            raise ValueError(
                f"config.model.path = {model_parts.model_path(config)!r}: eval.gold compares with "
                "this model, which has another architecture; name the right one, or set "
                "--config.eval.gold=''"
            )
        return model_parts.start_weights(config, found, source, site.mesh)

    with contextlib.ExitStack() as stack:
        rewards, gold = make_rewards(config, task, tokenizer, site)
        for part in filter(None, (rewards, gold)):
            stack.callback(part.close)
        if environments := parts.make_environments(config, tokenizer):
            stack.callback(environments.close)
        reference = start_params if config.eval.gold else None
        scoring = model_parts.make_scoring(config, tokenizer)
        padding = model_parts.make_padding(config, tokenizer)
        measures = make_measures(model_config, tokenizer, [site], gold, reference, scoring, padding)
        decoder = model_parts.make_decoder(config, model_config, tokenizer, site)
        grader = parts.make_grader(config, task, tokenizer, rewards)
        parts.check_environments(config, task, environments)
        answer = parts.make_shard_evaluator(config, decoder, grader, measures[site], environments)
        reader = PromptReader(task, tokenizer, config.task.max_prompt_tokens)
        evaluator = parts.make_evaluator(config, reader)
        # A large model takes minutes. Standard output is for the result alone.
        count = f"{len(evaluator.prompts):,}"
        print(f"{task.name}: evaluating {count} held-out prompts", file=sys.stderr, flush=True)
        weights = model_parts.decoder_weights(config, model_config, params, source, site.mesh)
        shards = [answer.evaluate(weights, ticket) for ticket in evaluator.tickets(0)]
        return evaluator.merge(shards).metrics()


def _of_model(name: str, path: str, overrides: Sequence[str]) -> tuple[str, Config, Any, Any, str]:
    """Return name, config, architecture, weights and folder of the model of a preset.

    Args:
        path: path or hub ID of another model; "": the model of the preset.
        overrides: arguments --config.FIELD=VALUE.
    """
    import jax
    import jax.numpy as jnp

    from tba_jax.devices.platform import platform_of
    from tba_jax.devices.site import reading_mesh
    from tba_jax.models import model as models
    from tba_jax.planning.choices import with_lengths
    from tba_jax.run.model_parts import model_path

    own = [f"--config.model.path={path}"] if path else []
    config = override(None, [f"--config={name}", *overrides, *own])
    validate(config)
    config = with_lengths(config)[0]
    config = replace(config, dtypes_on(config, platform_of(jax.local_devices()[0])))
    found = models.describe(model_path(config))
    mesh = reading_mesh(found.config.hidden_size, jax.local_devices())
    params = found.load_on(mesh, jnp.dtype(config.model.compute_dtype))
    return path or model_path(config), config, found.config, params, str(found.folder)


def _of_run(workdir: str, overrides: Sequence[str]) -> tuple[str, Config, Any, Any, str]:
    """Return name, config, architecture, weights and folder of the policy of a run."""
    from tba_jax.commands.saved import load_policy, load_run_config
    from tba_jax.run.workdir import run_folder

    folder = run_folder(workdir, "--workdir")
    config = override(load_run_config(folder), overrides)
    validate(config)
    step, model_config, params, _, source, _ = load_policy(folder)
    return f"{workdir} at step {step}", config, model_config, params, source


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = make_parser("evaluate", __doc__)
    add = parser.add_argument
    add("--config", default="", help="a preset, math[:PRESET], or a file, FILE.py[:PRESET]")
    add("--model", default="", help="Hugging Face folder or hub id")
    add("--workdir", default="", help="work directory of a run")
    add("--json", action="store_true", help="one JSON object as the last line")
    args, overrides = parser.parse_known_args(argv)
    from tba_jax.devices.platform import open_cache

    if args.workdir and (args.config or args.model):
        raise ValueError(
            "--workdir already has a config and a model. Leave out --config and --model, or "
            "--workdir"
        )
    if not (args.workdir or args.config):
        raise ValueError("no model given. Add --workdir=DIR, or --config=PRESET with --model")
    open_cache()
    if args.workdir:
        what, config, model, params, folder = _of_run(args.workdir, overrides)
    else:
        what, config, model, params, folder = _of_model(args.config, args.model, overrides)
    result = evaluate(config, model, params, folder)
    if args.json:
        print(json.dumps({"model": what, **result}))
        return 0
    skipped, failed, metric = result["num_skipped"], result["num_failed"], result["metric"]
    as_ = "counted as 0" if metric == "pass_at_1" else "left out of the mean"
    text = f"{what}: {metric_label(metric)} {format_metric(metric, result[metric])} on "
    text += f"{result['n']} held-out prompts"
    text += f" ({skipped} skipped as too long)" if skipped else ""
    text += f" ({failed} responses have no reward, {as_})" if failed else ""
    print(f"{text}, {result['response_length_mean']:.1f} tokens per response")
    return 0
