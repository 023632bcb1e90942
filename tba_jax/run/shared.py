# SPDX-License-Identifier: Apache-2.0
"""What all parts of a run stand on: config, places, task, model, rewards, checkpoints.

A process that only searches, or only evaluates, opens the same. It makes no searcher and no
trainer, and reads no weights but those of rewards.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from tba_jax.config.devices import validate_devices
from tba_jax.config.schema import Config, flatten
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.placement import MODES
from tba_jax.models import model as models
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.run.checkpoint import Checkpoints, Saving
from tba_jax.run.clock import RunClock
from tba_jax.run.host_state import Facts
from tba_jax.run.identity import code_name, fingerprints, run_id_of
from tba_jax.run.modeling import describe_model, policy_config
from tba_jax.run.placing import Sites, open_sites, place_run
from tba_jax.run.rewarding import Rewards, make_task, open_rewards
from tba_jax.tasks.registry import Task


class Seat(NamedTuple):
    """Where the searchers of a process lie that only searches, and which they are.

    Attributes:
        sites: the trainer's is where weights are read.
        first_searcher: index in the run of the first of them.
        num_searchers: of the whole run.
    """

    sites: Sites
    first_searcher: int
    num_searchers: int


@dataclasses.dataclass(frozen=True)
class Shared:
    """What all parts of a run stand on.

    Attributes:
        cluster: the processes of the run; everything made for it is this one's.
        clock: seconds of running time, accumulated over resumes.
        first_searcher: index in the run of this process's first searcher.
        num_searchers: of all processes.
        model: the one that the run starts from.
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
    first_searcher: int
    num_searchers: int

    @property
    def policy(self) -> TransformerConfig:
        """The architecture as it is trained."""
        return policy_config(self.config, self.model.config)

    @property
    def stations(self) -> range:
        """Which of this process's searchers have devices here, and evaluate."""
        elsewhere = MODES[self.config.placement].searches_elsewhere
        number = len(self.sites.searchers)
        return range(min(1, number) if elsewhere else number)

    @property
    def is_follower(self) -> bool:
        """Whether this process trains on what another one draws."""
        return not self.cluster.is_primary

    @functools.cached_property
    def facts(self) -> Facts:
        """What the states that are saved belong to; reads files of the model and the data."""
        return Facts(
            self.config.seed,
            self.num_searchers,
            run_id_of(self.workdir),
            fingerprints(self.config, self.task, self.model.folder),
            config=flatten(self.config),
        )

    @property
    def identity(self) -> dict[str, str]:
        """Names of code, run, model, tokenizer, data and reward: equal in all processes of a run.

        Else responses would be of another policy or task without an error. Python, JAX and the
        kind of device may differ: log-probs of sampling are stored with every response.
        """
        return {"code": code_name(), "run": self.facts.run_id, **self.facts.fingerprints}


def open_shared(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    cluster: Cluster,
    clock: RunClock,
    note: Callable[[str], None],
    seat: Seat | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> Shared:
    """Place the run and open what its parts share.

    Args:
        config: validated.
        workdir: exists.
        cluster: the processes of the run, all of which call this.
        clock: started when the process did.
        note: told what the task has.
        seat: of a process that only searches, and writes no checkpoints.
        confirm: raises where this process no longer holds the work directory.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError: model folder, data or reward function are not usable; says which and why.
    """
    folder = Path(workdir).absolute()
    if seat is None:
        validate_devices(config, len(jax.local_devices()), jax.process_count())
        # Only a pod spans processes; with one process these are the same devices.
        sites = open_sites(config, place_run(config, jax.devices(), cluster.number))
        seat = Seat(sites, sites.first_searcher, sites.num_searchers)
        is_reader = not sites.trains
    else:
        sites, is_reader = seat.sites, True
    task = make_task(config)
    # Before the model, which may take minutes to load: data that cannot be read ends the run.
    note(f"{task.name}: {task.train_size():,} prompts, {task.eval_size():,} held out")
    model = describe_model(config)
    tokenizer = model.load_tokenizer()
    return Shared(
        config=config,
        workdir=folder,
        cluster=cluster,
        clock=clock,
        sites=sites,
        task=task,
        model=model,
        tokenizer=tokenizer,
        rewards=open_rewards(config, task, tokenizer, sites),
        checkpoints=Checkpoints(
            str(folder / "checkpoints"),
            keep=config.checkpoint.keep,
            timeout_s=config.checkpoint.timeout_s,
            read_only=is_reader,
            processes=Saving(cluster.members, keeps_state=cluster.is_primary),
            confirm=confirm,
        ),
        first_searcher=seat.first_searcher,
        num_searchers=seat.num_searchers,
    )
