# SPDX-License-Identifier: Apache-2.0
"""Parts that every process of a run opens: config, placement, task, model, rewards, checkpoints.

Processes that only search or only evaluate open the same parts. This module makes no searcher and
no trainer, and reads only the weights of rewards. Invariant: a config whose devices, rewards or
judge cannot be used is refused here, before the first decode step. `problems` lists all problems.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from tba_jax.config.devices import asked, validate_devices
from tba_jax.config.resolved import allows_forks, writes_versions
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, replace
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.device_lock import device_lock_for
from tba_jax.devices.placement import MODES
from tba_jax.devices.sharding import MESH_AXES, Placement, place
from tba_jax.devices.site import Site, Sites
from tba_jax.environments.chat import make_chat_format
from tba_jax.environments.episodes import Episodes
from tba_jax.environments.pool import DEFAULT_WORKERS
from tba_jax.models import model as models
from tba_jax.models.hf import folders
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.report.writers import TRACKER_PACKAGES
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.kinds import FUNCTIONS, KINDS, Use, kind_of, workers_by_cores
from tba_jax.rewards.pool import RewardFailure, RewardPool
from tba_jax.rewards.reward_models import RewardModel, gold_dtype
from tba_jax.rewards.source import RewardSource
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.errors import UserError
from tba_jax.run.host_state import Facts, RunClock, code_name
from tba_jax.run.model_parts import (
    describe_model,
    end_ids,
    longest_sequence,
    make_server,
    policy_config,
)
from tba_jax.run.object_store import storage_of, upload
from tba_jax.run.peers import start_cluster
from tba_jax.run.workdir import run_id_of
from tba_jax.search.prompts import text_of
from tba_jax.search.sampler import sampling_settings
from tba_jax.serving.agents import AgentPool
from tba_jax.serving.inference_server import InferenceServer
from tba_jax.serving.protocol import Served
from tba_jax.settings import ConfigError, listed
from tba_jax.tasks.mixture import Mixture
from tba_jax.tasks.registry import Task, entry_of, get_task

T = TypeVar("T")


def place_run(config: Config, devices: Sequence[Any], process_index: int = 0) -> Placement:
    """Place the meshes of the trainer and of each searcher.

    Args:
        process_index: process whose searchers are placed.

    Raises:
        PlacementError: the devices cannot be divided as config.placement requests.
    """
    return place(config.placement, devices, asked(config), process_index)


def open_sites(config: Config, placement: Placement) -> Sites:
    """Return the sites of a placement, with device locks for the asynchronous driver."""
    lock = None
    trains = bool(placement.trainer_mesh.local_devices)
    trainer, publication = placement.trainer_mesh, placement.publication_mesh
    is_beside = not writes_versions(config)
    if not is_beside:
        publication = trainer  # weights in files have the trainer's layout
        if not trains and placement.searcher_meshes:
            devices = placement.searcher_meshes[0].devices
            trainer = publication = Mesh(devices.reshape(1, 1, -1), MESH_AXES)
    if config.driver == "async":
        launchers = [trainer, *placement.searcher_meshes]
        if not is_beside and not trains:
            launchers.append(trainer)  # the weight poller converts restored weights
        # Half of the watchdog's limit, so that this clearer error comes first.
        lock = device_lock_for(launchers, timeout_s=config.log.watchdog_s / 2)
    return Sites(
        Site(trainer, lock),
        Site(publication, lock),
        tuple(Site(mesh, lock) for mesh in placement.searcher_meshes),
        placement.first_searcher,
        placement.num_searchers,
        trains,
    )


def make_task(config: Config) -> Task:
    """Return the task of a config; its data is read at first use.

    Raises:
        ValueError: the task is unknown, or does not accept this data.
    """
    task = config.task
    return get_task(
        task.name, task.data_path, task.num_eval_prompts, chat=task.chat, columns=task.columns
    )


class Rewards(NamedTuple):
    """Sources of rewards.

    Attributes:
        source: rewards for training and evaluation; None: the environment or other processes give
            them.
        gold: judge of the win rate; None without eval.gold_model and eval.gold_reward.
        environments: processes that answer the policy's turns; None without task.environment.
        server: server that samples responses; None with search.engine=devices.
    """

    source: RewardSource | None
    gold: RewardSource | None
    environments: AgentPool | None = None
    server: InferenceServer | None = None

    def check(self) -> None:
        """Raise RuntimeError if a source, environment or server cannot be used."""
        for source in filter(None, self):
            source.check()

    def close(self) -> None:
        """Stop the processes that compute rewards, and release the resources of the server."""
        for source in filter(None, self):
            source.close()


def open_rewards(
    config: Config, task: Task, tokenizer: Tokenizer, sites: Sites, logs: Path
) -> Rewards:
    """Open rewards and judge of a run.

    A process without searchers opens no rewards.
    """
    if not sites.searchers:
        return Rewards(None, None)
    return Rewards(
        make_rewards(config, task, tokenizer, sites.searchers, logs),
        make_gold(config, task, tokenizer, sites.evaluation, logs),
        make_environments(config, tokenizer, logs),
    )


def make_environments(
    config: Config, tokenizer: Tokenizer, logs: Path | None = None
) -> AgentPool | None:
    """Return the processes of the configured environment; None without one."""
    if not config.task.environment:
        return None
    search, renderer = config.search, config.task.renderer
    served = Served(
        "policy",
        tokenizer,
        make_chat_format(tokenizer, renderer),
        end_ids(config, tokenizer.eos_ids),
        1 + search.max_new_tokens,
        sampling_settings(search),
    )
    return AgentPool(
        config.task.environment,
        served,
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers or max(DEFAULT_WORKERS, workers_by_cores()),
        max_memory_bytes=int(config.reward.max_memory_gib * 2**30),
        allows_forks=allows_forks(config),
        has_schemas=bool(renderer),
        logs=logs,
    )


def make_episodes(
    config: Config, task: Task, tokenizer: Tokenizer, environments: AgentPool | None
) -> Episodes | None:
    """Return the settings of episodes; None without an environment.

    Raises:
        ValueError: the environment, or the chat template with it, cannot be used.
    """
    if environments is None:
        return None
    environments.check()
    has_other = config.task.reward or task.reward or config.reward.model_path
    if not (environments.has_reward or has_other):
        raise ValueError(
            f"task.environment = {environments.name!r} has no get_reward(), and no other reward is "
            "set. Add the method, or set --config.task.reward=my_rewards.py:score"
        )
    is_agent, search = environments.is_agent, config.search
    is_chat = not is_agent and isinstance(task.eval_problem(0)[0], list)
    chat = environments.served.chat
    if environments.has_tools and not (is_chat and config.task.renderer):
        raise ValueError(
            f"task.environment = {environments.name!r} has tools, which need chat prompts and the "
            "tool format of the model. Set --config.task.chat=True, and --config.task.renderer="
            "qwen3 or another format of the library renderers"
        )
    missing = set(chat.stop_ids) - set(environments.served.eos_ids)
    if is_chat and missing:
        raise ValueError(
            f"task.renderer = {config.task.renderer!r}: a message also ends with the tokens "
            f"{sorted(missing)}. Set --config.search.stop_ids={tuple(sorted(missing))}"
        )
    episodes = Episodes(
        environments,
        tokenizer,
        search.max_turns,
        chat if is_chat else None,
        is_agent,
        environments.schemas if is_chat else (),
    )
    if is_chat:
        episodes.check_template()
    is_learned = config.objective.built.needs.head == "log_z"
    if episodes.first_token_only and is_learned:
        raise ValueError(
            "objective.log_z = learned reads the prompt, which is one token for agents and for "
            "tools of chat models: log Z would be equal for all prompts. Set "
            "--config.objective.log_z=vargrad"
        )
    return episodes


def make_rewards(
    config: Config,
    task: Task,
    policy_tokenizer: Tokenizer,
    sites: Sequence[Site],
    logs: Path | None = None,
) -> RewardSource | None:
    """Make the source of rewards for training and evaluation; the caller closes it.

    Args:
        sites: sites of the searchers, for models that rewards need. A reward model is divided over
            the first site; `RewardSource.on` gives copies for the others. A victim has a copy on
            one device of each site.
        logs: folder of the log files of reward processes; None: their output is that of this
            process.

    Returns:
        The source; None if the environment gives the rewards.

    Raises:
        ValueError: the reward function or model cannot be used, or no reward is set.
    """
    reward = config.task.reward or task.reward
    kind = kind_of(config, config.task.reward, task.reward, task.name)
    weights = config.task.reward_weights
    use = Use(reward, weights, first_row(task), policy_tokenizer, sites, logs=logs)
    return kind.make(config, use._replace(is_part=bool(config.task.environment)))


def first_row(task: Task) -> tuple[str, Mapping[str, Any]]:
    """Return prompt text and columns of the first held-out row; a chat is the column `prompt`."""
    prompt, columns = task.eval_problem(0)
    return prompt if isinstance(prompt, str) else prompt[-1]["content"], columns


def make_grader(
    config: Config, task: Task, tokenizer: Tokenizer, rewards: RewardSource | None
) -> Grader:
    """Make the grader of a task, with these rewards.

    Rewards that the user names are added to those of an environment, as in TRL; a task's own reward
    is not.
    """
    adds = bool(config.task.reward or config.reward.model_path)
    first_kind = task.response_kinds[0] if task.response_kinds else ""
    data_sets = task.data_sets if isinstance(task, Mixture) else ()
    return Grader(rewards, tokenizer.batch_decode, task.response_kind, first_kind, data_sets, adds)


def make_gold(
    config: Config,
    task: Task,
    policy_tokenizer: Tokenizer,
    site: Site,
    logs: Path | None = None,
) -> RewardSource | None:
    """Make the judge of the win rate, or return None; the caller closes it.

    Args:
        site: site of the searcher that evaluates; a model is divided over it.

    Raises:
        ValueError: the judge cannot be used or is missing, or the data has no reference responses.
    """
    judge = config.eval.gold_model or config.eval.gold_reward
    if judge and "answer" not in task.eval_problem(0)[1]:
        raise ValueError(
            f"{judge} judges the win rate over reference responses, which are the column `answer` "
            f"of a prompt, and task {task.name} has no such column; add it to the data, or leave "
            "eval.gold_model and eval.gold_reward empty"
        )
    if config.eval.gold_model:
        return RewardModel.load(
            config.eval.gold_model,
            site=site,
            param_dtype=gold_dtype(site),
            policy_tokenizer=policy_tokenizer,
        )
    if config.eval.gold_reward:
        judge = config.eval.gold_reward
        use = Use(judge, (), first_row(task), policy_tokenizer, [site], logs=logs)
        return FUNCTIONS.make(config, use)
    if task.metric == "win_rate":
        raise ValueError(
            f"task {task.name} has the metric win rate, which needs a judge; set "
            "--config.eval.gold_model to a reward model other than the one that trains, or "
            "--config.eval.gold_reward=package.module:function"
        )
    return None


@dataclasses.dataclass(frozen=True)
class Shared:
    """Parts that trainer, searchers and evaluator of a process share.

    Attributes:
        clock: running time in seconds, accumulated over resumes.
        model: start model.
    """

    config: Config
    workdir: Path
    cluster: Cluster
    clock: RunClock
    sites: Sites
    task: Task
    model: models.Description
    tokenizer: Tokenizer
    rewards: Rewards
    checkpoints: Checkpoints

    @property
    def policy(self) -> TransformerConfig:
        """Return the architecture of the policy."""
        return policy_config(self.config, self.model.config)

    @property
    def is_follower(self) -> bool:
        """Return whether this process receives its batches from another process."""
        return not self.cluster.is_primary

    @functools.cached_property
    def facts(self) -> Facts:
        """Return the facts for checkpoints of this run."""
        return Facts(
            self.config.seed,
            run_id_of(self.workdir),
        )

    @property
    def identity(self) -> str:
        """Return the digest of the code and the ID of the run, equal in all processes of a run.

        Versions of Python and JAX and the kind of device may differ, because every response has
        the log-probs of its sampler.
        """
        return f"{code_name()}/{self.facts.run_id}"


def open_shared(
    config: Config,
    workdir: str | os.PathLike[str],
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
    folder = Path(workdir).absolute()
    if sites is None:
        validate_devices(config, len(jax.local_devices()), jax.process_count())
        # In a job of one process these are the local devices.
        sites = open_sites(config, place_run(config, jax.devices(), cluster.number))
    task = make_task(config)
    # Read the data before the model, which may take minutes to load: unreadable data ends the run.
    sets = f" of {', '.join(task.data_sets)}" if isinstance(task, Mixture) else ""
    note(f"{task.name}: {task.train_size():,} prompts{sets}, {task.eval_size():,} held out")
    model = describe_model(config)
    tokenizer = model.load_tokenizer()
    rewards = open_rewards(config, task, tokenizer, sites, folder / "logs")
    if sites.searchers:
        policy = policy_config(config, model.config)
        rewards = rewards._replace(server=make_server(config, policy, tokenizer, folder))
    return Shared(
        config=config,
        workdir=folder,
        cluster=cluster,
        clock=clock,
        sites=sites,
        task=task,
        model=model,
        tokenizer=tokenizer,
        rewards=rewards,
        checkpoints=Checkpoints(
            storage_of(folder),
            before_commit=functools.partial(upload, folder),
            run_id=run_id_of(folder),
            read_only=not sites.trains,
            members=cluster.members,
            keeps_state=cluster.is_primary,
        ),
    )


@contextlib.contextmanager
def all_problems(config: Config) -> Iterator[None]:
    """If the block fails because of user input, raise all problems of the input together.

    Raises:
        UserError: the message lists all problems. Without any, the block's failure is raised.
    """
    try:
        yield
    except (ValueError, RewardFailure, UserError) as error:
        if found := problems(config):
            raise UserError(listed(found)) from error
        raise


def problems(config: Config) -> list[str]:
    """Return one line for each problem of config, data, model, reward, devices and packages.

    Weights are not read. Each reward function is tried on one row, in a separate process.

    Args:
        config: config, which may be invalid.
    """
    found = _Found()
    found.attempt(lambda: validate(config))
    task = None
    if not found.mentions("task.name", "task.data_path", "task.columns", "task.num_eval_prompts"):
        task = found.attempt(lambda: _open_task(config))
    tokenizer = found.attempt(lambda: _open_model(config))
    if task is not None and tokenizer is not None:
        found.attempt(lambda: text_of(task, tokenizer, "train", 0))
    if not found.mentions("task.name", "task.reward"):
        for function in functions(config):
            found.attempt(lambda function=function: try_reward(config, function, task))
        found.attempt(lambda: _find_reward_models(config))
    if not found.mentions("mesh", "num_searchers", "search.num_devices", "placement"):
        found.attempt(lambda: _check_devices(config))
    found.attempt(lambda: _check_packages(config))
    return list(found.lines)


class _Found:
    """List of problems, in the order in which they were found."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Return the result of a check; if it fails, record its error and return None."""
        try:
            return step()
        except ConfigError as error:
            self.lines.update(dict.fromkeys(map(str, error.args)))
        except (ValueError, RewardFailure, OSError, UserError) as error:
            self.lines[str(error)] = None
        return None

    def mentions(self, *names: str) -> bool:
        """Return whether a found problem mentions one of these settings."""
        return any(line.startswith(f"config.{name} ") for line in self.lines for name in names)


def _open_task(config: Config) -> Task:
    if not config.task.max_prompt_tokens:  # then the number of held-out rows is chosen, too
        config = replace(config, {"task.num_eval_prompts": 1})
    task = make_task(config)
    task.train_size()
    first_row(task)
    return task


def _open_model(config: Config) -> Tokenizer:
    model = describe_model(config, with_weights=False)
    policy = policy_config(config, model.config)
    if config.task.max_prompt_tokens:
        longest_sequence(config, model.config)
    tokenizer = model.load_tokenizer()
    if policy.adapters is not None:
        server = make_server(config, policy, tokenizer, Path())
        if server is not None:
            server.check()
    return tokenizer


def functions(config: Config) -> list[str]:
    """Return the names of the reward functions."""
    own = "" if config.reward.model_path else entry_of(config.task.name).task.reward
    named = config.task.reward or own
    if named in KINDS:
        return []
    return [part.strip() for part in f"{named},{config.eval.gold_reward}".split(",") if part]


def try_reward(config: Config, function: str, task: Task | None) -> None:
    """Load a reward function in a separate process, and try it on a row of the task.

    Raises:
        ValueError, RewardFailure: the function cannot be used.
    """
    pool = RewardPool(
        function,
        num_workers=1,
        timeout_s=config.reward.timeout_s,
        max_failure_rate=1.0,
        row=None if task is None else first_row(task),
    )
    try:
        pool.check()
    finally:
        pool.close()


def _find_reward_models(config: Config) -> None:
    own = entry_of(config.task.name).task.reward
    kind = kind_of(config, config.task.reward, own, config.task.name)
    for path in (*kind.models(config).values(), config.eval.gold_model):
        if path:
            folders.load_config(folders.resolve(path, with_weights=False))


def _check_devices(config: Config) -> None:
    if MODES[config.placement].spans_hosts:
        return  # the devices of other hosts are not known here
    start_cluster(config)
    import jax

    validate_devices(config, len(jax.local_devices()))


def _check_packages(config: Config) -> None:
    kind = config.log.tracker.partition(":")[0]
    wanted = {
        f"log.tracker={config.log.tracker}": (TRACKER_PACKAGES.get(kind, ""), kind, bool(kind)),
        "placement=fleet": ("ray", "fleet", MODES[config.placement].has_remote_searchers),
    }
    missing = [
        f"{setting} needs the package {package}: pip install 'tba_jax[{extra}]'"
        for setting, (package, extra, is_set) in wanted.items()
        if is_set and importlib.util.find_spec(package) is None
    ]
    if missing:
        raise ConfigError(*missing)
