# SPDX-License-Identifier: Apache-2.0
"""Parts of a process that searches, with or without a trainer: devices, model, rewards, searchers.

`Shared` has what trainers and searchers use; `make_searchers` builds searchers without a
trainer. This module reads the weights of reward models and of the base of adapters, and no others.
Invariant: a reward, judge or environment that cannot be used is refused before the first decode
step (tests/run/test_rewarding.py).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.config.resolved import asked, writes_versions
from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.sampling import fold_in
from tba_jax.decoding.shardings import weight_shardings
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.placement import MESH_AXES, Division, MeshShape, PlacementError, divide
from tba_jax.devices.sharding import hand_over, placed_shapes
from tba_jax.devices.site import Site, Sites, device_lock_for
from tba_jax.environments.episodes import DEFAULT_WORKERS, EnvironmentPool
from tba_jax.evaluation.attacks import make_attack_metrics
from tba_jax.evaluation.evaluator import Evaluator, Measure, MetricFunction, ShardEvaluator
from tba_jax.evaluation.metrics import make_measures, reference_distance, win_rate
from tba_jax.flow.state import PartState
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.shardings import on_mesh
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.functions import make_rewards, workers_by_cores
from tba_jax.rewards.scores import Grader, RewardSource
from tba_jax.run import model_parts
from tba_jax.run.workdir import code_version, run_id_of, storage_of
from tba_jax.search.prompts import PromptReader
from tba_jax.search.sampler import SEARCHER_ROLE, Sampler, sampling_settings
from tba_jax.search.searcher import SearchParts
from tba_jax.search.start_data import GivenScorer
from tba_jax.serving.chat import Served, make_chat_format
from tba_jax.serving.vllm import InferenceServer
from tba_jax.tasks.task import Task
from tba_jax.train.state import trained_shapes
from tba_jax.weights.folder import StoredWeights, WeightFolder
from tba_jax.weights.memory import OnDevices
from tba_jax.weights.publication import Published


class RunClock:
    """Running time of a run in seconds, summed over all processes that resumed it."""

    def __init__(self, start: float) -> None:
        self._start = start

    def __call__(self) -> float:
        return time.perf_counter() - self._start

    def state(self) -> PartState:
        return PartState({}, self())

    def restore(self, state: PartState) -> None:
        self._start -= state.meta


class Shared:
    """Parts that trainer and searchers of a process share, on the devices of the run.

    Args:
        cluster: the processes that make this object together.
        sites: sites of a searcher process of a fleet; None: the sites of the config's placement.

    Attributes:
        model: the start model.
        policy: architecture of the start model, with adapters.
        rewards: of training and evaluation; None: environments give them, or no searchers here.
        gold: judge of the win rate (eval.gold), or None.
        environments: answer the policy's turns, or None.
        server: samples responses; None: searchers decode.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError: the model folder, the data or a reward function is not usable.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        cluster: Cluster,
        *,
        note: Callable[[str], None] = lambda line: None,
        sites: Sites | None = None,
    ) -> None:
        self.config, self.cluster, self.workdir = config, cluster, workdir.absolute()
        if sites is None:
            # In a job of one process these are the local devices.
            found = divide(config.placement, jax.devices(), asked(config), cluster.number)
            sites = open_sites(config, found)
        self.sites = sites
        self.task = task = config.task.open()
        # Read the data before the model, which may take minutes: unreadable data ends the run.
        sets = f" of {', '.join(task.data_sets)}" if task.data_sets else ""
        sizes = f"{task.size('train'):,} prompts{sets}, {task.size('eval'):,} held out"
        note(f"{task.name}: {sizes}; model {config.model.path or 'embedded:start_model'}")
        self.model = model_parts.describe_model(config)
        self.policy = model_parts.policy_config(config, self.model.config)
        self.tokenizer = self.model.load_tokenizer()
        self.rewards = self.gold = self.environments = self.server = None
        if sites.searchers:
            tokenizer, logs = self.tokenizer, self.workdir / "logs"
            rewards = make_rewards(config, task, tokenizer, sites.searchers[0], logs)
            self.rewards, self.gold = rewards
            self.environments = make_environments(config, tokenizer, logs)
            self.server = make_server(config, self.model, tokenizer, self.workdir)

    def check(self) -> None:
        """Raise ValueError or RuntimeError if rewards, environments or server cannot be used."""
        for each in filter(None, (self.rewards, self.gold, self.environments, self.server)):
            each.check()

    def close(self) -> None:
        """End the processes of rewards and environments."""
        for each in filter(None, (self.rewards, self.gold, self.environments, self.server)):
            each.close()

    @property
    def identity(self) -> str:
        """Version and digest of the code, and ID of the run, equal in all processes of a run.

        Versions of Python and JAX and the kind of device may differ, because every response has
        the log-probs of its sampler.
        """
        return f"{code_version()}/{run_id_of(self.workdir)}"

    def start_params(self, site: Site) -> Any:
        """Load the start model's weights for a searcher, on devices of this process alone."""
        source = self.sites.reading(self.model.config.hidden_size)
        load = source.locked(model_parts.start_weights)
        return load(self.config, self.model, source.mesh, site.mesh)


def open_sites(config: Config, placement: Division) -> Sites:
    """Return the sites of a division, with device locks for the asynchronous driver."""
    trainer, publication = placement.trainer_mesh, placement.publication_mesh
    searching = placement.searcher_meshes
    launchers = [trainer, *searching]
    if writes_versions(config):
        if searching:  # this process does not train; the first searcher reads the weights
            trainer = Mesh(searching[0].devices.reshape(1, 1, -1), MESH_AXES)
            launchers = [trainer, trainer, *searching]
        publication = trainer
    lock = None
    if config.driver == "async":
        # Half of the watchdog's limit, so that this clearer error comes first.
        lock = device_lock_for(launchers, config.log.watchdog_s / 2)
    return Sites(
        Site(trainer, lock),
        Site(publication, lock),
        tuple(Site(mesh, lock) for mesh in searching),
        placement.first_searcher,
        placement.num_searchers,
    )


def fleet_sites(config: Config, first_searcher: int) -> Sites:
    """Divide the devices of a process of a fleet among its searchers, or raise PlacementError."""
    each, devices = config.search.num_devices, jax.local_devices()
    groups = [tuple(devices[i : i + each]) for i in range(0, len(devices) - each + 1, each)]
    if not groups:
        raise PlacementError(
            f"a searcher wants {each} devices (search.num_devices), and a process of searchers "
            f"sees {len(devices)}; lower it, or give more with fleet.searcher"
        )
    own = tuple(groups[i % len(groups)] for i in range(config.num_searchers))
    total = asked(config).num_searchers
    found = Division("fleet", MeshShape(), own[0][:1], own, first_searcher, total)
    return open_sites(config, found)


def make_arrival(shared: Shared, base: Any) -> tuple[list[Any], list[Callable[[Any], Any]]]:
    """Return where published weights go: `shardings` and `merges` of `OnDevices`.

    `base` has the frozen parameters under adapters, on the publication mesh.
    """
    config, policy, sites = shared.config, shared.policy, shared.sites
    plain, quantization = dataclasses.replace(policy, adapters=None), config.search.quantization
    wanted = [
        on_mesh(site.mesh, weight_shardings(plain, site.mesh, quantization))
        for site in sites.searchers
    ]
    if policy.adapters is None:
        return wanted, []

    # One base for each set of devices, in the decoder's layout and in full precision: adapters are
    # added before rounding.
    def in_layout(kind: Any) -> Any:
        return model_parts.make_layout_program(config, plain, sites.publication.mesh, kind)(base)

    exact = in_layout("none")
    held = exact if quantization == "none" else in_layout(quantization)
    base_parts = lora.parts(exact, held, policy)
    merges: dict[Site, Callable[[Any], Any]] = {}
    for site, shardings in zip(sites.searchers, wanted, strict=True):
        if site not in merges:
            whole = on_mesh(site.mesh, weight_shardings(plain, site.mesh))
            where = lora.parts(whole, shardings, policy)
            kernels, rest = map(hand_over, base_parts, where)
            merges[site] = site.locked(lora.make_merge(kernels, rest, policy, quantization))
    adapters = [model_parts.adapter_shardings(policy, site.mesh) for site in sites.searchers]
    return adapters, [merges[site] for site in sites.searchers]


def make_searchers(shared: Shared, weights: OnDevices | WeightFolder) -> tuple[SearchParts, ...]:
    """Build the parts of each searcher of this process."""
    config, sites, environments = shared.config, shared.sites.searchers, shared.environments
    model, tokenizer = shared.model.config, shared.tokenizer
    if not sites:
        return ()
    assert isinstance(weights, OnDevices), "a process that writes versions has no searchers"
    # A response of a server with adapters keeps the version that it began with.
    keeps_version = config.search.server and config.lora.rank and not config.task.environment
    swaps_in_flight = bool(keeps_version) or config.objective.built.needs.sampler != "policy"
    state_tokens = config.objective.built.value("vine_tokens", 0)
    key = fold_in(jax.random.key(config.seed), SEARCHER_ROLE)
    check_environments(config, shared.task, environments)
    # A server receives what is trained. Adapters are merged for evaluations only.
    latest = weights.latest if shared.server is None else weights.adapters
    # Searchers on the same devices share a decoder, and so do all searchers on single devices.
    decoders = {
        site: model_parts.make_decoder(config, model, tokenizer, site)
        for site in dict.fromkeys(site.program_site for site in sites)
    }
    scoring = model_parts.make_scoring(config, tokenizer)
    padding = model_parts.make_padding(config, tokenizer)
    given: dict[Site, GivenScorer | None] = dict.fromkeys(sites)
    for site in given if config.task.start_path else ():
        given[site] = GivenScorer(model, scoring, padding, config.search.samples_per_prompt, site)
    reference = shared.start_params if config.eval.gold else None
    measures = make_measures(model, tokenizer, sites, shared.gold, reference, scoring, padding)
    rewards = {site: shared.rewards and shared.rewards.on(site) for site in given}
    parts = []
    for i, site in enumerate(sites):
        decoder = decoders[site.program_site]
        engine, start = shared.server or decoder, functools.partial(shared.start_params, site)
        grader = make_grader(config, shared.task, tokenizer, rewards[site])
        parts.append(
            SearchParts(
                index=shared.sites.first_searcher + i,
                weights=functools.partial(latest, i),
                evaluated=evaluated_weights(weights.at, i, start),
                sampler=Sampler(engine, config.search, key, environments, state_tokens),
                grader=grader,
                evaluator=make_shard_evaluator(
                    config, decoder, grader, measures[site], environments
                ),
                given=given[site],
                swaps_in_flight=swaps_in_flight,
                waits_for_all=config.driver == "sync" and environments is not None,
            )
        )
    return tuple(parts)


def evaluated_weights(
    at: Callable[[int, int], Published | None], i: int, start: Callable[[], Any]
) -> Callable[[int], Published | None]:
    """Return a function: version -> its weights for searcher i, or None.

    A resumed run may evaluate version 0, the start model, which is then read once by `start`.
    """
    start = functools.cache(start)

    def evaluated(version: int) -> Published | None:
        found = at(version, i)
        if found is None and version == 0:
            return Published(0, start())
        start.cache_clear()
        return found

    return evaluated


def open_searchers(
    config: Config, workdir: Path, searchers: Sequence[int], cluster: Cluster | None = None
) -> tuple[Shared, tuple[SearchParts, ...], StoredWeights]:
    """Build consecutive searchers on the devices of this process, which does not train.

    `cluster` is this process alone, in a job whose other processes train; None: in a fleet. Errors
    are those of `Shared`.
    """
    sites = fleet_sites(config, searchers[0]) if cluster is None else None
    shared = Shared(config, workdir, cluster or Cluster(), sites=sites)
    policy, mesh, base = shared.policy, shared.sites.publication.mesh, None
    if policy.adapters is not None:
        base = shared.model.load_on(mesh, jnp.dtype(config.model.param_dtype))
    shardings, merges = make_arrival(shared, base)
    program = model_parts.make_publication_program(config, shared.model.config, mesh)
    shapes = jax.eval_shape(program, trained_shapes(policy, jnp.dtype(config.model.param_dtype)))
    files = placed_shapes(shapes, shardings[0])
    weights = StoredWeights(storage_of(shared.workdir), files, shardings, merges)
    return shared, make_searchers(shared, weights), weights


def make_grader(
    config: Config, task: Task, tokenizer: Tokenizer, rewards: RewardSource | None
) -> Grader:
    """Make the grader of a task, with these rewards.

    Rewards that the user names are added to those of an environment, as in TRL; a task's own reward
    is not.
    """
    adds = bool(config.task.reward or config.reward.model_path)
    first_kind = task.response_kinds[0] if task.response_kinds else ""
    decode, kind_of = tokenizer.batch_decode, task.response_kind
    return Grader(rewards, decode, kind_of, first_kind, task.data_sets, adds)


def make_environments(
    config: Config, tokenizer: Tokenizer, logs: Path | None = None
) -> EnvironmentPool | None:
    """Return the processes of the configured environment; None without one."""
    if not config.task.environment:
        return None
    search, task = config.search, config.task
    chat = make_chat_format(tokenizer, task.renderer, task.chat_options)
    ids = model_parts.end_ids(config, tokenizer)
    limit, sampling = 1 + search.max_new_tokens, sampling_settings(search)
    return EnvironmentPool(
        task.environment,
        Served("policy", tokenizer, chat, ids, limit, sampling),
        max_turns=search.max_turns,
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers or max(DEFAULT_WORKERS, workers_by_cores()),
        logs=logs,
    )


def check_environments(config: Config, task: Task, environments: EnvironmentPool | None) -> None:
    """Refuse an environment that cannot be used with this task; None is accepted.

    Raises:
        ValueError: the environment, or the chat format with it, cannot be used.
    """
    if environments is None:
        return
    environments.check()
    named = f"task.environment = {environments.name!r}"
    has_other = config.task.reward or task.reward or config.reward.model_path
    if not (environments.has_reward or has_other):
        raise ValueError(
            f"{named} has no get_reward(), and no other reward is set. Add the method, or set "
            "--config.task.reward=my_rewards.py:score"
        )
    is_chat = not environments.is_agent and isinstance(task.problem("eval", 0)[0], list)
    if environments.schemas and not (is_chat and config.task.renderer):
        raise ValueError(
            f"{named} has tools, which need chat prompts and the tool format of the model. Set "
            "--config.task.chat=True, and --config.task.renderer=qwen3 or another format of the "
            "library renderers"
        )
    served = environments.served
    if missing := tuple(sorted(set(served.chat.stop_ids) - set(served.eos_ids))):
        raise ValueError(
            f"task.renderer = {config.task.renderer!r}: a message also ends with the tokens "
            f"{list(missing)}. Set --config.search.stop_ids={missing}"
        )
    if environments.first_token_only and config.objective.built.needs.head == "log_z":
        raise ValueError(
            "objective.log_z = learned reads the prompt, which is one token for agents, tools and "
            "openenv:URL: log Z would be equal for all prompts. Set "
            "--config.objective.log_z=vargrad"
        )


def make_server(
    config: Config, model: models.Description, tokenizer: Tokenizer, workdir: Path
) -> InferenceServer | None:
    """Return the server that `search.engine` names, which reads weights in `workdir`, or None."""
    if not (address := config.search.server):
        return None
    return InferenceServer(
        address,
        model,
        model_parts.policy_config(config, model.config),
        config.model.compute_dtype,
        workdir.absolute() / "adapters",
        longest=config.task.max_prompt_tokens + config.search.max_new_tokens,
        eos_ids=model_parts.end_ids(config, tokenizer),
        stop_strings=model_parts.stop_strings(config, tokenizer),
        timeout_s=config.log.watchdog_s / 4,
    )


def make_shard_evaluator(
    config: Config,
    decoder: Decoder,
    grader: Grader,
    measures: tuple[Measure, ...],
    environments: EnvironmentPool | None,
) -> ShardEvaluator:
    """Make the evaluator of shards on one set of devices."""
    search, n = config.search, config.eval.num_samples
    sampling = SamplingSettings(
        search.max_new_tokens, config.eval.temperature, min_new_tokens=search.min_new_tokens
    )
    num_slots = min(max(1, search.slots // n) * n, search.slots)
    return ShardEvaluator(decoder, grader, sampling, n, num_slots, measures, environments)


def make_evaluator(config: Config, reader: PromptReader) -> Evaluator:
    """Make the evaluator of a config; a shard has as many prompts as fill a searcher's slots."""
    task = reader.task
    prompts, num_skipped = reader.held_out(config.task.num_eval_prompts)
    metrics: list[MetricFunction] = []
    metrics += [make_attack_metrics(config.eval)] if task.metric == "success_rate" else []
    metrics += [win_rate, reference_distance] if config.eval.gold else []
    shard_size = min(len(prompts), max(1, config.search.slots // config.eval.num_samples))
    return Evaluator(prompts, num_skipped, shard_size, task.metric, tuple(metrics))
