# SPDX-License-Identifier: Apache-2.0
"""Parts of a process that searches, with or without a trainer: devices, model, rewards, searchers.

`open_shared` opens what trainers and searchers use; `make_searchers` builds searchers without a
trainer. This module reads only the weights of rewards, and of adapters' base.
"""

import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.config.command_line import versions
from tba_jax.config.devices import asked
from tba_jax.config.resolved import writes_versions
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.placement import MESH_AXES, Division, divide
from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import Site, Sites, device_lock_for
from tba_jax.environments.pool import EnvironmentPool
from tba_jax.flow.state import PartState
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.shardings import on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.rewards.source import RewardSource
from tba_jax.run.model_parts import (
    adapter_shardings,
    describe_model,
    make_decoder,
    make_padding,
    make_publication,
    make_scoring,
    policy_config,
    searcher_shardings,
    start_weights,
    swaps_in_flight,
)
from tba_jax.run.object_store import storage_of
from tba_jax.run.task_parts import (
    Judging,
    check_environments,
    make_environments,
    make_gold,
    make_grader,
    make_judging,
    make_rewards,
    make_server,
    make_shard_evaluator,
    make_task,
)
from tba_jax.run.workdir import run_id_of
from tba_jax.search.sampler import Sampler, StateValues
from tba_jax.search.searcher import SearchParts
from tba_jax.search.start_data import GivenScorer, make_start_program
from tba_jax.serving.vllm import InferenceServer
from tba_jax.tasks.mixture import Mixture
from tba_jax.tasks.task import Task
from tba_jax.weights.folder import StoredWeights, WeightFolder
from tba_jax.weights.memory import OnDevices
from tba_jax.weights.publication import Published, make_publish_program

# Parts that trainers and searchers share.


class RunClock:
    """Running time of a run in seconds, summed over all processes that resumed it.

    Attributes:
        time_to_first_step_s: running time at the end of the first step; None before that.
    """

    def __init__(self, now: Callable[[], float], start: float) -> None:
        self._now, self._start = now, start
        self.time_to_first_step_s: float | None = None

    def __call__(self) -> float:
        """Return the running time, without the time between an interruption and the resume."""
        return self._now() - self._start

    def set(self, elapsed_s: float) -> None:
        """Set the running time to that of another process of the run."""
        self._start = self._now() - elapsed_s

    def note_step(self) -> None:
        """Record the running time at the end of the first step."""
        if self.time_to_first_step_s is None:
            self.time_to_first_step_s = self()

    def state(self) -> PartState:
        """Return the running time, as the state of a part."""
        times = {"elapsed_s": self(), "time_to_first_step_s": self.time_to_first_step_s}
        return PartState({}, times)

    def restore(self, state: PartState) -> None:
        """Continue from the running time of earlier processes."""
        self._start -= state.meta["elapsed_s"]
        self.time_to_first_step_s = state.meta["time_to_first_step_s"]


def code_name() -> str:
    """Return the version of the package, and a digest of its source files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"tba_jax {versions()['tba_jax']} {digest.hexdigest()[:12]}"


class Rewards(NamedTuple):
    """Processes and models that grade responses; all None in a process without searchers.

    Attributes:
        source: rewards for training and evaluation; None: the environment gives them.
        gold: judge of the win rate; None without eval.gold.
        environments: processes that answer the policy's turns; None without task.environment.
        server: server that samples responses; None if searchers decode.
    """

    source: RewardSource | None = None
    gold: RewardSource | None = None
    environments: EnvironmentPool | None = None
    server: InferenceServer | None = None

    def check(self) -> None:
        """Raise RuntimeError if a source, environment or server cannot be used."""
        for source in filter(None, self):
            source.check()

    def close(self) -> None:
        """Stop the processes that compute rewards, and release the resources of the server."""
        for source in filter(None, self):
            source.close()


@dataclasses.dataclass(frozen=True)
class Shared:
    """Parts that trainer and searchers of a process share.

    Attributes:
        clock: running time in seconds, accumulated over resumes.
        model: start model.
        policy: architecture of the policy, with adapters.
    """

    config: Config
    workdir: Path
    cluster: Cluster
    clock: RunClock
    sites: Sites
    task: Task
    model: models.Description
    policy: TransformerConfig
    tokenizer: Tokenizer
    rewards: Rewards

    @property
    def run_id(self) -> str:
        """ID of the run in its work directory."""
        return run_id_of(self.workdir)

    @property
    def identity(self) -> str:
        """Return the digest of the code and the ID of the run, equal in all processes of a run.

        Versions of Python and JAX and the kind of device may differ, because every response has
        the log-probs of its sampler.
        """
        return f"{code_name()}/{self.run_id}"

    def start_params(self, site: Site) -> Any:
        """Load the start model's weights in the layout and on the devices of a searcher.

        The function uses only devices of this process, so a single process may call it.
        """
        source = self.sites.reading(self.model.config.hidden_size)
        load = source.locked(start_weights)
        return load(self.config, self.model.config, source.mesh, site.mesh)


def open_sites(config: Config, placement: Division) -> Sites:
    """Return the sites of a division, with device locks for the asynchronous driver."""
    trainer, publication = placement.trainer_mesh, placement.publication_mesh
    trains = bool(trainer.local_devices)
    if writes_versions(config):
        if not trains and placement.searcher_meshes:  # the first searcher reads the weights
            devices = placement.searcher_meshes[0].devices
            trainer = Mesh(devices.reshape(1, 1, -1), MESH_AXES)
        publication = trainer  # weights in files have the trainer's layout
    lock = None
    if config.driver == "async":
        launchers = [trainer, *placement.searcher_meshes]
        if not trains:
            launchers.append(trainer)  # the weight poller converts restored weights
        lock = device_lock_for(launchers)
    return Sites(
        Site(trainer, lock),
        Site(publication, lock),
        tuple(Site(mesh, lock) for mesh in placement.searcher_meshes),
        placement.first_searcher,
        placement.num_searchers,
        trains,
    )


def open_shared(
    config: Config,
    workdir: Path,
    *,
    cluster: Cluster,
    clock: RunClock,
    note: Callable[[str], None],
    sites: Sites | None = None,
) -> Shared:
    """Place the run on its devices and open the shared parts.

    Args:
        cluster: the processes of the run; all of them call this function.
        sites: sites of a searcher process of a fleet; None: the sites of the config's placement.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError: the model folder, the data or a reward function is not usable.
    """
    folder = workdir.absolute()
    if sites is None:
        # In a job of one process these are the local devices.
        found = divide(config.placement, jax.devices(), asked(config), cluster.number)
        sites = open_sites(config, found)
    task = make_task(config)
    # Read the data before the model, which may take minutes to load: unreadable data ends the run.
    sets = f" of {', '.join(task.data_sets)}" if isinstance(task, Mixture) else ""
    note(f"{task.name}: {task.size('train'):,} prompts{sets}, {task.size('eval'):,} held out")
    model = describe_model(config)
    policy, tokenizer = policy_config(config, model.config), model.load_tokenizer()
    rewards, logs = Rewards(), folder / "logs"
    if sites.searchers:
        rewards = Rewards(
            make_rewards(config, task, tokenizer, sites.searchers, logs),
            make_gold(config, task, tokenizer, sites.searchers[0], logs),
            make_environments(config, tokenizer, logs),
            make_server(config, policy, tokenizer, folder),
        )
    return Shared(config, folder, cluster, clock, sites, task, model, policy, tokenizer, rewards)


# Weights of searchers.


class Arrival(NamedTuple):
    """Conversion of published weights for searchers.

    Attributes:
        layout: converts weights from files to the decoder's layout; None: no conversion.
        shardings: shardings for each searcher.
        merges: for each searcher, a function that merges adapters into the base weights; empty
            without adapters.
    """

    layout: Callable[[Any], Any] | None
    shardings: list[Any]
    merges: list[Callable[[Any], Any]]


def make_arrival(shared: Shared, base: Any) -> Arrival:
    """Return the conversion of published weights.

    Args:
        base: frozen parameters under adapters; None without adapters.
    """
    config, policy, sites = shared.config, shared.policy, shared.sites
    plain = dataclasses.replace(policy, adapters=None)
    dtype = jnp.dtype(config.model.compute_dtype)
    quantization, mesh = config.search.quantization, sites.publication.mesh
    layout, published = make_publication(plain, mesh, quantization)
    rounded = functools.partial(
        make_publish_program, quantization=quantization, float32_leaves=plain.float32_leaves
    )
    wanted = [searcher_shardings(plain, site.mesh, quantization) for site in sites.searchers]
    if policy.adapters is None:
        # Files have the trainer's layout: convert and quantise after reading.
        return Arrival(sites.trainer.locked(rounded(dtype, layout, published)), wanted, [])
    # One base for each set of devices, in the decoder's layout and in full precision: adapters are
    # added before rounding.
    exact = rounded(dtype, *make_publication(plain, mesh), quantization="none")(base)
    held = exact if quantization == "none" else rounded(dtype, layout, published)(base)
    kernels, rest = lora.adapted(exact, policy), lora.unadapted(held, policy)
    merges: dict[Site, Callable[[Any], Any]] = {}
    for site, shardings in zip(sites.searchers, wanted, strict=True):
        if site not in merges:
            of_kernels = lora.adapted(searcher_shardings(plain, site.mesh), policy)
            own = lora.Base(
                hand_over(kernels, of_kernels),
                hand_over(rest, lora.unadapted(shardings, policy)),
            )
            merge = functools.partial(
                lora.merge_into, own, config=policy, quantization=quantization
            )
            merges[site] = site.locked(merge)
    adapters = [adapter_shardings(policy, site.mesh) for site in sites.searchers]
    return Arrival(None, adapters, [merges[site] for site in sites.searchers])


def make_stored_weights(shared: Shared) -> StoredWeights:
    """Make the weights of a process that only searches, which it reads from storage."""
    config, policy, sites = shared.config, shared.policy, shared.sites
    mesh, dtype = sites.publication.mesh, jnp.dtype(config.model.compute_dtype)
    base = None
    if policy.adapters is None:
        shapes, shardings = abstract_params(policy, dtype), param_shardings(policy, mesh)
    else:
        shapes = jax.tree.map(lambda x: x.update(dtype=dtype), lora.abstract_adapters(policy))
        shardings = lora.split(param_shardings(policy, mesh))[1]
        base = shared.model.load_params(
            param_dtype=jnp.dtype(config.model.param_dtype),
            shardings=param_shardings(shared.model.config, sites.trainer.mesh),
        )
    files = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        on_mesh(mesh, shardings),
    )
    arrival = make_arrival(shared, base)
    return StoredWeights(
        storage_of(shared.workdir),
        files,
        arrival.shardings,
        arrival.merges,
        layout=arrival.layout,
        start=lambda i: shared.start_params(sites.searchers[i]),
    )


# Searchers.


def build_judging(shared: Shared) -> Judging:
    """Make the measures of each searcher of this process, and the metrics of the run."""
    lock = threading.Lock()  # searchers that share devices load only one copy
    load = functools.cache(shared.start_params)

    def reference_params(site: Site) -> Any:
        with lock:
            return load(site)

    return make_judging(
        shared.config,
        shared.tokenizer,
        shared.model.config,
        shared.rewards.gold,
        reference_params,
        shared.sites.searchers,
    )


def make_searchers(
    shared: Shared, weights: OnDevices | WeightFolder, judging: Judging
) -> tuple[SearchParts, ...]:
    """Build the parts of each searcher of this process."""
    config, sites, rewards = shared.config, shared.sites.searchers, shared.rewards
    if not sites:
        return ()
    assert isinstance(weights, OnDevices), "a process that writes versions has no searchers"
    objective = config.objective.built
    states = StateValues(objective.value("vine_tokens", 0))
    key = jax.random.key(config.seed)
    environments = rewards.environments
    check_environments(config, shared.task, environments)
    # Searchers on the same devices share a decoder, and so do all searchers on single devices.
    decoders = {
        site: make_decoder(config, shared.model.config, shared.tokenizer, site)
        for site in dict.fromkeys(site.program_site for site in sites)
    }
    given = {site: _make_given_scorer(shared, site) for site in dict.fromkeys(sites)}
    parts = []
    for i, site in enumerate(sites):
        decoder = engine = decoders[site.program_site]
        latest = functools.partial(weights.latest, i)
        if rewards.server is not None:
            # The server receives adapters. Weights are merged for evaluations only.
            latest = functools.partial(weights.adapters, i)
            engine = rewards.server
        source = rewards.source and rewards.source.on(site)
        grader = make_grader(config, shared.task, shared.tokenizer, source)
        parts.append(
            SearchParts(
                index=shared.sites.first_searcher + i,
                weights=latest,
                evaluated=functools.partial(_evaluated, shared, weights, i),
                sampler=Sampler(engine, config.search, key, environments, states),
                grader=grader,
                evaluator=make_shard_evaluator(
                    config, decoder, grader, judging.measures[i], environments
                ),
                given=given[site],
                clock=shared.clock,
                swaps_in_flight=swaps_in_flight(config),
                waits_for_all=config.driver == "sync" and environments is not None,
            )
        )
    return tuple(parts)


def _evaluated(shared: Shared, weights: OnDevices, i: int, version: int) -> Published | None:
    """Return a version under evaluation for searcher i; None if it was dropped."""
    found = weights.at(version, i)
    if found is None and version == 0:  # a resumed run evaluates the start model
        found = Published(0, shared.start_params(shared.sites.searchers[i]))
    return found


def _make_given_scorer(shared: Shared, site: Site) -> GivenScorer | None:
    """Return the scorer of given responses on a site; None without task.start_path."""
    config, tokenizer = shared.config, shared.tokenizer
    if not config.task.start_path:
        return None
    program = make_start_program(
        shared.model.config,
        make_scoring(config, tokenizer.eos_ids),
        max_new_tokens=config.search.max_new_tokens,
        site=site,
    )
    return GivenScorer(
        program,
        samples_per_prompt=config.search.samples_per_prompt,
        temperature=config.search.sampling_temperature,
        padding=make_padding(config, tokenizer.pad_id),
    )
