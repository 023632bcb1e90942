# SPDX-License-Identifier: Apache-2.0
"""Parts of a process that searches, with or without a trainer: devices, model, rewards, searchers.

`Shared` has what trainers and searchers use; `make_searchers` builds searchers without a
trainer. This module reads the weights of reward models and of the base of adapters, and no others.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.config.resolved import asked, writes_versions
from tba_jax.config.schema import Config
from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.shardings import weight_shardings
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.placement import MESH_AXES, Division, MeshShape, PlacementError, divide
from tba_jax.devices.sharding import hand_over, placed_shapes
from tba_jax.devices.site import Site, Sites, device_lock_for
from tba_jax.environments.episodes import EnvironmentPool
from tba_jax.evaluation.metrics import make_measures
from tba_jax.flow.state import PartState
from tba_jax.models import lora
from tba_jax.models.shardings import on_mesh
from tba_jax.rewards.kinds import make_rewards
from tba_jax.rewards.scores import RewardSource
from tba_jax.run import model_parts, task_parts
from tba_jax.run.object_store import storage_of
from tba_jax.run.workdir import code_version, run_id_of
from tba_jax.search.sampler import SEARCHER_ROLE, Sampler
from tba_jax.search.searcher import SearchParts
from tba_jax.search.start_data import GivenScorer
from tba_jax.serving.vllm import InferenceServer
from tba_jax.train.state import trained_shapes
from tba_jax.weights.folder import StoredWeights, WeightFolder
from tba_jax.weights.memory import OnDevices
from tba_jax.weights.publication import Published


class RunClock:
    """Running time of a run in seconds, summed over all processes that resumed it."""

    def __init__(self, start: float | None = None) -> None:
        self._start = time.perf_counter() if start is None else start

    def __call__(self) -> float:
        return time.perf_counter() - self._start

    def state(self) -> PartState:
        return PartState({}, self())

    def restore(self, state: PartState) -> None:
        self._start -= state.meta


class Rewards(NamedTuple):
    """Processes and models that grade responses; all None in a process without searchers."""

    source: RewardSource | None = None  # for training and evaluation; else environments reward
    gold: RewardSource | None = None  # judge of the win rate (eval.gold)
    environments: EnvironmentPool | None = None  # answer the policy's turns
    server: InferenceServer | None = None  # samples responses; else searchers decode

    def check(self) -> None:
        """Raise RuntimeError if a source, environment or server cannot be used."""
        for each in filter(None, self):
            each.check()

    def close(self) -> None:
        for each in filter(None, self):
            each.close()


class Shared:
    """Parts that trainer and searchers of a process share, on the devices of the run.

    Args:
        cluster: the processes that make this object together.
        sites: sites of a searcher process of a fleet; None: the sites of the config's placement.

    Attributes:
        model: the start model.
        policy: its architecture, with adapters.

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
        self.sites, self.rewards = sites, Rewards()
        self.task = task = config.task.open()
        # Read the data before the model, which may take minutes: unreadable data ends the run.
        sets = f" of {', '.join(task.data_sets)}" if task.data_sets else ""
        sizes = f"{task.size('train'):,} prompts{sets}, {task.size('eval'):,} held out"
        note(f"{task.name}: {sizes}; model {config.model.path or 'embedded:start_model'}")
        self.model = model_parts.describe_model(config)
        self.policy = model_parts.policy_config(config, self.model.config)
        self.tokenizer = self.model.load_tokenizer()
        if sites.searchers:
            logs = self.workdir / "logs"
            self.rewards = Rewards(
                *make_rewards(config, task, self.tokenizer, sites.searchers[0], logs),
                task_parts.make_environments(config, self.tokenizer, logs),
                task_parts.make_server(config, self.model, self.tokenizer, self.workdir),
            )

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


def make_stored_weights(shared: Shared) -> StoredWeights:
    """Make the weights of a process that only searches, which it reads from storage."""
    config, policy, sites = shared.config, shared.policy, shared.sites
    mesh, base = sites.publication.mesh, None
    if policy.adapters is not None:
        base = shared.model.load_on(mesh, jnp.dtype(config.model.param_dtype))
    shardings, merges = make_arrival(shared, base)
    shapes = trained_shapes(policy, jnp.dtype(config.model.param_dtype))
    program = model_parts.make_publication_program(config, shared.model.config, mesh)
    return StoredWeights(
        storage_of(shared.workdir),
        placed_shapes(jax.eval_shape(program, shapes), shardings[0]),
        shardings,
        merges,
    )


def make_searchers(shared: Shared, weights: OnDevices | WeightFolder) -> tuple[SearchParts, ...]:
    """Build the parts of each searcher of this process."""
    config, sites, rewards = shared.config, shared.sites.searchers, shared.rewards
    model, tokenizer = shared.model.config, shared.tokenizer
    if not sites:
        return ()
    assert isinstance(weights, OnDevices), "a process that writes versions has no searchers"
    # A response of a server with adapters keeps the version that it began with.
    keeps_version = config.search.server and config.lora.rank and not config.task.environment
    swaps_in_flight = bool(keeps_version) or config.objective.built.needs.sampler != "policy"
    state_tokens = config.objective.built.value("vine_tokens", 0)
    key = fold_in(jax.random.key(config.seed), SEARCHER_ROLE)
    environments = rewards.environments
    task_parts.check_environments(config, shared.task, environments)

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
    measures = make_measures(model, tokenizer, sites, rewards.gold, reference, scoring, padding)
    sources = {site: rewards.source and rewards.source.on(site) for site in given}
    parts = []
    for i, site in enumerate(sites):
        decoder = decoders[site.program_site]
        engine, latest = rewards.server or decoder, functools.partial(weights.latest, i)
        if rewards.server is not None:
            # The server receives what is trained. Adapters are merged for evaluations only.
            latest = functools.partial(weights.adapters, i)
        grader = task_parts.make_grader(config, shared.task, tokenizer, sources[site])
        parts.append(
            SearchParts(
                index=shared.sites.first_searcher + i,
                weights=latest,
                evaluated=evaluated_weights(
                    weights.at, i, functools.partial(shared.start_params, site)
                ),
                sampler=Sampler(engine, config.search, key, environments, state_tokens),
                grader=grader,
                evaluator=task_parts.make_shard_evaluator(
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
    weights = make_stored_weights(shared)
    return shared, make_searchers(shared, weights), weights
