# SPDX-License-Identifier: Apache-2.0
"""Validation of a config: ranges of settings, and rules within and between sections."""

from collections.abc import Callable, Iterator
from functools import partial

from tba_jax.config.schema import SETTINGS, Config, get_field
from tba_jax.replay.config import PROMPT_OVERHEAD_BYTES, RESPONSE_OVERHEAD_BYTES
from tba_jax.rewards.functions import VICTIM, check_reward
from tba_jax.settings import check_all, need
from tba_jax.tasks.registry import task_class

Rule = tuple[bool, str, str, str]
"""Whether the config keeps a rule, the field that breaks it, the rule, and the remedy."""


def validate(config: Config) -> None:
    """Check ranges and choices of all settings; if they are right, check combinations.

    Raises:
        ConfigError: every violation, with field, value, rule and remedy.
    """
    check_all(*(partial(x.check, get_field(config, name)) for name, x in SETTINGS.items()))
    sections = (section.check for section in config.sections().values())
    rules = (_groups, _buffer, _rows, _driver, _fleet, _start_data, _reward, _objective)
    check_all(*sections, *(partial(_check, config, x) for x in (*rules, _environment, _engine)))


def _check(config: Config, rules: Callable[[Config], Iterator[Rule]]) -> None:
    for is_kept, field, rule, remedy in rules(config):
        need(is_kept, field, get_field(config, field), rule, remedy)


def _groups(config: Config) -> Iterator[Rule]:
    """Refuse search and replay settings that give too few responses for a group."""
    k = config.objective.group_size
    yield (
        config.search.samples_per_prompt >= k,
        "search.samples_per_prompt",
        f"a group needs objective.group_size={k} responses from each searcher",
        f"Set --config.search.samples_per_prompt={k} or lower objective.group_size.",
    )
    yield (
        config.replay.capacity_per_prompt >= k,
        "replay.capacity_per_prompt",
        f"must hold at least one group of objective.group_size={k} responses",
        f"Set --config.replay.capacity_per_prompt={k} or more.",
    )


def _buffer(config: Config) -> Iterator[Rule]:
    """Refuse a buffer too small for a batch with one response per prompt."""
    batch = config.batch.num_prompts
    least = min(batch, task_class(config.task.name).sizes.get("train", batch))
    # A token of a response has an ID and a log-prob, a token of a prompt an ID and about 4 letters.
    payload = 8 * (config.search.max_new_tokens + config.task.max_prompt_tokens)
    wanted = least * (PROMPT_OVERHEAD_BYTES + RESPONSE_OVERHEAD_BYTES + payload)
    yield (
        config.replay.max_bytes >= least * RESPONSE_OVERHEAD_BYTES,
        "replay.max_bytes",
        f"too small for a batch of {batch} prompts",
        f"One response of maximum length to each prompt takes about {wanted} bytes. "
        f"Set --config.replay.max_bytes={wanted} or more.",
    )


def _driver(config: Config) -> Iterator[Rule]:
    """Refuse settings that the driver does not support, or that deadlock the trainer."""
    lag, bound = config.search.exact_lag, config.replay.max_staleness
    yield (
        lag == 0 or config.driver == "sync",
        "search.exact_lag",
        "with driver=async the staleness of data varies",
        "Set --config.driver=sync, or bound it with --config.replay.max_staleness.",
    )
    least = (lag + 1) * config.sync_period - 1
    yield (
        bound == 0 or bound >= least,
        "replay.max_staleness",
        f"with sync_period={config.sync_period} and search.exact_lag={lag} responses are up to "
        f"{least} steps stale at their last fresh use",
        f"Set --config.replay.max_staleness={least} or more, or 0 for no limit.",
    )
    for name in ("search.initial_fill", "task.start_path"):
        yield (
            lag == 0 or not get_field(config, name),
            name,
            "an exact lag merges a fixed number of tickets at every publication",
            f"Set --config.{name}={SETTINGS[name].default!r} or --config.search.exact_lag=0.",
        )


def _fleet(config: Config) -> Iterator[Rule]:
    """Refuse settings that a fleet does not support."""
    if config.placement != "fleet":
        return
    num = config.num_searchers
    yield (
        config.driver == "async",
        "driver",
        "the searchers of a fleet are other processes, which the synchronous driver cannot call",
        "Set --config.driver=async.",
    )
    yield (
        config.fleet.max_searchers % max(1, num) == 0,
        "fleet.max_searchers",
        f"must be a multiple of num_searchers={num}, the searchers per process",
        f"Set --config.fleet.max_searchers={num} or a multiple.",
    )


def _start_data(config: Config) -> Iterator[Rule]:
    """Refuse settings that the given responses of `task.start_path` do not support."""
    if not config.task.start_path:
        return
    yield (
        config.objective.built.needs.sampler == "any",
        "task.start_path",
        "no policy of the run sampled the start data, which needs an objective that accepts any "
        "sampler",
        "Set --config.objective.name=tb and --config.objective.importance=none, or leave "
        "--config.task.start_path empty.",
    )
    yield (
        not (config.search.stop_strings or config.search.stop_ids),
        "task.start_path",
        "responses of the start data end with the model's end-of-sequence token, but "
        "search.stop_strings and search.stop_ids end the policy's responses elsewhere",
        "Leave search.stop_strings and search.stop_ids empty.",
    )


def _reward(config: Config) -> Iterator[Rule]:
    """Refuse a config without a reward, or with a wrong number of weights."""
    reward = config.task.reward
    check_reward(config, task_class(config.task.name).reward, config.task.name)
    is_learned = reward == VICTIM
    num = len(reward.split(",")) if reward and not is_learned else 0
    rule = f"task.reward names {f'{num} functions' if num else 'no function'}, and each"
    if reward and config.reward.model_path:
        num += 1 + is_learned
        rule = f"task.reward and reward.model_path are {num} rewards, and each"
    yield (
        len(config.task.reward_weights) in (0, num),
        "task.reward_weights",
        f"{rule} needs a weight",
        "Give one number per reward, for example --config.task.reward_weights=1.0,0.5; the last "
        "number belongs to reward.model_path.",
    )


def _rows(config: Config) -> Iterator[Rule]:
    """Refuse row layouts that micro-batches or devices cannot divide."""
    mesh, packed, k = config.mesh, config.batch.packed_length, config.objective.group_size
    parts = mesh.data * mesh.fsdp * mesh.expert
    product = f"mesh.data x mesh.fsdp x mesh.expert = {parts}"
    rows = config.batch.num_prompts * k
    longest = config.task.max_prompt_tokens + config.search.max_new_tokens
    yield (
        parts <= rows,
        "batch.num_prompts",
        f"a batch has at most {rows} rows, and {product} devices divide them",
        f"Set --config.batch.num_prompts={-(-parts // k)} or more.",
    )
    yield (
        config.batch.micro_batch_rows % parts == 0,
        "batch.micro_batch_rows",
        f"cannot be divided by {product}",
        f"Set --config.batch.micro_batch_rows={parts} or a multiple.",
    )
    yield (
        not packed or packed >= longest,
        "batch.packed_length",
        f"a row must hold a prompt and its response, up to {longest} tokens "
        "(task.max_prompt_tokens + search.max_new_tokens)",
        f"Set --config.batch.packed_length={longest} or more.",
    )
    yield (
        not (packed and config.search.min_new_tokens),
        "batch.packed_length",
        "packed rows do not support search.min_new_tokens",
        "Set --config.batch.packed_length=0.",
    )


def _objective(config: Config) -> Iterator[Rule]:
    """Refuse a truncated sampler with ratios, and settings that state values do not support."""
    yield (
        config.search.top_p == 1 or config.objective.built.needs.sampler != "ratio",
        "search.top_p",
        f"objective.name={config.objective.name} reads ratios to the sampler, which are biased if "
        "the sampler leaves tokens out: the policy's log-probs are over all tokens",
        "Set --config.search.top_p=1, or for objective.name=tb --config.objective.importance=none.",
    )
    if not config.objective.built.value("vine_tokens"):
        return
    yield (
        config.placement not in ("hosts", "fleet"),
        "placement",
        "state values need searchers in the trainer's process",
        "Set --config.placement=auto.",
    )
    yield (
        not config.search.stop_strings,
        "search.stop_strings",
        "a continuation starts within a response and would not match a text that began before",
        "Set --config.search.stop_strings=().",
    )
    yield (
        not config.task.environment,
        "objective.name",
        "task.environment does not support the state values that VinePPO estimates",
        "Set --config.objective.name=tb.",
    )


def _environment(config: Config) -> Iterator[Rule]:
    """Refuse settings that do not work with episodes of several turns."""
    if not config.task.environment:
        rule = "no task.environment is set, and only environments use a renderer"
        yield not config.task.renderer, "task.renderer", rule, "Leave it empty."
        return
    for name, reason in (
        ("search.min_new_tokens", "each turn may end at once"),
        ("task.start_path", "given responses have no environment"),
        ("eval.gold", "observations would count"),
    ):
        yield _default(config, name, f"with task.environment it cannot be set: {reason}")


def _engine(config: Config) -> Iterator[Rule]:
    """Refuse settings that make an inference server's log-probs differ from the policy's."""
    if not config.search.server:
        return
    is_alone = config.num_searchers == 1 and config.placement not in ("hosts", "fleet")
    yield (
        config.lora.rank > 0 or is_alone,
        "search.engine",
        "a server has one set of weights, which a single searcher of this process loads",
        "Set --config.num_searchers=1 --config.placement=shared, or --config.lora.rank=16.",
    )
    for name in ("sampling_temperature", "top_p", "min_new_tokens", "explore", "quantization"):
        yield _default(config, f"search.{name}", "with a server it has no effect on log-probs")


def _default(config: Config, field: str, rule: str) -> Rule:
    """Return the rule that a field must keep its default value."""
    default = SETTINGS[field].default
    return get_field(config, field) == default, field, rule, f"Set --config.{field}={default!r}."
