# SPDX-License-Identifier: Apache-2.0
"""Validation of a config: ranges of settings, and rules within and between sections."""

from collections.abc import Callable
from functools import partial

from tba_jax.config.schema import SETTINGS, Config, get_field
from tba_jax.replay.config import PROMPT_OVERHEAD_BYTES, RESPONSE_OVERHEAD_BYTES
from tba_jax.rewards.kinds import LEARNED, check_reward
from tba_jax.settings import check_all, need
from tba_jax.tasks.registry import task_class


def validate(config: Config) -> None:
    """Check ranges and choices of all settings; if they are right, check combinations.

    Raises:
        ConfigError: every violation, with field, value, rule and remedy.
    """
    check_all(*(partial(x.check, get_field(config, name)) for name, x in SETTINGS.items()))
    check_all(*(partial(rule, config) for rule in _RULES))


def _sections(config: Config) -> None:
    """Check every section by itself."""
    check_all(*(section.check for section in config.sections().values()))


def _groups(config: Config) -> None:
    """Refuse search and replay settings that give too few responses for a group."""
    k = config.objective.group_size
    need(
        config.search.samples_per_prompt >= k,
        "search.samples_per_prompt",
        config.search.samples_per_prompt,
        f"a group needs objective.group_size={k} responses from each searcher",
        f"Set --config.search.samples_per_prompt={k} or lower objective.group_size.",
    )
    need(
        config.replay.capacity_per_prompt >= k,
        "replay.capacity_per_prompt",
        config.replay.capacity_per_prompt,
        f"must hold at least one group of objective.group_size={k} responses",
        f"Set --config.replay.capacity_per_prompt={k} or more.",
    )


def _buffer(config: Config) -> None:
    """Refuse a buffer too small for a batch with one response per prompt."""
    batch = config.batch.num_prompts
    least = 1 if task_class(config.task.name).has_one_prompt else batch
    # A token of a response has an ID and a log-prob, a token of a prompt an ID and about 4 letters.
    payload = 8 * (config.search.max_new_tokens + config.task.max_prompt_tokens)
    wanted = least * (PROMPT_OVERHEAD_BYTES + RESPONSE_OVERHEAD_BYTES + payload)
    need(
        config.replay.max_bytes >= least * RESPONSE_OVERHEAD_BYTES,
        "replay.max_bytes",
        config.replay.max_bytes,
        f"too small for a batch of {batch} prompts",
        f"One response of maximum length to each prompt takes about {wanted} bytes. "
        f"Set --config.replay.max_bytes={wanted} or more.",
    )


def _driver(config: Config) -> None:
    """Refuse settings that the driver does not support, or that deadlock the trainer."""
    need(
        config.search.exact_lag == 0 or config.driver == "sync",
        "search.exact_lag",
        config.search.exact_lag,
        "with driver=async the staleness of data varies",
        "Set --config.driver=sync, or bound it with --config.replay.max_staleness.",
    )
    if config.replay.max_staleness:
        least = (config.search.exact_lag + 1) * config.sync_period - 1
        need(
            config.replay.max_staleness >= least,
            "replay.max_staleness",
            config.replay.max_staleness,
            f"with sync_period={config.sync_period} and search.exact_lag={config.search.exact_lag} "
            f"responses are up to {least} steps stale at their last fresh use",
            f"Set --config.replay.max_staleness={least} or more, or 0 for no limit.",
        )
    if config.search.exact_lag:
        need(
            config.search.initial_fill == 0,
            "search.initial_fill",
            config.search.initial_fill,
            "an exact lag merges a fixed number of tickets at every publication",
            "Set --config.search.initial_fill=0 or --config.search.exact_lag=0.",
        )


def _fleet(config: Config) -> None:
    """Refuse settings that a fleet does not support."""
    if config.placement != "fleet":
        return
    need(
        config.driver == "async",
        "driver",
        config.driver,
        "the searchers of a fleet are other processes, which the synchronous driver cannot call",
        "Set --config.driver=async.",
    )
    need(
        config.fleet.max_searchers % max(1, config.num_searchers) == 0,
        "fleet.max_searchers",
        config.fleet.max_searchers,
        f"must be a multiple of num_searchers={config.num_searchers}, the searchers per process",
        f"Set --config.fleet.max_searchers={config.num_searchers} or a multiple.",
    )


def _start_data(config: Config) -> None:
    """Refuse settings that the given responses of `task.start_path` do not support."""
    if not config.task.start_path:
        return
    need(
        config.objective.built.needs.sampler == "any",
        "task.start_path",
        config.task.start_path,
        "no policy of the run sampled the start data, which needs an objective that accepts any "
        "sampler",
        "Set --config.objective.name=tb and --config.objective.importance=none, or leave "
        "--config.task.start_path empty.",
    )
    need(
        config.search.exact_lag == 0,
        "task.start_path",
        config.task.start_path,
        "an exact lag merges a fixed number of tickets at every publication",
        "Set --config.search.exact_lag=0.",
    )
    need(
        not (config.search.stop_strings or config.search.stop_ids),
        "task.start_path",
        config.task.start_path,
        "responses of the start data end with the model's end-of-sequence token, but "
        "search.stop_strings and search.stop_ids end the policy's responses elsewhere",
        "Leave search.stop_strings and search.stop_ids empty.",
    )


def _reward(config: Config) -> None:
    """Refuse a config without a reward."""
    check_reward(config, task_class(config.task.name).reward, config.task.name)


def _reward_weights(config: Config) -> None:
    """Refuse a number of weights that differs from the number of rewards."""
    reward, weights = config.task.reward, config.task.reward_weights
    has_model = bool(reward and config.reward.model_path)
    is_learned = reward in LEARNED
    num = len(reward.split(",")) if reward and not is_learned else 0
    named = f"names {num} functions" if num else "names no function"
    rule = f"task.reward {named}, and each needs a weight"
    if has_model:
        num += 1 + is_learned
        rule = f"task.reward and reward.model_path are {num} rewards, and each needs a weight"
    need(
        len(weights) in (0, num),
        "task.reward_weights",
        weights,
        rule,
        "Give one number per reward, for example --config.task.reward_weights=1.0,0.5; the last "
        "number belongs to reward.model_path.",
    )


def _rows(config: Config) -> None:
    """Refuse row layouts that micro-batches or devices cannot divide."""
    wanted, packed = config.batch.micro_batch_rows, config.batch.packed_length
    parts = config.mesh.data * config.mesh.fsdp * config.mesh.expert
    prompts = config.batch.num_prompts
    rows = prompts * config.objective.group_size
    need(
        parts <= rows,
        "batch.num_prompts",
        prompts,
        f"a batch has at most {rows} rows, and mesh.data x mesh.fsdp x mesh.expert = {parts} "
        "devices divide them",
        f"Set --config.batch.num_prompts={-(-parts // config.objective.group_size)} or more.",
    )
    need(
        config.mesh.fsdp == 1 or config.model.remat != "none",
        "model.remat",
        config.model.remat,
        "keeps all intermediate values for the backward pass, including weights gathered for "
        "mesh.fsdp: the whole model on every device",
        "Set --config.model.remat=layers.",
    )
    need(
        wanted % parts == 0,
        "batch.micro_batch_rows",
        wanted,
        f"cannot be divided by mesh.data x mesh.fsdp x mesh.expert = {parts}",
        f"Set --config.batch.micro_batch_rows={parts} or a multiple.",
    )
    longest = config.task.max_prompt_tokens + config.search.max_new_tokens
    need(
        not packed or packed >= longest,
        "batch.packed_length",
        packed,
        f"a row must hold a prompt and its response, up to {longest} tokens "
        "(task.max_prompt_tokens + search.max_new_tokens)",
        f"Set --config.batch.packed_length={longest} or more.",
    )


def _truncated(config: Config) -> None:
    """Refuse ratios to a sampler of which only a truncated distribution is known."""
    need(
        config.search.top_p == 1 or config.objective.built.needs.sampler != "ratio",
        "search.top_p",
        config.search.top_p,
        f"objective.name={config.objective.name} reads ratios to the sampler, which are biased if "
        "the sampler leaves tokens out: the policy's log-probs are over all tokens",
        "Set --config.search.top_p=1, or for objective.name=tb --config.objective.importance=none.",
    )


def _packed_rows(config: Config) -> None:
    """Refuse settings that packed rows do not support."""
    need(
        not (config.batch.packed_length and config.search.min_new_tokens),
        "batch.packed_length",
        config.batch.packed_length,
        "packed rows do not support search.min_new_tokens",
        "Set --config.batch.packed_length=0.",
    )


def _state_values(config: Config) -> None:
    """Refuse settings that prevent estimating state values from sampled continuations."""
    if not config.objective.built.value("vine_tokens"):
        return
    stop_strings = config.search.stop_strings
    need(
        config.placement not in ("hosts", "fleet"),
        "placement",
        config.placement,
        "state values need searchers in the trainer's process",
        "Set --config.placement=auto.",
    )
    need(
        not stop_strings,
        "search.stop_strings",
        stop_strings,
        "a continuation starts within a response and would not match a text that began before",
        "Set --config.search.stop_strings=().",
    )


def _environment(config: Config) -> None:
    """Refuse settings that do not work with episodes of several turns."""
    if not config.task.environment:
        renderer = config.task.renderer
        rule = "no task.environment is set, and only environments use a renderer"
        need(not renderer, "task.renderer", renderer, rule, "Leave it empty.")
        return
    need(
        not config.objective.built.value("vine_tokens"),
        "objective.name",
        config.objective.name,
        "task.environment does not support the state values that VinePPO estimates",
        "Set --config.objective.name=tb.",
    )
    for name, value, reason in (
        ("search.min_new_tokens", config.search.min_new_tokens, "each turn may end at once"),
        ("task.start_path", config.task.start_path, "given responses have no environment"),
        ("eval.gold", config.eval.gold, "observations would count"),
    ):
        rule = f"with task.environment it cannot be set: {reason}"
        default = SETTINGS[name].default
        need(value == default, name, value, rule, f"Set --config.{name}={default!r}.")


def _engine(config: Config) -> None:
    """Refuse settings that make an inference server's log-probs differ from the policy's."""
    search = config.search
    if not search.server:
        return
    need(
        config.lora.rank > 0,
        "search.engine",
        search.engine,
        "the server receives the weights as adapters, and lora.rank is 0",
        "Set --config.lora.rank=16, for example.",
    )
    why = "with a server it has no effect on the log-probs that servers return"
    for name in ("sampling_temperature", "top_p", "min_new_tokens", "explore"):
        value, default = getattr(search, name), SETTINGS[f"search.{name}"].default
        remedy = f"Set --config.search.{name}={default!r}."
        need(value == default, f"search.{name}", value, why, remedy)


_RULES: tuple[Callable[[Config], None], ...] = (
    _sections,
    _groups,
    _buffer,
    _rows,
    _packed_rows,
    _truncated,
    _driver,
    _fleet,
    _start_data,
    _state_values,
    _reward_weights,
    _reward,
    _environment,
    _engine,
)
