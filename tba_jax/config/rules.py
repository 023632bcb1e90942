# SPDX-License-Identifier: Apache-2.0
"""Validation: every setting as declared, every section by itself, and rules across sections.

It reads a config and touches no device and no file of the run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from tba_jax.config.method_rules import check_method
from tba_jax.config.resolved import ownership_of, transport_of, writes_versions
from tba_jax.config.schema import SETTINGS, Config, get_field, replace
from tba_jax.devices.placement import MODES
from tba_jax.replay.config import RESPONSE_OVERHEAD_BYTES
from tba_jax.rewards.kinds import KINDS, kind_of
from tba_jax.settings import ConfigError, Setting, check_all, need
from tba_jax.tasks.registry import entry_of
from tba_jax.train.objectives.registry import free_of_behavior


def validate(config: Config) -> None:
    """Check ranges, choices and combinations.

    Raises:
        ConfigError: field, value, rule and remedy of every violation.
    """
    broken: dict[str, Any] = {}

    def check(name: str, setting: Setting) -> None:
        try:
            setting.check(get_field(config, name))
        except ConfigError:
            broken[name] = setting.default
            raise

    def apply(rule: Callable[[Config], None], sound: Config) -> None:
        try:
            rule(sound)
        except ConfigError as error:
            # A setting out of its range is reported once.
            lines = [line for line in error.args if not any(name in line for name in broken)]
            if lines:
                raise ConfigError(*lines) from error

    def check_rules() -> None:
        sound = replace(config, broken) if broken else config
        check_all(*(partial(apply, rule, sound) for rule in _RULES))

    check_all(*(partial(check, *item) for item in SETTINGS.items()), check_rules)


def _sections(config: Config) -> None:
    """Every section by itself."""
    check_all(*(section.check for section in config.sections().values()))


def _compilation_cache(config: Config) -> None:
    """A place for compiled programs."""
    need(
        bool(config.compilation_cache),
        "compilation_cache",
        config.compilation_cache,
        "must be auto, off or a folder",
        "Set --config.compilation_cache=auto for the default behaviour.",
    )


def _transport(config: Config) -> None:
    """The way of weights to other hosts."""
    need(
        MODES[config.placement].trainers_search or transport_of(config) == "checkpoint",
        "sync.transport",
        config.sync.transport,
        f"with placement={config.placement} weights go to other hosts as files of the work "
        "directory",
        "Set --config.sync.transport=auto.",
    )


def _groups(config: Config) -> None:
    """Responses enough for a group."""
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


def _buffer(config: Config) -> None:
    """Room for a batch, at the least: one response of each of its prompts."""
    batch = config.batch.num_prompts
    least = 1 if entry_of(config.task.name).has_one_prompt else batch
    need(
        config.replay.max_bytes >= least * RESPONSE_OVERHEAD_BYTES,
        "replay.max_bytes",
        config.replay.max_bytes,
        f"a batch of {batch} prompts cannot be held in as little",
        f"Bookkeeping alone takes {least * RESPONSE_OVERHEAD_BYTES}; give it room for the "
        "responses that should be kept, at 300 bytes and four for each token.",
    )


def _cache(config: Config) -> None:
    """Caches of searchers in eight bits."""
    need(
        config.search.cache_dtype != "int8" or config.model.attention != "tpu_kernel",
        "search.cache_dtype",
        config.search.cache_dtype,
        "the decode kernel of model.attention=tpu_kernel knows no cache in eight bits",
        "Set --config.search.cache_dtype=bfloat16 or --config.model.attention=auto.",
    )


def _driver(config: Config) -> None:
    """What the two drivers can do, and how long the trainer may have to wait."""
    mode = MODES[config.placement]
    need(
        not config.search.exact_lag
        or config.driver == "sync"
        or not (mode.spans_hosts or mode.searches_elsewhere),
        "search.exact_lag",
        config.search.exact_lag,
        "beside a trainer it is kept for searchers of the trainer's own process, and "
        f"placement={config.placement} has others",
        "Set --config.placement=auto or --config.driver=sync.",
    )
    if config.search.swap == "in_flight":
        need(
            not config.objective.built.needs_behavior,
            "search.swap",
            config.search.swap,
            "only an objective that needs no behaviour policy permits a response of several "
            "versions",
            "Set --config.search.swap=auto, or objective.name to one of "
            f"{', '.join(free_of_behavior())}.",
        )
    if config.replay.max_staleness:
        need(
            config.replay.max_staleness >= config.sync_period - 1,
            "replay.max_staleness",
            config.replay.max_staleness,
            f"data merged at a sync is up to sync_period - 1 = {config.sync_period - 1} steps "
            "stale at its last fresh use, so it would be late however fast the searchers are",
            "Lower sync_period or raise it.",
        )
    if config.replay.late == "wait":
        _strict_bound(config)
    if config.search.exact_lag:
        need(
            config.search.swap != "in_flight",
            "search.swap",
            config.search.swap,
            "with search.exact_lag a response is of one version",
            "Set --config.search.swap=auto.",
        )
        need(
            config.search.initial_fill == 0,
            "search.initial_fill",
            config.search.initial_fill,
            "an exact lag merges as many rounds at every publication, and has no room for more",
            "Set --config.search.initial_fill=0 or --config.search.exact_lag=0.",
        )
    need(
        config.driver == "sync" or config.replay.pace == "trainer" or not config.replay.max_reuse,
        "replay.max_reuse",
        config.replay.max_reuse,
        "when every response is used up the trainer must wait for new ones",
        "Set --config.replay.pace=trainer.",
    )


def _strict_bound(config: Config) -> None:
    """A bound on staleness that the trainer waits for."""
    need(
        not writes_versions(config),
        "replay.late",
        config.replay.late,
        "trainer processes that write weights together leave out a publication while the one "
        "before is written, so newer weights may not be on their way",
        "Set --config.replay.late=train, or use one trainer process.",
    )
    need(
        not config.search.exact_lag,
        "replay.late",
        config.replay.late,
        f"search.exact_lag = {config.search.exact_lag} keeps all data equally old",
        "Set --config.replay.late=train.",
    )
    steps = config.replay.max_staleness + 1
    groups = int(max(1, config.replay.recency_prob * steps) * config.batch.num_prompts)
    most = groups * config.search.samples_per_prompt
    need(
        config.search.initial_fill <= most,
        "search.initial_fill",
        config.search.initial_fill,
        f"a part of them would be late: the first {steps} steps take {most} fresh responses",
        "Lower it, or raise replay.max_staleness.",
    )


def _pod(config: Config) -> None:
    """Runs of several hosts."""
    if not (MODES[config.placement].spans_hosts and MODES[config.placement].trainers_search):
        return
    need(
        transport_of(config) == "memory",
        "sync.transport",
        config.sync.transport,
        "in a pod every host takes its weights from the trainer's mesh",
        "Set --config.sync.transport=auto.",
    )


def _fleet(config: Config) -> None:
    """Searchers on machines of their own."""
    if not MODES[config.placement].searches_elsewhere:
        return
    need(
        config.driver == "async",
        "driver",
        config.driver,
        "the searchers of a fleet are other processes, which wait for nobody",
        "Set --config.driver=async.",
    )
    need(
        transport_of(config) != "memory",
        "sync.transport",
        config.sync.transport,
        "the searchers of a fleet are other processes, which read weights from the work directory",
        "Set --config.sync.transport=auto.",
    )
    need(
        ownership_of(config) == "any",
        "search.ownership",
        config.search.ownership,
        "prompts of a slot that no machine fills would never be drawn",
        "Set --config.search.ownership=auto.",
    )
    need(
        config.fleet.max_searchers % config.num_searchers == 0,
        "fleet.max_searchers",
        config.fleet.max_searchers,
        f"a process has num_searchers = {config.num_searchers} searchers",
        "Give a multiple of it.",
    )


def _start_data(config: Config) -> None:
    """Responses that the replay buffer is given before the first step."""
    if not config.task.start_path:
        return
    need(
        not config.objective.built.needs_behavior,
        "task.start_path",
        config.task.start_path,
        "only an objective that needs no behaviour policy can train on responses that no policy "
        "of the run drew",
        f"Set --config.objective.name to one of {', '.join(free_of_behavior())}, or leave "
        "--config.task.start_path empty.",
    )
    need(
        config.search.exact_lag == 0,
        "task.start_path",
        config.task.start_path,
        "an exact lag merges as many rounds at every publication, and has no room for more",
        "Set --config.search.exact_lag=0.",
    )
    need(
        not (config.search.stop_strings or config.search.stop_ids),
        "task.start_path",
        config.task.start_path,
        "given responses end with the model's end-of-sequence token, and search.stop_strings and "
        "search.stop_ids let the policy's end elsewhere",
        "Leave these empty.",
    )


def _task(config: Config) -> None:
    """What the task needs."""
    name, entry = config.task.name, entry_of(config.task.name)
    need(
        not entry.has_one_prompt or ownership_of(config) == "any",
        "search.ownership",
        config.search.ownership,
        f"task {name} has a single prompt, which every searcher must draw",
        "Set --config.search.ownership=auto.",
    )


def _reward(config: Config) -> None:
    """Something rewards."""
    name, entry = config.task.name, entry_of(config.task.name)
    kind_of(config, config.task.reward, entry.task.reward, name).check(config)


def _reward_weights(config: Config) -> None:
    """As many weights as rewards that are summed."""
    reward, weights = config.task.reward, config.task.reward_weights
    has_model = bool(reward and config.reward.model_path)
    is_learned = reward in KINDS
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
        "Give one number for each, for example --config.task.reward_weights=1.0,0.5; a reward "
        "model's is the last.",
    )


def _rows(config: Config) -> None:
    """How the rows of a batch are made and cut."""
    wanted, packed = config.batch.micro_batch_rows, config.batch.packed_length
    parts = config.mesh.data * config.mesh.fsdp
    updates = config.objective.built.minibatches
    prompts = config.batch.num_prompts
    rows = prompts * config.objective.group_size
    need(
        parts <= rows,
        "batch.num_prompts",
        prompts,
        f"a batch has at most {rows} rows, and mesh.data x mesh.fsdp = {parts} devices divide them",
        f"Set --config.batch.num_prompts={-(-parts // config.objective.group_size)} or more.",
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
    need(
        not wanted or wanted % (parts * updates) == 0,
        "batch.micro_batch_rows",
        wanted,
        f"cannot be divided by mesh.data x mesh.fsdp x objective.minibatches = {parts * updates}: "
        "every micro-batch has a part for each update",
        f"Set --config.batch.micro_batch_rows={parts * updates} or a multiple.",
    )
    need(
        updates * parts <= rows,
        "objective.minibatches",
        updates,
        f"a batch has at most {rows} rows on {parts} devices",
        f"Set --config.objective.minibatches={max(1, rows // parts)} or less.",
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


def _rounding(config: Config) -> None:
    """Something must be stored in few bits to be rounded."""
    what = "adapters are float32" if config.lora.rank else "model.param_dtype is float32"
    need(
        config.optimizer.rounding == "nearest"
        or (config.model.param_dtype == "bfloat16" and not config.lora.rank),
        "optimizer.rounding",
        config.optimizer.rounding,
        f"only what is trained in bfloat16 is rounded, and {what}",
        "Set --config.optimizer.rounding=nearest.",
    )


def _average(config: Config) -> None:
    """What a reference can be an average of."""
    need(
        not config.reference.ema_decay or not config.lora.rank,
        "reference.ema_decay",
        config.reference.ema_decay,
        "adapters are factors, and the product of their averages is no average",
        "Set --config.reference.reset_period or --config.lora.rank=0.",
    )
    need(
        not config.reference.ema_decay or config.model.param_dtype == "float32",
        "reference.ema_decay",
        config.reference.ema_decay,
        "in bfloat16 a step of an average is lost",
        "Set --config.model.param_dtype=float32.",
    )


def _packed_rows(config: Config) -> None:
    """What rows of several responses cannot do."""
    need(
        not (config.batch.packed_length and config.search.min_new_tokens),
        "batch.packed_length",
        config.batch.packed_length,
        "rows of several responses know no least length",
        "Set --config.batch.packed_length=0.",
    )


def _environment(config: Config) -> None:
    """What episodes of several turns go with."""
    if not config.task.environment:
        return
    for name, value, reason in (
        ("search.vine_tokens", config.search.vine_tokens, "no values of states are estimated"),
        ("search.min_new_tokens", config.search.min_new_tokens, "each turn may end at once"),
        ("task.start_path", config.task.start_path, "given responses have no environment"),
        ("eval.reference_metrics", config.eval.reference_metrics, "observations would count"),
    ):
        rule = f"with task.environment it cannot be set: {reason}"
        default = SETTINGS[name].default
        need(value == default, name, value, rule, f"Set --config.{name}={default!r}.")


_RULES: tuple[Callable[[Config], None], ...] = (
    _sections,
    _compilation_cache,
    _groups,
    _buffer,
    _rows,
    _packed_rows,
    _rounding,
    _average,
    _cache,
    _driver,
    _pod,
    _fleet,
    _transport,
    _start_data,
    check_method,
    _task,
    _reward_weights,
    _reward,
    _environment,
)
