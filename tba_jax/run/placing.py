# SPDX-License-Identifier: Apache-2.0
"""Where a run lies: meshes of trainer and searchers, as its config asks for, and their turns."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from tba_jax.config.devices import asked
from tba_jax.config.resolved import has_trainer_group, transport_of, writes_versions
from tba_jax.config.schema import Config
from tba_jax.devices.sharding import MESH_AXES, Placement, place
from tba_jax.devices.site import Site
from tba_jax.devices.turns import turns_for
from tba_jax.models.transformer import TransformerConfig


def place_run(config: Config, devices: Sequence[Any], process_index: int = 0) -> Placement:
    """Meshes of the trainer and of each searcher.

    Args:
        config: validated.
        devices: as in `placement.arrange`.
        process_index: whose searchers.

    Raises:
        PlacementError: the devices cannot be divided so.
    """
    wanted = asked(config)
    if has_trainer_group(config):
        mesh = np.array(sorted(devices, key=lambda d: (d.process_index, d.id)))
        return Placement(
            Mesh(mesh.reshape(wanted.mesh), MESH_AXES), (), num_searchers=wanted.num_searchers
        )
    return place(config.placement, devices, wanted, process_index)


def reading_mesh(model_config: TransformerConfig, devices: Sequence[Any]) -> Mesh:
    """As many of these devices as divide the model evenly: to look at it without training it."""
    num = max(n for n in range(1, len(devices) + 1) if model_config.hidden_size % n == 0)
    return Mesh(np.array(devices[:num]).reshape(1, num, 1), MESH_AXES)


class Sites(NamedTuple):
    """Where the parts of a run are, as one process sees them, and whose turn it is there.

    Attributes:
        trainer: its mesh has the axes MESH_AXES.
        publication: the trainer's devices as the publish program leaves the weights on them.
        searchers: one for each searcher of this process; those that share devices are equal.
        first_searcher: index of the first of them in the run.
        num_searchers: of the run.
        trains: this process has devices of the trainer.

    On a host that only searches `trainer` and `publication` are devices of its first searcher:
    those on which it reads weights.
    """

    trainer: Site
    publication: Site
    searchers: tuple[Site, ...]
    first_searcher: int = 0
    num_searchers: int = 1
    trains: bool = True

    @property
    def evaluation(self) -> Site:
        """Where the judge lies, and where what is not divided is evaluated: at searcher 0."""
        return self.searchers[0]

    def reading(self, model_config: TransformerConfig) -> Site:
        """To load a model on, with the trainer's devices of this process: the others go on."""
        devices = self.trainer.mesh.local_devices
        return Site(reading_mesh(model_config, devices), self.trainer.turns)


def open_sites(config: Config, placement: Placement) -> Sites:
    """The sites of a placement; turns are for the threads of the asynchronous driver."""
    turns = None
    trains = bool(placement.trainer_mesh.local_devices)
    trainer, publication = placement.trainer_mesh, placement.publication_mesh
    is_beside = not writes_versions(config)
    if not is_beside:
        publication = trainer  # files have the trainer's layout
        if not trains and placement.searcher_meshes:
            devices = placement.searcher_meshes[0].devices
            trainer = publication = Mesh(devices.reshape(1, 1, -1), MESH_AXES)
    if config.driver == "async":
        launchers = [trainer, *placement.searcher_meshes]
        if transport_of(config) != "memory" and (is_beside or not trains):
            launchers.append(trainer)  # the weight poller lays restored weights out
        # Half: the error says more than the watchdog, and comes first.
        turns = turns_for(launchers, timeout_s=config.log.watchdog_s / 2)
    return Sites(
        Site(trainer, turns),
        Site(publication, turns),
        tuple(Site(mesh, turns) for mesh in placement.searcher_meshes),
        placement.first_searcher,
        placement.num_searchers,
        trains,
    )
