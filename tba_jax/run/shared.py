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

import jax

from tba_jax.config.devices import validate_devices
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.models import model as models
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.clock import RunClock
from tba_jax.run.host_state import Facts
from tba_jax.run.identity import fingerprints, run_id_of
from tba_jax.run.modeling import describe_model, policy_config
from tba_jax.run.placing import Sites, open_sites, place_run
from tba_jax.run.rewarding import Rewards, make_task, open_rewards
from tba_jax.tasks.registry import Task


@dataclasses.dataclass(frozen=True)
class Shared:
    """What all parts of a run stand on.

    Attributes:
        cluster: the processes of the run; everything made for it is this one's.
        clock: seconds of running time, accumulated over resumes.
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

    @property
    def policy(self) -> TransformerConfig:
        """The architecture as it is trained."""
        return policy_config(self.config, self.model.config)

    @property
    def num_searchers(self) -> int:
        """Of all processes."""
        return len(self.sites.searchers) * self.cluster.num_processes

    @property
    def first_searcher(self) -> int:
        """Index of this process's first searcher in the run."""
        return len(self.sites.searchers) * self.cluster.process_id

    @functools.cached_property
    def facts(self) -> Facts:
        """What the states that are saved belong to; reads files of the model and the data."""
        return Facts(
            self.config.seed,
            self.cluster.num_processes,
            self.num_searchers,
            run_id_of(self.workdir),
            fingerprints(self.config, self.task, self.model.folder),
        )


def open_shared(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    cluster: Cluster,
    clock: RunClock,
    note: Callable[[str], None],
) -> Shared:
    """Place the run and open what its parts share.

    Args:
        config: validated.
        workdir: exists.
        cluster: the processes of the run, all of which call this.
        clock: started when the process did.
        note: told what the task has.

    Raises:
        ConfigError, PlacementError: the devices do not fit the placement.
        ValueError: model folder, data or reward function are not usable; says which and why.
    """
    folder = Path(workdir).absolute()
    validate_devices(config, len(jax.local_devices()), cluster.num_processes)
    # Only a pod spans processes; with one process these are the same devices.
    sites = open_sites(config, place_run(config, jax.devices(), cluster.process_id))
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
        ),
    )
