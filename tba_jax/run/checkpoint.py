# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: all state of a step, saved and restored as one atomic unit.

A checkpoint is a folder that Orbax writes: the train state as sharded arrays, and one npz file with
the host state: replay buffer, tickets of the owner, counters. Processes synchronise only through
the coordination service of `jax.distributed`, because searchers may be using the devices.

Invariants: a checkpoint is complete or invisible; no file has pickled objects; the restored state
equals the saved state; a checkpoint of another run is refused (tests/run/test_checkpoint.py).
"""

import contextlib
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from tba_jax.devices.sharding import storable
from tba_jax.flow.state import PartState
from tba_jax.run.errors import CheckpointError
from tba_jax.run.object_store import storage_of
from tba_jax.storage import digests
from tba_jax.storage.steps import READ_ERRORS, SavedSteps, brief

FOLDER = "checkpoints"
"""Name of the folder of checkpoints in a work directory."""
HOST_STATE = "host_state.npz"
_META = "__meta__"


def pack(parts: Mapping[str, PartState]) -> bytes:
    """Return states of parts, by name, as npz bytes: arrays as `part/key`, metadata as JSON."""
    arrays = {
        f"{name}/{key}": np.asarray(value)
        for name, part in parts.items()
        for key, value in part.arrays.items()
    }
    metas = json.dumps({name: part.meta for name, part in parts.items()})
    arrays[_META] = np.frombuffer(metas.encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def unpack(data: bytes) -> dict[str, PartState]:
    """Return the states that `pack` converted to bytes.

    Raises:
        ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile: the bytes are not intact.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as entries:
        metas = json.loads(entries[_META].tobytes().decode())
        arrays: dict[str, dict[str, np.ndarray]] = {name: {} for name in metas}
        for full_key in entries.files:
            if full_key != _META:
                name, key = full_key.split("/", 1)
                arrays[name][key] = entries[full_key]
        return {name: PartState(arrays[name], meta) for name, meta in metas.items()}


class Checkpoints(SavedSteps):
    """The checkpoints of one run.

    Args:
        workdir: work directory of the run.
        options: further arguments of `SavedSteps`.
    """

    def __init__(self, workdir: epath.PathLike, **options: Any) -> None:
        super().__init__(
            epath.Path(workdir) / FOLDER, "train_state", error=CheckpointError, **options
        )

    def save(self, step: int, train_state: Any, parts: Mapping[str, PartState]) -> None:
        """Copy the arrays, then write arrays and host state in the background.

        The copy is in host memory, so the caller may donate the arrays. On CPU no copy is made: JAX
        does not reuse a donated buffer while it is written.

        Args:
            parts: host state, copied already; only the first process writes it.

        Raises:
            CheckpointError: this save or the previous save failed.
        """
        self.write(
            step,
            storable(train_state),
            lambda folder: (folder / HOST_STATE).write_bytes(pack(parts)),
        )

    def abandon(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the current save, after the run failed.

        An error of the save is not raised, because the failure of the run is reported. An
        incomplete save stays invisible, and the next start removes it.
        """
        with contextlib.suppress(CheckpointError):
            self.wait(timeout_s)

    def check_run(self, step: int) -> None:
        """Refuse a checkpoint that another run wrote.

        Raises:
            CheckpointError: the checkpoint was copied into the work directory.
        """
        saved = digests.run_of(self.path(step))
        if saved != self.run_id:
            raise CheckpointError(
                f"checkpoint {step} is of run {saved}, but the work directory is of run "
                f"{self.run_id}: the checkpoint was copied there. Move it away, or restore the "
                "config.json of its run"
            )

    def restore(self, step: int, abstract_state: Any) -> Any:
        """Read a train state with the shardings of `abstract_state`; does not check digests.

        Args:
            abstract_state: tree of jax.ShapeDtypeStruct with shardings.

        Raises:
            CheckpointError: the checkpoint is missing, unreadable, or of another step.
        """
        state = self.read(step, abstract_state)
        inside = int(getattr(state, "step", step))
        if inside != step:
            raise CheckpointError(
                f"{self.path(step)} holds step {inside}: the folder was renamed. Name it "
                f"{self.path(inside)} again"
            )
        return state

    def host_state(self, step: int) -> dict[str, PartState]:
        """Return the host state of a checkpoint: states of parts by name.

        Raises:
            CheckpointError: it is missing, damaged or unreadable.
        """
        if found := self.damage(step, below=HOST_STATE):
            raise self.damaged(step, found)
        try:
            return unpack((self.path(step) / HOST_STATE).read_bytes())
        except READ_ERRORS as error:
            raise CheckpointError(
                f"{self.path(step) / HOST_STATE} cannot be read: {type(error).__name__}: "
                f"{brief(error)}. {self.way_out(step)}"
            ) from error

    def newest_required(self) -> int:
        """Return the step of the newest checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        step = self.newest()
        if step is None:
            raise CheckpointError(
                f"no complete checkpoint in {self.folder}; the run has not saved one yet"
            )
        return step


def load_host_state(workdir: str) -> tuple[int, dict[str, PartState]]:
    """Return step and host state of the newest checkpoint of a run, without changing files.

    Raises:
        CheckpointError: the folder has no readable checkpoint.
    """
    storage = storage_of(workdir)
    folder = storage / FOLDER
    if not folder.is_dir():
        raise CheckpointError(f"{workdir} holds no run: there is no folder {folder}")
    checkpoints = Checkpoints(storage, read_only=True)
    step = checkpoints.newest_required()
    return step, checkpoints.host_state(step)
