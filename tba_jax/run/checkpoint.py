# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: all state of a step, saved and restored as one atomic unit.

A checkpoint is an Orbax composite of the train state (sharded arrays) and the host state: the
replay buffer, the tickets of the owner and the counters. Processes synchronise only through the
coordination service of `jax.distributed`, because the devices may be in use by searchers.

Invariants: a checkpoint is complete or invisible; no file has pickled objects; the restored state
equals the saved state (tests/run/test_checkpoint.py).
"""

import asyncio
import contextlib
import dataclasses
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future as ocp_future

from tba_jax.devices.sharding import storable
from tba_jax.run.errors import CheckpointError
from tba_jax.run.host_state import HostState, pack, unpack
from tba_jax.run.object_store import storage_of
from tba_jax.storage.steps import SavedSteps

FOLDER = "checkpoints"
"""Name of the folder of checkpoints in a work directory."""


def _host_file(directory: epath.Path) -> epath.Path:
    return directory / "process_00000.npz"


class HostStateHandler(ocp.AsyncCheckpointHandler):
    """Orbax handler that writes the host state into a file of the checkpoint folder.

    Args:
        keeps_state: whether this process has the host state.
    """

    def __init__(self, keeps_state: bool) -> None:
        self._keeps_state = keeps_state

    async def async_save(self, directory: epath.Path, args: Any = None) -> Any:
        """Serialise and write the state in the background; its parts are copies already."""
        if not self._keeps_state:
            return []

        async def write() -> None:
            _host_file(directory).write_bytes(pack(args.item))

        return [ocp_future.CommitFutureAwaitingContractedSignals(write(), name="host_state")]

    def save(self, directory: epath.Path, args: Any = None) -> None:
        """Blocking form of `async_save`."""

        async def run() -> None:
            for commit in await self.async_save(directory, args):
                commit.result()

        asyncio.run(run())

    def restore(self, directory: epath.Path, args: Any = None) -> HostState:
        """Read the host state of the run."""
        del args
        return unpack(_host_file(directory).read_bytes())


@ocp.args.register_with_handler(HostStateHandler, for_save=True)
@dataclasses.dataclass
class HostStateSave(ocp.args.CheckpointArgs):
    """Orbax argument of a save: the `HostState` to write."""

    item: Any


@ocp.args.register_with_handler(HostStateHandler, for_restore=True)
@dataclasses.dataclass
class HostStateRestore(ocp.args.CheckpointArgs):
    """Orbax argument of a restore; `item` is not used."""

    item: Any = None


class Checkpoints(SavedSteps):
    """The checkpoints of one run.

    Args:
        workdir: work directory of the run.
        keeps_state: whether this process has the host state.
        options: further arguments of `SavedSteps`.
    """

    def __init__(
        self, workdir: epath.PathLike, *, keeps_state: bool = True, **options: Any
    ) -> None:
        super().__init__(
            epath.Path(workdir) / FOLDER,
            lambda processes: {
                "train_state": ocp.StandardCheckpointHandler(multiprocessing_options=processes),
                "host_state": HostStateHandler(keeps_state),
            },
            error=CheckpointError,
            **options,
        )

    def save(self, step: int, train_state: Any, host_state: HostState) -> None:
        """Copy the arrays, then write arrays and host state in the background.

        The copy is in host memory, so the caller may donate the arrays. On CPU no copy is made: JAX
        does not reuse a donated buffer while it is written.

        Raises:
            CheckpointError: this save or the previous save failed.
        """
        self.write(
            step,
            {
                "train_state": ocp.args.StandardSave(storable(train_state)),
                "host_state": HostStateSave(host_state),
            },
        )

    def abandon(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the current save, after the run failed.

        An error of the save is not raised, because the failure of the run is reported. An
        incomplete save stays invisible, and the next start removes it.
        """
        with contextlib.suppress(CheckpointError):
            self.wait(timeout_s)

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any, HostState]:
        """Read a checkpoint with the shardings of `abstract_state`; does not check digests.

        Args:
            abstract_state: tree of jax.ShapeDtypeStruct with shardings.
            step: step to restore; None: the newest checkpoint.

        Returns:
            step, train state, and host state.

        Raises:
            CheckpointError: the checkpoint is missing or unreadable.
        """
        step = self._resolve(step)
        state = ocp.args.StandardRestore(abstract_state)
        items = self.read(step, {"train_state": state, "host_state": HostStateRestore()})
        self._check_step(step, items["host_state"])
        return step, items["train_state"], items["host_state"]

    def restore_host_state(self) -> tuple[int, HostState]:
        """Read the newest host state and check its digests; for commands that inspect a run."""
        step = self._resolve(None)
        if found := self.damage(step, below="host_state/"):
            raise self.damaged(step, found)
        host_state = self.read(step, {"host_state": HostStateRestore()})["host_state"]
        self._check_step(step, host_state)
        return step, host_state

    def _resolve(self, step: int | None) -> int:
        step = self.newest() if step is None else step
        if step is None:
            raise CheckpointError(
                f"no complete checkpoint in {self.folder}; the run has not saved one yet"
            )
        return step

    def _check_step(self, step: int, host_state: HostState) -> None:
        inside = host_state.facts.step
        if inside not in (-1, step):
            raise CheckpointError(
                f"{self.path(step)} holds step {inside}: the folder was renamed. Name it "
                f"{self.path(inside)} again"
            )


def load_host_state(workdir: str) -> tuple[int, HostState]:
    """Return step and host state of the newest checkpoint of a run, without changing files.

    Raises:
        CheckpointError: the folder has no readable checkpoint.
    """
    storage = storage_of(workdir)
    folder = storage / FOLDER
    if not folder.is_dir():
        raise CheckpointError(f"{workdir} holds no run: there is no folder {folder}")
    return Checkpoints(storage, read_only=True).restore_host_state()
