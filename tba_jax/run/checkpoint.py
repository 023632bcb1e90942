# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: all state of a step, saved and restored as one atomic unit.

A checkpoint is a folder that Orbax writes: the train state as sharded arrays, and a file for each
part of the host state: replay buffer, tickets of the owner, counters. Processes synchronise only
through the coordination service of `jax.distributed`, because searchers may be using the devices.

Invariants: a checkpoint is complete or invisible; no file has pickled objects; the restored state
equals the saved state; a checkpoint of another run is refused (tests/run/test_checkpoint.py).
"""

import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from tba_jax.devices.cluster import Cluster
from tba_jax.flow.state import PartState, pack_arrays, unpack_arrays
from tba_jax.run.errors import CheckpointError
from tba_jax.run.workdir import storage_of
from tba_jax.storage import digests
from tba_jax.storage.steps import SavedSteps

_HOST = "host_"  # prefix of the files of the host state


class Checkpoints(SavedSteps):
    """The checkpoints of one run, WORKDIR/checkpoints; `options` are those of `SavedSteps`."""

    def __init__(self, workdir: epath.PathLike, **options: Any) -> None:
        folder = epath.Path(workdir) / "checkpoints"
        super().__init__(folder, "train_state", error=CheckpointError, **options)

    def save(self, step: int, train_state: Any, parts: Mapping[str, PartState]) -> None:
        """Copy the arrays to host memory, then write arrays and host state in the background.

        The caller may donate the arrays afterwards. On CPU no copy is made: JAX does not reuse a
        donated buffer while it is written. `parts` is the host state by name, copied already; only
        the first process writes it.

        Raises:
            CheckpointError: this save or the previous save failed.
        """

        def write_host_state(folder: epath.Path) -> None:
            for name, part in parts.items():
                (folder / f"{_HOST}{name}").write_bytes(pack_arrays(*part))

        self.write(step, train_state, write_host_state)

    def newest_intact(self, cluster: Cluster) -> int | None:
        """Return the step of the newest checkpoint; None without checkpoints.

        All processes of the cluster call this function; each of them checks a share of the files.

        Raises:
            CheckpointError: a file is damaged, or another run wrote it; raised in all processes.
        """
        # Only one process lists the folder, because another host might see a newer checkpoint.
        if (step := cluster.broadcast_json(self.newest())) is None:
            return None
        share = (cluster.process_id, cluster.num_processes)
        if found := sum(cluster.gather_json(self.damage(step, share=share)), []):
            raise self.damaged(step, found)
        if (saved := digests.run_of(self.path(step))) != self.run_id:
            raise CheckpointError(
                f"checkpoint {step} is of run {saved}, but the work directory is of run "
                f"{self.run_id}: the checkpoint was copied there. Move it away, or restore the "
                "config.json of its run"
            )
        return step

    def host_state(self, step: int) -> dict[str, PartState]:
        """Return the host state of an intact checkpoint by name."""
        files = self.path(step).glob(f"{_HOST}*")
        found = {file.name: unpack_arrays(file.read_bytes()) for file in files}
        return {name.removeprefix(_HOST): PartState(*part) for name, part in found.items()}


def open_newest(workdir: str | os.PathLike[str], of: str = "") -> tuple[Checkpoints, int]:
    """Return checkpoints to read, and the step of the newest one, whose files are intact.

    The run may be running. Only files whose names begin with `of` are checked.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoints = Checkpoints(storage_of(workdir), read_only=True)
    if (step := checkpoints.newest()) is None:
        raise CheckpointError(
            f"no complete checkpoint in {checkpoints.folder}: the run has not saved one yet. Wait "
            "for it, or give the --workdir of another run"
        )
    if found := checkpoints.damage(step, below=of):
        raise checkpoints.damaged(step, found)
    return checkpoints, step


def load_host_state(workdir: str | os.PathLike[str]) -> tuple[int, dict[str, PartState]]:
    """Return step and host state of the newest checkpoint; raises as `open_newest`."""
    checkpoints, step = open_newest(workdir, of=_HOST)
    return step, checkpoints.host_state(step)
