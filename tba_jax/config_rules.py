# SPDX-License-Identifier: Apache-2.0
"""Which configs can run: ranges, choices, combinations, and how they fit the devices.

`validate` touches no device, so a mistake is reported before any is; `validate_devices` needs to
know how many there are. What chips refuse is the business of `sharding`.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

from tba_jax.config import (
    BETA_SCHEDULES,
    DRIVERS,
    DTYPES,
    EVICTIONS,
    LONG_PROMPTS,
    LOSS_SCALES,
    LR_SCHEDULES,
    OBJECTIVES,
    OPTIMIZERS,
    OWNERSHIPS,
    PACES,
    PLACEMENTS,
    REFERENCE_PLACEMENTS,
    REMATS,
    SWAPS,
    TASKS,
    TRANSPORTS,
    Config,
    ConfigError,
    get_field,
)


def need(ok: bool, field: str, value: Any, rule: str, remedy: str) -> None:
    """Refuse a value: field, value, rule, remedy.

    Raises:
        ConfigError: unless `ok`.
    """
    if not ok:
        raise ConfigError(f"config.{field} = {value!r}: {rule}. {remedy}")


def _one_of(config: Config, field: str, allowed: Sequence[str]) -> None:
    value = get_field(config, field)
    need(
        value in allowed,
        field,
        value,
        f"must be one of {', '.join(allowed)}",
        f"Set --config.{field}={allowed[0]} for the default behaviour.",
    )


def validate(config: Config) -> None:
    """Check ranges, choices and combinations; touches no device and writes nothing.

    Raises:
        ConfigError: field, value, rule, remedy of the first violation.
    """
    for field, allowed in (
        ("driver", DRIVERS),
        ("placement", PLACEMENTS),
        ("task.long_prompts", LONG_PROMPTS),
        ("objective.name", OBJECTIVES),
        ("objective.scale", LOSS_SCALES),
        ("objective.beta_schedule", BETA_SCHEDULES),
        ("optimizer.name", OPTIMIZERS),
        ("optimizer.schedule", LR_SCHEDULES),
        ("replay.pace", PACES),
        ("replay.evict", EVICTIONS),
        ("search.ownership", OWNERSHIPS),
        ("search.cache_dtype", ("", *DTYPES)),
        ("search.swap", SWAPS),
        ("sync.transport", TRANSPORTS),
        ("reference.placement", REFERENCE_PLACEMENTS),
        ("model.remat", REMATS),
        ("model.param_dtype", DTYPES),
        ("model.compute_dtype", DTYPES),
        ("model.rollout_dtype", DTYPES),
    ):
        _one_of(config, field, allowed)
    for field, least in (
        ("num_steps", 1),
        ("sync_period", 1),
        ("num_searchers", 1),
        ("num_cpu_devices", 1),
        ("mesh.data", 1),
        ("mesh.fsdp", 1),
        ("mesh.model", 1),
        ("task.max_prompt_tokens", 1),
        ("task.num_eval_prompts", 0),
        ("batch.num_prompts", 1),
        ("batch.num_length_buckets", 1),
        ("batch.micro_batch_rows", 0),
        ("batch.packed_length", 0),
        ("batch.logprob_chunk_tokens", 1),
        ("objective.group_size", 2),
        ("objective.beta_steps", 0),
        ("objective.beta_jump_step", 0),
        ("optimizer.warmup_steps", 0),
        ("optimizer.stable_steps", 0),
        ("optimizer.decay_steps", 0),
        ("optimizer.weight_decay", 0.0),
        ("optimizer.clip_norm", 0.0),
        ("optimizer.max_nonfinite_steps", 1),
        ("reference.reset_period", 0),
        ("search.samples_per_prompt", 1),
        ("search.prompts_per_round", 1),
        ("search.max_new_tokens", 1),
        ("search.num_devices", 1),
        ("search.num_slots", 0),
        ("search.min_new_tokens", 0),
        ("search.outbox_bytes", 1),
        ("search.initial_fill", 0),
        ("search.exact_lag", 0),
        ("replay.fresh_window", 1),
        ("replay.capacity_per_prompt", 1),
        ("replay.max_bytes", 1),
        ("replay.max_age", 0),
        ("replay.max_reuse", 0),
        ("replay.max_staleness", 0),
        ("sync.keep", 2),
        ("reward.num_workers", 1),
        ("checkpoint.period", 0),
        ("checkpoint.keep", 1),
        ("checkpoint.timeout_s", 1),
        ("pod.heartbeat_s", 2),
        ("eval.period", 0),
        ("eval.max_new_tokens", 1),
        ("eval.num_slots", 1),
        ("eval.num_samples", 1),
        ("reward.batch_size", 1),
        ("eval.temperature", 0.0),
        ("eval.num_report_samples", 0),
        ("log.period", 1),
    ):
        value = get_field(config, field)
        need(value >= least, field, value, f"must be at least {least}", "Raise it.")
    for field in (
        "objective.beta",
        "objective.beta_final",
        "optimizer.learning_rate",
        "optimizer.eps",
        "search.sampling_temperature",
        "replay.priority_temperature",
        "reward.timeout_s",
        "log.watchdog_s",
    ):
        value = get_field(config, field)
        need(value > 0, field, value, "must be positive", "Give a value above 0.")
    for field in (
        "replay.recency_prob",
        "replay.uniform_mix",
        "reward.max_failure_rate",
        "optimizer.b1",
        "optimizer.b2",
    ):
        value = get_field(config, field)
        need(0 <= value <= 1, field, value, "must lie in [0, 1]", "Give a share, not a percent.")
    _validate_combinations(config)


def _validate_combinations(config: Config) -> None:
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
    _validate_rows(config)
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
    _validate_task(config)
    _validate_judges(config)


def _validate_task(config: Config) -> None:
    task = config.task
    dataset = task.name.partition("reasoning_gym:")[2]
    if not dataset:
        _one_of(config, "task.name", (*TASKS, "reasoning_gym:DATASET"))
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


def _validate_judges(config: Config) -> None:
    """Reward models and gold rewards: one source each."""
    gold = config.eval.gold_reward
    need(
        not gold or all(gold.rpartition(":")),
        "eval.gold_reward",
        gold,
        "must read package.module:function or path/to/file.py:function",
        "For example --config.eval.gold_reward=my_rewards:length_reward.",
    )
    for field, other in (
        ("task.reward", "reward.model_path"),
        ("eval.gold_reward", "eval.gold_model"),
    ):
        need(
            not (get_field(config, field) and get_field(config, other)),
            field,
            get_field(config, field),
            f"config.{other} = {get_field(config, other)!r} names another reward",
            f"Leave one of them empty, for example --config.{other}=''.",
        )
    need(
        not config.reward.model_path or config.reward.missing_eos > -math.inf,
        "reward.missing_eos",
        config.reward.missing_eos,
        "must be a number, or inf for the response's own score",
        "For example --config.reward.missing_eos=-1.0.",
    )


def _validate_rows(config: Config) -> None:
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
    k = config.objective.group_size
    # Rows of a group lie on one device; so what is cut along groups is divided along groups.
    unit = 1 if packed or wanted % k else k
    need(
        wanted // unit % parts == 0,
        "batch.micro_batch_rows",
        wanted,
        f"{wanted // unit} {'groups' if unit > 1 else 'rows'} per micro-batch cannot be divided "
        f"by mesh.data x mesh.fsdp = {parts}",
        f"Set --config.batch.micro_batch_rows={unit * parts} or a multiple.",
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


def trainer_mesh(config: Config, num_hosts: int) -> tuple[int, int, int]:
    """Sizes of the trainer's mesh: data, fsdp, model.

    In a pod every host trains. A mesh that fsdp and model do not spread over all of the hosts
    already gets, with the default `mesh.data = 1`, one copy of the state for each host.
    """
    data, fsdp, model = config.mesh.data, config.mesh.fsdp, config.mesh.model
    if config.placement == "pod" and data == 1 and (fsdp * model) % num_hosts:
        data = num_hosts
    return data, fsdp, model


def _validate_pod(config: Config, num_devices: int, num_hosts: int) -> None:
    data, fsdp, model = trainer_mesh(config, num_hosts)
    shape = f"{data} x {fsdp} x {model}"
    trainer, mine = data * fsdp * model, data * fsdp * model // num_hosts
    need(
        trainer % num_hosts == 0 and mine <= num_devices,
        "mesh",
        shape,
        f"each of the {num_hosts} processes has an equal share of the trainer's {trainer} devices, "
        f"and sees {num_devices}",
        "Make mesh.data x mesh.fsdp x mesh.model a multiple of the processes, and small enough.",
    )
    need(
        mine % model == 0,
        "mesh.model",
        model,
        f"the rows of a batch would be divided over processes: each has {mine} trainer devices",
        "Lower mesh.model and raise mesh.fsdp.",
    )
    need(
        config.num_searchers < num_hosts or config.num_searchers % num_hosts == 0,
        "num_searchers",
        config.num_searchers,
        f"the {num_hosts} processes of the pod have equal numbers of searchers, at least one",
        f"Give a multiple of {num_hosts}.",
    )
    each, left = config.search.num_devices, num_devices - mine or mine
    need(
        each <= left,
        "search.num_devices",
        each,
        f"each process has {left} devices for searchers",
        "Lower it.",
    )
    need(
        config.batch.num_prompts % (data * fsdp) == 0,
        "batch.num_prompts",
        config.batch.num_prompts,
        f"must divide by mesh.data x mesh.fsdp = {data * fsdp} of {num_hosts} processes",
        "Raise or lower it.",
    )


def validate_devices(config: Config, num_devices: int, num_hosts: int = 1) -> None:
    """Check the parts of the placement that depend on how many devices there are.

    Args:
        config: validated.
        num_devices: of this process.
        num_hosts: processes of the run.

    Raises:
        ConfigError: as `validate`.
    """
    if config.placement == "pod":
        _validate_pod(config, num_devices, num_hosts)
        return
    mesh = config.mesh
    trainer = mesh.data * mesh.fsdp * mesh.model
    each = config.search.num_devices
    shape = f"{mesh.data} x {mesh.fsdp} x {mesh.model}"
    need(
        trainer <= num_devices,
        "mesh",
        shape,
        f"the trainer's mesh wants {trainer} devices, and this process sees {num_devices}",
        "Make mesh.data, mesh.fsdp or mesh.model smaller.",
    )
    wanted, left = config.num_searchers * each, num_devices - trainer
    if config.placement == "split":
        need(
            left > 0,
            "mesh",
            shape,
            f"placement=split needs a device for searchers, and this process sees {num_devices}",
            ("Make it smaller, or set" if num_devices > 1 else "Set")
            + " --config.placement=shared.",
        )
        need(
            wanted <= left,
            "num_searchers",
            config.num_searchers,
            f"placement=split leaves {left} devices for searchers of {each} each",
            f"Set --config.num_searchers={left // each} or --config.placement=shared."
            if left >= each
            else f"Set --config.search.num_devices={left} or --config.placement=shared.",
        )
    elif config.placement == "shared" or wanted > left:
        need(
            trainer % each == 0,
            "search.num_devices",
            each,
            f"searchers that share the trainer's {trainer} devices must divide them",
            f"Set --config.search.num_devices={math.gcd(trainer, each)}, or --config.placement="
            "split where there are devices for both.",
        )
