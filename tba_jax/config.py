# SPDX-License-Identifier: Apache-2.0
"""The configuration schema: every field, its default and its meaning, and `validate`.

Presets in `configs/` hold only differences from `default_config()`. Sections are named after the
part that consumes them and become its keyword arguments at the wiring in `main`; no part below
`main` sees the whole config. This module imports nothing heavy, so a mistake is reported before
any device is touched.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ml_collections import ConfigDict

# A locked ConfigDict. Its attributes' static type is a union of everything a field may hold, which
# no type checker can work with; `validate` is what checks them.
Config: TypeAlias = Any

DRIVERS = ("async", "sync")
TASKS = ("arithmetic", "gsm8k", "math")
LONG_PROMPTS = ("refuse", "skip")
OBJECTIVES = ("tb", "rloo")
LOSS_SCALES = ("advantage", "paper")
BETA_SCHEDULES = ("constant", "linear", "linear_then_jump")
LR_SCHEDULES = ("constant", "linear", "cosine", "wsd")
PACES = ("off", "trainer")
EVICTIONS = ("oldest", "lowest_reward")
OWNERSHIPS = ("by_prompt", "any")
PLACEMENTS = ("auto", "shared", "split", "pod")
SWAPS = ("round", "in_flight")
TRANSPORTS = ("memory", "checkpoint")
REFERENCE_PLACEMENTS = ("searcher", "trainer")
DTYPES = ("float32", "bfloat16")


class ConfigError(ValueError):
    """A configuration that cannot run; the message says field, value, rule and remedy."""


def default_config() -> Config:
    """Every field with its default, one line each; locked, so unknown keys are refused."""
    config: Config = ConfigDict()
    config.name = "default"  # names the run directory: FILE/PRESET, set by the preset
    config.seed = 0  # root of every random number of the run
    config.driver = "async"  # async: searcher threads beside the trainer; sync: one thread
    config.num_steps = 100  # optimiser steps of the run
    config.sync_period = 1  # k: trainer steps between weight publications and buffer merges
    config.num_searchers = 1  # searchers (threads of the asynchronous driver); pod: of all hosts
    config.placement = "auto"  # shared devices; split: apart; auto: split if it fits; pod: hosts
    config.num_cpu_devices = 1  # devices that the CPU backend divides the machine into

    config.mesh = ConfigDict()  # the trainer's devices: data x fsdp x model of them
    config.mesh.data = 1  # whole copies of the train state, rows divided; pod: 1 is 1 per host
    config.mesh.fsdp = 1  # train state and rows divided; weights gathered layer by layer
    config.mesh.model = 1  # train state and every matrix product divided (tensor parallel)

    config.task = ConfigDict()
    config.task.name = "arithmetic"  # one of TASKS
    config.task.data_path = ""  # folder with train.jsonl and test.jsonl; empty: the task's source
    config.task.reward = ""  # package.module:function; empty: the task's own reward
    config.task.max_prompt_tokens = 32  # what happens to longer prompts: task.long_prompts
    config.task.long_prompts = "refuse"  # refuse: stop and name the row; skip: count and go on
    config.task.num_eval_prompts = 512  # held-out prompts per evaluation, 0: the whole split

    config.model = ConfigDict()
    config.model.path = ""  # HF folder or hub id; empty: the embedded start model
    config.model.param_dtype = "float32"  # storage of policy and reference parameters
    config.model.compute_dtype = "float32"  # matmul inputs of the trainer; loss is float32
    config.model.remat = True  # recompute layers in the backward pass: less memory (CPU: faster)
    config.model.rollout_dtype = "float32"  # what searchers get and compute in

    config.batch = ConfigDict()
    config.batch.num_prompts = 16  # p: prompts per optimiser step
    config.batch.num_length_buckets = 3  # padded lengths that training and decode compile for
    config.batch.logprob_chunk_tokens = 1024  # tokens whose float32 logits exist at a time

    config.objective = ConfigDict()
    config.objective.name = "tb"  # tb: VarGrad Trajectory Balance; rloo: on-policy baseline
    config.objective.group_size = 16  # K: responses per prompt in a training group
    config.objective.beta = 0.05  # KL coefficient at step 0; the target is pi_ref exp(r / beta)
    config.objective.beta_schedule = "constant"  # one of BETA_SCHEDULES
    config.objective.beta_final = 0.05  # beta after the schedule
    config.objective.beta_steps = 0  # steps over which beta moves linearly to beta_final
    config.objective.beta_jump_step = 0  # linear_then_jump: step of the jump to beta_final
    config.objective.scale = "advantage"  # advantage: beta/2 of the variance; paper: squares
    config.objective.mask_eos = False  # leave EOS out of log pi, as the official GSM8K code does

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 1e-4  # peak
    config.optimizer.schedule = "constant"  # one of LR_SCHEDULES
    config.optimizer.warmup_steps = 0  # linear from 0
    config.optimizer.stable_steps = 0  # wsd: steps at the peak after warm-up
    config.optimizer.decay_steps = 0  # wsd, linear, cosine: decay horizon; 0: to the last step
    config.optimizer.b1 = 0.9  # AdamW: decay of the gradient's mean
    config.optimizer.b2 = 0.999  # AdamW: decay of the squared gradient's mean
    config.optimizer.eps = 1e-8  # AdamW: added to the root of the squared gradient's mean
    config.optimizer.weight_decay = 0.0  # on matrices, not on norms and biases
    config.optimizer.clip_norm = 1.0  # global gradient norm; 0: no clipping

    config.reference = ConfigDict()
    config.reference.placement = "searcher"  # where log pi_ref is scored; trainer: at use
    config.reference.reset_period = 0  # steps between reference := policy; 0: never

    config.search = ConfigDict()
    config.search.samples_per_prompt = 16  # S >= K: responses drawn per prompt
    config.search.prompts_per_round = 16  # prompts a searcher takes per round
    config.search.max_new_tokens = 48  # response limit in tokens
    config.search.num_devices = 1  # devices of each searcher, which divide its weights and cache
    config.search.num_slots = 0  # unfinished responses at a time; 0: all of a round
    config.search.cache_dtype = ""  # of cached keys and values; empty: model.rollout_dtype
    config.search.swap = "round"  # newer weights: round: at its start; in_flight: between chunks
    config.search.sampling_temperature = 1.0  # also divides policy and reference logits
    config.search.top_p = 1.0  # draw from the likeliest tokens of this total probability; 1: all
    config.search.min_new_tokens = 0  # a response cannot end before it has as many tokens
    config.search.ownership = "by_prompt"  # by_prompt: searcher s owns prompts = s mod n; any
    config.search.outbox_bytes = 64 * 2**20  # a searcher waits when its outbox holds this much
    config.search.initial_fill = 0  # responses generated before the first step
    config.search.exact_lag = 0  # sync driver: train on data this many publications old

    config.replay = ConfigDict()
    config.replay.recency_prob = 0.95  # m: probability that a slot draws from the newest data
    config.replay.fresh_window = 1  # merges that count as newest
    config.replay.pace = "off"  # off: a short fresh slot becomes replay; trainer: it waits
    config.replay.priority_temperature = math.inf  # replay responses ~ softmax(reward / this)
    config.replay.uniform_mix = 0.0  # share of the uniform distribution in that softmax
    config.replay.capacity_per_prompt = 100  # responses kept per prompt
    config.replay.max_bytes = 2**30  # of the whole buffer
    config.replay.evict = "oldest"  # oldest or lowest_reward
    config.replay.max_age = 0  # responses older than this many steps are dropped; 0: never
    config.replay.max_reuse = 0  # times a response may be drawn; 0: without bound
    config.replay.max_staleness = 0  # fresh slots wait for data at most this stale; 0: off

    config.pod = ConfigDict()
    config.pod.heartbeat_s = 20  # a process that is silent for this long is dead, and all end

    config.sync = ConfigDict()
    config.sync.transport = "memory"  # memory, or checkpoint: through Orbax in the workdir
    config.sync.keep = 2  # checkpoint transport: published versions kept on disk

    config.reward = ConfigDict()
    config.reward.num_workers = 1  # reward processes
    config.reward.timeout_s = 10.0  # per item; a hung worker is killed
    config.reward.max_failure_rate = 0.5  # above this share of a round the run stops

    config.checkpoint = ConfigDict()
    config.checkpoint.period = 50  # steps between checkpoints; 0: only at the end and on a stop
    config.checkpoint.keep = 2  # checkpoints kept
    config.checkpoint.timeout_s = 600  # storage (or another host) that takes longer has failed

    config.eval = ConfigDict()
    config.eval.period = 50  # steps between evaluations; 0: before and after only
    config.eval.max_new_tokens = 48  # response limit in tokens
    config.eval.num_slots = 128  # unfinished responses at a time
    config.eval.num_samples = 1  # responses per prompt; above 1 pass@k is reported too
    config.eval.temperature = 0.0  # of sampling, top-p 1; 0: greedy
    config.eval.num_report_samples = 8  # responses kept side by side in the report

    config.log = ConfigDict()
    config.log.period = 1  # steps between lines in metrics.jsonl
    config.log.tensorboard = False  # also write TensorBoard files (extra `tensorboard`)
    config.log.wandb_project = ""  # also log to this W&B project (extra `wandb`)
    config.log.watchdog_s = 1800.0  # async: nothing ended for this long: dump stacks, stop
    config.lock()
    return config


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


def get_field(config: Mapping[str, Any], field: str) -> Any:
    """Value of a dotted field name."""
    value: Any = config
    for part in field.split("."):
        value = value[part]
    return value


def flatten(config: Config) -> dict[str, Any]:
    """Dotted field name -> value, sorted; infinities as the string "inf" (JSON has none)."""
    out: dict[str, Any] = {}

    def visit(prefix: str, node: Config) -> None:
        for key in sorted(node):
            value = node[key]
            if isinstance(value, ConfigDict):
                visit(f"{prefix}{key}.", value)
            else:
                out[prefix + key] = "inf" if value == math.inf else value

    visit("", config)
    return out


# Fields a resumed run may change: they decide what is logged, kept and risked, not what is computed
# (num_steps is not among them, because learning-rate schedules depend on it).
RESUME_MAY_CHANGE = frozenset(
    {
        "log.period",
        "log.tensorboard",
        "log.wandb_project",
        "log.watchdog_s",
        "checkpoint.period",
        "checkpoint.keep",
        "checkpoint.timeout_s",
        "pod.heartbeat_s",
        "reward.num_workers",
        "reward.timeout_s",
        "reward.max_failure_rate",
        "eval.num_report_samples",
    }
)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines "field: old -> new" for the fields that a resumed run may not change.

    Args:
        old: flat fields of the run on disk.
        new: flat fields of this command.
    """
    lines = []
    for field in sorted(set(old) | set(new)):
        if field in RESUME_MAY_CHANGE:
            continue
        before, after = old.get(field, "(absent)"), new.get(field, "(absent)")
        if before != after:
            lines.append(f"{field}: {before!r} -> {after!r}")
    return lines


def validate(config: Config) -> None:
    """Check ranges, choices and combinations; touches no device and writes nothing.

    Raises:
        ConfigError: field, value, rule, remedy of the first violation.
    """
    for field, allowed in (
        ("driver", DRIVERS),
        ("placement", PLACEMENTS),
        ("task.name", TASKS),
        ("task.long_prompts", LONG_PROMPTS),
        ("objective.name", OBJECTIVES),
        ("objective.scale", LOSS_SCALES),
        ("objective.beta_schedule", BETA_SCHEDULES),
        ("optimizer.schedule", LR_SCHEDULES),
        ("replay.pace", PACES),
        ("replay.evict", EVICTIONS),
        ("search.ownership", OWNERSHIPS),
        ("search.cache_dtype", ("", *DTYPES)),
        ("search.swap", SWAPS),
        ("sync.transport", TRANSPORTS),
        ("reference.placement", REFERENCE_PLACEMENTS),
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
        ("batch.logprob_chunk_tokens", 1),
        ("objective.group_size", 2),
        ("objective.beta_steps", 0),
        ("objective.beta_jump_step", 0),
        ("optimizer.warmup_steps", 0),
        ("optimizer.stable_steps", 0),
        ("optimizer.decay_steps", 0),
        ("optimizer.weight_decay", 0.0),
        ("optimizer.clip_norm", 0.0),
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
    batch_parts = config.mesh.data * config.mesh.fsdp
    rows = config.batch.num_prompts
    need(
        rows % batch_parts == 0,
        "batch.num_prompts",
        rows,
        f"must divide by mesh.data x mesh.fsdp = {batch_parts}, which divide a batch by prompts",
        f"Set --config.batch.num_prompts={-(-rows // batch_parts) * batch_parts}.",
    )
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
    if config.task.data_path:
        need(
            os.path.isdir(config.task.data_path) or "://" in config.task.data_path,
            "task.data_path",
            config.task.data_path,
            "is not a folder",
            "Give a folder that holds train.jsonl and test.jsonl.",
        )
    reward = config.task.reward
    need(
        not reward or (reward.count(":") == 1 and all(reward.split(":"))),
        "task.reward",
        reward,
        "must read package.module:function",
        "For example --config.task.reward=my_rewards:length_reward.",
    )
