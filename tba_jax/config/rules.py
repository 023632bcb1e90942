# SPDX-License-Identifier: Apache-2.0
"""Rules of validation that concern several fields, and the error that all rules raise.

`config.validate` calls them. A rule reads a config and touches nothing. Invariant: a message names
the field, its value, the rule and the remedy, in one line.
"""

import math
import os
from typing import Any

LORA_MODULES = ("q", "k", "v", "o", "gate", "up", "down")


class ConfigError(ValueError):
    """A configuration that cannot run; the message says field, value, rule and remedy."""


def need(ok: bool, field: str, value: Any, rule: str, remedy: str) -> None:
    """Raise unless `ok`.

    Raises:
        ConfigError: "config.FIELD = VALUE: RULE. REMEDY".
    """
    if not ok:
        raise ConfigError(f"config.{field} = {value!r}: {rule}. {remedy}")


def combinations(config: Any) -> None:
    """Fields that must suit one another.

    Raises:
        ConfigError: see `need`.
    """
    k = config.objective.group_size
    need(
        config.search.samples_per_prompt >= k,
        "search.samples_per_prompt",
        config.search.samples_per_prompt,
        f"a group needs K = objective.group_size = {k} responses, so S must be at least K",
        f"Set --config.search.samples_per_prompt={k} or lower objective.group_size.",
    )
    need(
        config.replay.capacity_per_prompt >= k,
        "replay.capacity_per_prompt",
        config.replay.capacity_per_prompt,
        f"a prompt's store must hold a group of K = objective.group_size = {k} responses",
        f"Set --config.replay.capacity_per_prompt={k} or more.",
    )
    target(config)
    need(
        0 < config.search.top_p <= 1,
        "search.top_p",
        config.search.top_p,
        "must lie in (0, 1]",
        "Set --config.search.top_p=1.0 to draw from every token.",
    )
    need(
        config.search.min_new_tokens <= config.search.max_new_tokens,
        "search.min_new_tokens",
        config.search.min_new_tokens,
        f"is above search.max_new_tokens = {config.search.max_new_tokens}",
        "Lower it.",
    )
    modules = tuple(config.lora.modules)
    need(
        bool(modules) and len({*modules}) == len(modules) and {*modules} <= {*LORA_MODULES},
        "lora.modules",
        modules,
        f"must be some of {', '.join(LORA_MODULES)}, each once",
        "For example --config.lora.modules=\"('q', 'v')\".",
    )
    _rows(config)
    if config.objective.beta_schedule == "constant":
        need(
            config.objective.beta_final == config.objective.beta
            or config.objective.beta_steps == 0,
            "objective.beta_final",
            config.objective.beta_final,
            "a constant beta does not move",
            "Set --config.objective.beta_schedule=linear.",
        )
    else:
        need(
            config.objective.beta_steps >= 1,
            "objective.beta_steps",
            config.objective.beta_steps,
            f"objective.beta_schedule={config.objective.beta_schedule} needs a length",
            "Give the number of steps.",
        )
    if config.optimizer.schedule == "wsd":
        need(
            config.optimizer.decay_steps >= 1,
            "optimizer.decay_steps",
            config.optimizer.decay_steps,
            "optimizer.schedule=wsd needs a decay horizon",
            "Give the number of steps.",
        )
    if config.eval.num_samples > 1:
        need(
            config.eval.temperature > 0,
            "eval.num_samples",
            config.eval.num_samples,
            "greedy responses to a prompt are all the same",
            "Set --config.eval.temperature=1.0 or --config.eval.num_samples=1.",
        )
    if config.search.exact_lag:
        need(
            config.driver == "sync",
            "search.exact_lag",
            config.search.exact_lag,
            "an exact lag exists only in the synchronous driver",
            "Set --config.driver=sync.",
        )
    if config.search.swap == "in_flight":
        need(
            config.driver == "async" and config.objective.name == "tb",
            "search.swap",
            config.search.swap,
            "only the asynchronous driver publishes during a round, and only an objective that "
            "needs no behaviour policy permits a response of several versions",
            "Set --config.search.swap=round, or --config.driver=async and objective.name=tb.",
        )
    if config.reference.reset_period:
        need(
            config.reference.placement == "trainer",
            "reference.reset_period",
            config.reference.reset_period,
            "a reference that moves must be scored at use",
            "Set --config.reference.placement=trainer.",
        )
    if config.replay.max_staleness:
        need(
            config.replay.pace == "trainer",
            "replay.max_staleness",
            config.replay.max_staleness,
            "bounding the staleness of fresh slots makes the trainer wait",
            "Set --config.replay.pace=trainer.",
        )
        need(
            config.replay.max_staleness >= config.sync_period - 1,
            "replay.max_staleness",
            config.replay.max_staleness,
            f"data merged at a sync is up to sync_period - 1 = {config.sync_period - 1} steps "
            "stale at its last fresh use, so the trainer would wait for ever",
            "Lower sync_period or raise it.",
        )
    if config.replay.max_reuse:
        need(
            config.replay.pace == "trainer",
            "replay.max_reuse",
            config.replay.max_reuse,
            "when every response is used up the trainer must wait for new ones",
            "Set --config.replay.pace=trainer.",
        )
    if config.driver == "sync":
        need(
            config.search.initial_fill == 0,
            "search.initial_fill",
            config.search.initial_fill,
            "the synchronous driver searches exactly what the next steps need",
            "Set --config.search.initial_fill=0.",
        )
        need(
            config.replay.pace == "off",
            "replay.pace",
            config.replay.pace,
            "the synchronous driver has nobody to wait for",
            "Set --config.replay.pace=off.",
        )
    if config.placement == "pod":
        need(
            config.sync.transport == "memory",
            "sync.transport",
            config.sync.transport,
            "in a pod every host takes its weights from the trainer's mesh",
            "Set --config.sync.transport=memory.",
        )
        need(
            config.batch.packed_length == 0,
            "batch.packed_length",
            config.batch.packed_length,
            "hosts of a pod cannot pack rows together",
            "Set --config.batch.packed_length=0.",
        )
    _task(config)
    _judges(config)


def _task(config: Any) -> None:
    task = config.task
    if task.data_path:
        need(
            os.path.exists(task.data_path) or "://" in task.data_path,
            "task.data_path",
            task.data_path,
            "there is no such folder or file",
            "Give a folder that holds train.jsonl and test.jsonl; task custom also takes one "
            ".jsonl or .parquet file, or hf://NAME of a data set on the hub.",
        )
        need(
            os.path.isdir(task.data_path)
            or task.data_path.endswith((".jsonl", ".parquet"))
            or task.data_path.startswith("hf://"),
            "task.data_path",
            task.data_path,
            "is neither a folder, nor a .jsonl or .parquet file, nor hf://NAME",
            "Convert it, one JSON object per line.",
        )
    if task.start_path:
        _start_data(config)
    if task.name == "custom":
        need(
            bool(task.data_path),
            "task.data_path",
            task.data_path,
            "task custom has no data of its own",
            "Give a folder with train.jsonl, a .jsonl or .parquet file, or hf://NAME.",
        )
        need(
            bool(task.reward or config.reward.model_path),
            "task.reward",
            task.reward,
            "task custom has no reward of its own, and reward.model_path names no reward model",
            "For example --config.task.reward=my_rewards.py:length_reward.",
        )
    if task.name == "redteam":
        red_team(config)
    functions = [f.strip().rpartition(":") for f in task.reward.split(",")] if task.reward else []
    need(
        all(module and name for module, _, name in functions),
        "task.reward",
        task.reward,
        "must read package.module:function or path/to/file.py:function, several with commas",
        "For example --config.task.reward=my_rewards:length_reward.",
    )
    need(
        len(task.reward_weights) in (0, len(functions)),
        "task.reward_weights",
        tuple(task.reward_weights),
        f"task.reward names {len(functions)} functions, and each needs a weight",
        "Give one number per function, for example --config.task.reward_weights=1.0,0.5.",
    )


def _start_data(config: Any) -> None:
    path = config.task.start_path
    need(
        os.path.isfile(path) and path.endswith((".jsonl", ".parquet")),
        "task.start_path",
        path,
        "there is no such .jsonl or .parquet file",
        'Give a file with one object {"response": text} per line; tasks of several prompts also '
        'want "prompt_id".',
    )
    need(
        config.objective.name == "tb",
        "task.start_path",
        path,
        "only an objective that needs no behaviour policy can train on responses that no policy "
        "of the run drew",
        "Set --config.objective.name=tb, or leave --config.task.start_path empty.",
    )
    need(
        config.placement != "pod",
        "task.start_path",
        path,
        "hosts of a pod have replay buffers of their own, and only one of them would have it",
        "Leave it empty, or use one host.",
    )
    need(
        config.search.exact_lag == 0,
        "task.start_path",
        path,
        "an exact lag merges as many rounds at every publication, and has no room for more",
        "Set --config.search.exact_lag=0.",
    )


def _judges(config: Any) -> None:
    """Reward models and gold rewards: one source each."""
    gold = config.eval.gold_reward
    need(
        not gold or all(gold.rpartition(":")),
        "eval.gold_reward",
        gold,
        "must read package.module:function or path/to/file.py:function",
        "For example --config.eval.gold_reward=my_rewards:length_reward.",
    )
    for field, value, other, other_value in (
        ("task.reward", config.task.reward, "reward.model_path", config.reward.model_path),
        ("eval.gold_reward", gold, "eval.gold_model", config.eval.gold_model),
    ):
        need(
            not (value and other_value),
            field,
            value,
            f"config.{other} = {other_value!r} names another reward",
            f"Leave one of them empty, for example --config.{other}=''.",
        )
    need(
        not config.reward.model_path or config.reward.missing_eos > -math.inf,
        "reward.missing_eos",
        config.reward.missing_eos,
        "must be a number, or inf for the response's own score",
        "For example --config.reward.missing_eos=-1.0.",
    )


def _rows(config: Any) -> None:
    """How the rows of a batch are made and cut."""
    wanted, packed = config.batch.micro_batch_rows, config.batch.packed_length
    rows = config.batch.num_prompts * config.objective.group_size
    if wanted and not packed:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        need(
            rows % wanted == 0,
            "batch.micro_batch_rows",
            wanted,
            f"must divide the {rows} rows of a batch (batch.num_prompts * objective.group_size)",
            f"Take one of {', '.join(map(str, divisors))}; multiples of "
            f"{config.objective.group_size} score each row once.",
        )
    parts = config.mesh.data * config.mesh.fsdp
    prompts = config.batch.num_prompts
    need(
        prompts % parts == 0,
        "batch.num_prompts",
        prompts,
        f"must divide by mesh.data x mesh.fsdp = {parts}, which divide a batch by prompts",
        f"Set --config.batch.num_prompts={-(-prompts // parts) * parts}.",
    )
    need(
        config.mesh.fsdp == 1 or config.model.remat != "none",
        "model.remat",
        config.model.remat,
        "keeps what the backward pass needs, also the weights gathered for mesh.fsdp: the whole "
        "model on every device",
        "Set --config.model.remat=layers.",
    )
    need(
        wanted % parts == 0,
        "batch.micro_batch_rows",
        wanted,
        f"cannot be divided by mesh.data x mesh.fsdp = {parts}",
        f"Set --config.batch.micro_batch_rows={parts} or a multiple.",
    )
    longest = config.task.max_prompt_tokens + config.search.max_new_tokens
    need(
        not packed or packed >= longest,
        "batch.packed_length",
        packed,
        f"a row must hold a prompt with its response, up to {longest} tokens "
        "(task.max_prompt_tokens + search.max_new_tokens)",
        f"Set --config.batch.packed_length={longest} or more.",
    )


def target(config: Any) -> None:
    """The temperatures of the target, learned log Z, and the temperatures of exploration.

    Raises:
        ConfigError: see `need`.
    """
    for name in ("reference_temperature", "reward_temperature"):
        final = config.objective[f"{name}_final"]
        need(
            config.objective[f"{name}_steps"] > 0 or final == config.objective[name],
            f"objective.{name}_final",
            final,
            "a temperature that is constant does not move",
            f"Set --config.objective.{name}_steps to the number of steps.",
        )
    need(
        not config.batch.packed_length
        or (config.objective.log_z == "vargrad" and not config.search.min_new_tokens),
        "batch.packed_length",
        config.batch.packed_length,
        "rows of several responses know neither a learned log Z nor a least length",
        "Set --config.batch.packed_length=0.",
    )
    need(
        config.objective.log_z == "vargrad" or config.objective.name == "tb",
        "objective.log_z",
        config.objective.log_z,
        "only Trajectory Balance has a log Z to learn",
        "Set --config.objective.name=tb or --config.objective.log_z=vargrad.",
    )
    need(
        config.search.explore_max_temperature >= config.search.explore_min_temperature,
        "search.explore_max_temperature",
        config.search.explore_max_temperature,
        f"is below search.explore_min_temperature = {config.search.explore_min_temperature}",
        "Raise it.",
    )


def red_team(config: Any) -> None:
    """The sections `victim` and `classifier` of task redteam.

    Raises:
        ConfigError: see `need`.
    """
    need(
        config.search.ownership == "any",
        "search.ownership",
        config.search.ownership,
        "task redteam has a single prompt, which every searcher must draw",
        "Set --config.search.ownership=any.",
    )
    template = config.victim.template
    need(
        template == "chat" or template.count("{attack}") == 1,
        "victim.template",
        template,
        "must hold {attack} once, where the attack goes",
        "Set --config.victim.template=chat for the victim's own chat template.",
    )
    kind = config.classifier.kind
    need(
        bool(config.classifier.target),
        "classifier.target",
        config.classifier.target,
        f"classifier.kind={kind} needs to know what counts as a success",
        "Name a label (encoder), a verdict (guard) or a regular expression (pattern).",
    )
    need(
        kind == "pattern" or bool(config.classifier.path),
        "classifier.path",
        config.classifier.path,
        f"classifier.kind={kind} needs a model",
        "Give a Hugging Face folder or hub id.",
    )
