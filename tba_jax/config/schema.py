# SPDX-License-Identifier: Apache-2.0
"""The configuration schema: every field, its default and its meaning.

Presets (`tba_jax/presets`) hold only differences from `default_config()`. Sections are named after
the part that consumes them and become its keyword arguments at the wiring in `main`; no part below
`main` sees the whole config. This module imports nothing heavy, so a mistake is reported before
any device is touched.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from tba_jax.config import rules as config_rules
from tba_jax.config.rules import ConfigError as ConfigError
from tba_jax.config.rules import need as _need

# A locked ConfigDict. Its attributes' static type is a union of everything a field may hold, which
# no type checker can work with; `validate` is what checks them.
Config: TypeAlias = Any

DRIVERS = ("async", "sync")
CHAT_TASKS = ("custom", "gsm8k", "math", "tldr")  # and reasoning_gym:DATASET
TASKS = ("arithmetic", "custom", "gsm8k", "math", "redteam", "tldr", "tldr_toy")
CLASSIFIERS = ("encoder", "guard", "pattern")
LONG_PROMPTS = ("refuse", "skip")
OBJECTIVES = ("tb", "rloo", "online_dpo")
LOG_Z = ("vargrad", "learned")
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
REMATS = ("none", "dots", "layers")
OPTIMIZERS = ("adamw", "adafactor")


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
    config.task.name = "arithmetic"  # one of TASKS, or reasoning_gym:DATASET
    # Data: a folder with train.jsonl and test.jsonl (or .parquet) or hf://NAME[:CONFIGURATION]; for
    # task custom also one .jsonl or .parquet file, and then no test split is needed.
    config.task.data_path = ""  # empty: the task's own source
    # Given responses that are scored and put into the replay buffer before the first step: rows
    # {"response"} or, where there are several prompts, {"prompt_id", "response"}.
    config.task.start_path = ""  # .jsonl or .parquet; empty: none
    config.task.chat = False  # prompts as a user's message in the model's chat template
    # Reward: package.module:function or path/to/file.py:function, or several with commas between.
    config.task.reward = ""  # several: their weighted sum; empty: the task's own
    config.task.reward_weights = ()  # one per function of task.reward; empty: 1 for each
    config.task.max_prompt_tokens = 32  # what happens to longer prompts: task.long_prompts
    config.task.long_prompts = "refuse"  # refuse: stop and name the row; skip: count and go on
    # Where task custom has no test split, so many rows are split off the training rows.
    config.task.num_eval_prompts = 512  # held-out prompts per evaluation, 0: the whole split

    config.model = ConfigDict()
    config.model.path = ""  # HF folder, hub id or embedded:NAME; empty: embedded:start_model
    config.model.param_dtype = "float32"  # storage of policy and reference parameters
    config.model.compute_dtype = "float32"  # matmul inputs of the trainer; loss is float32
    config.model.remat = "layers"  # computed again in the backward pass: none, dots, layers
    config.model.rollout_dtype = "float32"  # what searchers get and compute in

    config.lora = ConfigDict()  # adapters are trained and published, the parameters stay
    config.lora.rank = 0  # of each adapter; 0: all parameters are trained
    config.lora.alpha = 16.0  # an adapter's product counts alpha / rank times
    config.lora.modules = ("q", "k", "v", "o")  # matrices of a layer that have one

    config.batch = ConfigDict()
    config.batch.num_prompts = 16  # p: prompts per optimiser step
    config.batch.num_length_buckets = 3  # padded lengths that training and decode compile for
    config.batch.micro_batch_rows = 0  # rows per micro-batch, gradients are summed; 0: all
    config.batch.packed_length = 0  # tokens of rows that hold several responses; 0: one each
    # Over all devices; a block is of the vocabulary.
    config.batch.logprob_chunk_tokens = 8192  # tokens for which a block of logits exists at a time

    config.objective = ConfigDict()
    config.objective.name = "tb"  # tb: VarGrad Trajectory Balance; baselines: rloo, online_dpo
    config.objective.group_size = 16  # K: responses per prompt in a training group
    config.objective.beta = 0.05  # KL coefficient at step 0; the target is pi_ref exp(r / beta)
    config.objective.beta_schedule = "constant"  # one of BETA_SCHEDULES
    config.objective.beta_final = 0.05  # beta after the schedule
    config.objective.beta_steps = 0  # steps over which beta moves linearly to beta_final
    config.objective.beta_jump_step = 0  # linear_then_jump: step of the jump to beta_final
    config.objective.scale = "advantage"  # advantage: beta/2 of the variance; paper: squares
    config.objective.log_z = "vargrad"  # vargrad: of the group; learned: a head on the prompt
    config.objective.log_z_rate = 1.0  # learned log Z: its learning rate over the policy's
    config.objective.reference_temperature = 1.0  # gamma: divides log pi_ref in the target
    config.objective.reference_temperature_final = 1.0  # gamma after reference_temperature_steps
    config.objective.reference_temperature_steps = 0  # steps over which gamma moves; 0: constant
    config.objective.reward_temperature = 1.0  # divides the log of the whole target
    config.objective.reward_temperature_final = 1.0  # its value after reward_temperature_steps
    config.objective.reward_temperature_steps = 0  # steps over which it moves; 0: constant
    config.objective.mask_eos = False  # leave EOS out of log pi, as the official GSM8K code does

    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # adamw; adafactor: little state, no use for b1, b2 and eps
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
    config.optimizer.max_nonfinite_steps = 3  # skipped steps in a row that end the run

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
    config.search.min_new_tokens = 0  # no end before as many tokens, in sampling and in log-probs
    config.search.explore_share = 0.0  # share of responses drawn at a temperature of their own
    config.search.explore_min_temperature = 1.0  # of those: uniform from here
    config.search.explore_max_temperature = 1.0  # to here; log-probs keep sampling_temperature
    config.search.ownership = "by_prompt"  # by_prompt: searcher s owns prompts = s mod n; any
    config.search.outbox_bytes = 64 * 2**20  # a searcher waits when its outbox holds this much
    config.search.initial_fill = 0  # responses drawn before the first step
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
    config.replay.similarity = 0.0  # below this distance the better response is kept; 0: off
    config.replay.max_age = 0  # responses older than this many steps are dropped; 0: never
    config.replay.max_reuse = 0  # times a response may be drawn; 0: without bound
    config.replay.max_staleness = 0  # fresh slots wait for data at most this stale; 0: off

    config.pod = ConfigDict()
    config.pod.heartbeat_s = 20  # a process that is silent for this long is dead, and all end

    config.sync = ConfigDict()
    config.sync.transport = "memory"  # memory, or checkpoint: through Orbax in the workdir
    config.sync.keep = 2  # checkpoint transport: published versions kept on disk

    config.reward = ConfigDict()
    config.reward.model_path = ""  # reward model (one label): HF folder, hub id; empty: none
    config.reward.dtype = "float32"  # of its weights and activations
    config.reward.batch_size = 64  # responses that a reward model scores at a time
    config.reward.missing_eos = math.inf  # its score for a cut response; inf: the response's own
    config.reward.offset = 0.0  # subtracted from a reward model's scores, not from missing_eos
    config.reward.num_workers = 1  # reward processes
    config.reward.timeout_s = 10.0  # per item; a hung worker is killed
    config.reward.max_failure_rate = 0.5  # above this share of a round the run stops

    config.victim = ConfigDict()  # task redteam: the model under attack
    config.victim.path = ""  # HF folder or hub id; empty: the embedded start model
    config.victim.template = "{attack}"  # its prompt; chat: its own chat template
    config.victim.num_samples = 5  # responses per attack
    config.victim.temperature = 0.7  # of their sampling
    config.victim.top_p = 0.92  # of their sampling
    config.victim.max_new_tokens = 30  # length limit of a response
    config.victim.max_prompt_tokens = 64  # longer attacks get no reward
    config.victim.num_slots = 128  # unfinished responses at a time
    config.victim.dtype = "float32"  # of its weights and activations

    config.classifier = ConfigDict()  # task redteam: which responses are wanted
    config.classifier.kind = "pattern"  # encoder: RoBERTa; guard: language model; pattern: regex
    config.classifier.path = ""  # HF folder or hub id of an encoder or guard
    config.classifier.target = ""  # encoder: label; guard: verdict; pattern: regular expression
    config.classifier.max_tokens = 128  # of what it reads
    config.classifier.batch_rows = 64  # responses per call
    config.classifier.dtype = "float32"  # of its weights and activations

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
    config.eval.gold_model = ""  # reward model that judges the win rate; empty: gold_reward
    config.eval.gold_dtype = "float32"  # of its weights and activations
    config.eval.gold_reward = ""  # package.module:function that judges it; empty: gold_model
    config.eval.reference_metrics = False  # also perplexity under, and KL to, the start model
    config.eval.embedding_path = ""  # redteam: HF folder or hub id of a sentence embedding model
    config.eval.num_report_samples = 8  # responses kept side by side in the report

    config.log = ConfigDict()
    config.log.period = 1  # steps between lines in metrics.jsonl
    config.log.tensorboard = False  # also write TensorBoard files (extra `tensorboard`)
    config.log.wandb_project = ""  # also log to this W&B project (extra `wandb`)
    config.log.watchdog_s = 1800.0  # async: nothing ended for this long: dump stacks, stop
    config.lock()
    return config


def _one_of(config: Config, field: str, allowed: Sequence[str]) -> None:
    value = get_field(config, field)
    _need(
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
        ("task.long_prompts", LONG_PROMPTS),
        ("objective.name", OBJECTIVES),
        ("objective.scale", LOSS_SCALES),
        ("objective.log_z", LOG_Z),
        ("objective.beta_schedule", BETA_SCHEDULES),
        ("optimizer.name", OPTIMIZERS),
        ("optimizer.schedule", LR_SCHEDULES),
        ("replay.pace", PACES),
        ("replay.evict", EVICTIONS),
        ("search.ownership", OWNERSHIPS),
        ("search.cache_dtype", ("", *DTYPES)),
        ("search.swap", SWAPS),
        ("sync.transport", TRANSPORTS),
        ("classifier.kind", CLASSIFIERS),
        ("classifier.dtype", DTYPES),
        ("victim.dtype", DTYPES),
        ("reference.placement", REFERENCE_PLACEMENTS),
        ("model.remat", REMATS),
        ("model.param_dtype", DTYPES),
        ("model.compute_dtype", DTYPES),
        ("model.rollout_dtype", DTYPES),
        ("reward.dtype", DTYPES),
        ("eval.gold_dtype", DTYPES),
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
        ("lora.rank", 0),
        ("batch.num_prompts", 1),
        ("batch.num_length_buckets", 1),
        ("batch.micro_batch_rows", 0),
        ("batch.packed_length", 0),
        ("batch.logprob_chunk_tokens", 1),
        ("objective.group_size", 2),
        ("objective.beta_steps", 0),
        ("objective.beta_jump_step", 0),
        ("objective.reference_temperature_steps", 0),
        ("objective.reward_temperature_steps", 0),
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
        ("victim.num_samples", 1),
        ("victim.max_new_tokens", 1),
        ("victim.max_prompt_tokens", 1),
        ("victim.num_slots", 1),
        ("classifier.max_tokens", 8),
        ("classifier.batch_rows", 1),
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
        _need(value >= least, field, value, f"must be at least {least}", "Raise it.")
    for field in (
        "lora.alpha",
        "objective.beta",
        "objective.beta_final",
        "optimizer.learning_rate",
        "optimizer.eps",
        "objective.log_z_rate",
        "objective.reference_temperature",
        "objective.reference_temperature_final",
        "objective.reward_temperature",
        "objective.reward_temperature_final",
        "search.sampling_temperature",
        "search.explore_min_temperature",
        "replay.priority_temperature",
        "victim.temperature",
        "victim.top_p",
        "reward.timeout_s",
        "log.watchdog_s",
    ):
        value = get_field(config, field)
        _need(value > 0, field, value, "must be positive", "Give a value above 0.")
    for field in (
        "replay.recency_prob",
        "replay.uniform_mix",
        "replay.similarity",
        "search.explore_share",
        "victim.top_p",
        "reward.max_failure_rate",
        "optimizer.b1",
        "optimizer.b2",
    ):
        value = get_field(config, field)
        _need(0 <= value <= 1, field, value, "must lie in [0, 1]", "Give a share, not a percent.")
    if not config.task.name.partition("reasoning_gym:")[2]:
        _one_of(config, "task.name", (*TASKS, "reasoning_gym:DATASET"))
        _need(
            not config.task.chat or config.task.name in CHAT_TASKS,
            "task.chat",
            config.task.chat,
            f"task {config.task.name} has no chat form: its model reads problems as they are",
            f"Leave it False, or choose one of {', '.join(CHAT_TASKS)}, reasoning_gym:DATASET.",
        )
    config_rules.combinations(config)
