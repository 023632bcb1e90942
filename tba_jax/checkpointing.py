# SPDX-License-Identifier: Apache-2.0
"""Orbax save and restore of everything that is state, as one atomic unit per step.

A checkpoint holds the train state (arrays, sharded) and the host state: the replay buffer, the
outboxes, the prompt streams, the counters. Plain Orbax items keep only process 0's host content, so
host state goes through `HostStateHandler`: one file per process inside the same composite save.
This module does not know what the states mean. It owns the invariant that a checkpoint is either
complete or invisible, and that nothing on disk is pickled.
"""

import asyncio
import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import future as ocp_future

# Name -> (flat arrays, JSON-compatible metadata).
HostState = Mapping[str, tuple[Mapping[str, np.ndarray], Any]]

_META_KEY = "__meta__"

# What Orbax, TensorStore, numpy and json raise on a damaged or incomplete folder.
_READ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which and what to do."""


def pack_host_state(state: HostState) -> bytes:
    """Serialise host state to npz bytes: arrays as `name/key`, metadata as one JSON entry."""
    arrays: dict[str, np.ndarray] = {}
    for name, (fields, _) in state.items():
        for key, value in fields.items():
            arrays[f"{name}/{key}"] = np.asarray(value)
    meta = json.dumps({name: meta for name, (_, meta) in state.items()})
    arrays[_META_KEY] = np.frombuffer(meta.encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def unpack_host_state(data: bytes) -> dict[str, tuple[dict[str, np.ndarray], Any]]:
    """Inverse of `pack_host_state`.

    Raises:
        ValueError, KeyError, OSError, zipfile.BadZipFile: when the bytes are not intact.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        metas = json.loads(arrays[_META_KEY].tobytes().decode())
        out: dict[str, tuple[dict[str, np.ndarray], Any]] = {
            name: ({}, meta) for name, meta in metas.items()
        }
        for full_key in arrays.files:
            if full_key != _META_KEY:
                name, key = full_key.split("/", 1)
                out[name][0][key] = arrays[full_key]
    return out


def _host_file(directory: epath.Path, process: int) -> epath.Path:
    return directory / f"process_{process:05d}.npz"


class HostStateHandler(ocp.AsyncCheckpointHandler):
    """Writes each process's host state into its own file of the shared checkpoint folder."""

    async def async_save(self, directory: epath.Path, args: Any = None) -> Any:
        """Serialise now (the caller may go on changing its state), write in the background."""
        data = pack_host_state(args.item)

        async def write() -> None:
            _host_file(directory, jax.process_index()).write_bytes(data)

        return [ocp_future.CommitFutureAwaitingContractedSignals(write(), name="host_state")]

    def save(self, directory: epath.Path, args: Any = None) -> None:
        """Blocking form of `async_save`."""

        async def run() -> None:
            for commit in await self.async_save(directory, args):
                commit.result()

        asyncio.run(run())

    def restore(self, directory: epath.Path, args: Any = None) -> Any:
        """This process's host state.

        Raises:
            FileNotFoundError: when the checkpoint holds no file of this process.
        """
        del args
        return unpack_host_state(_host_file(directory, jax.process_index()).read_bytes())


@ocp.args.register_with_handler(HostStateHandler, for_save=True)
@dataclasses.dataclass
class HostStateSave(ocp.args.CheckpointArgs):
    """What to save: a HostState."""

    item: Any


@ocp.args.register_with_handler(HostStateHandler, for_restore=True)
@dataclasses.dataclass
class HostStateRestore(ocp.args.CheckpointArgs):
    """Restore needs no arguments; Orbax wants a class."""

    item: Any = None


class Checkpoints:
    """The checkpoints of one run under `folder`.

    Args:
        folder: e.g. WORKDIR/checkpoints; created when absent unless `read_only`.
        keep: newest checkpoints kept.
        read_only: for commands that look at a run without writing to it.
    """

    def __init__(self, folder: str | epath.Path, *, keep: int = 1, read_only: bool = False) -> None:
        self._folder = epath.Path(folder)
        if read_only:
            # Orbax warns about what read-only was asked for.
            logging.set_verbosity(logging.ERROR)
        self._manager = ocp.CheckpointManager(
            self._folder,
            item_names=("train_state", "host_state"),
            item_handlers={
                "train_state": ocp.StandardCheckpointHandler(),
                "host_state": HostStateHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=not read_only,
                read_only=read_only,
                enable_async_checkpointing=True,
            ),
        )

    def latest_step(self) -> int | None:
        """Newest complete checkpoint, None when there is none."""
        return self._manager.latest_step()

    def save(self, step: int, train_state: Any, host_state: HostState) -> None:
        """Start an asynchronous save; arrays and host state are copied before it returns.

        Raises:
            CheckpointError: when this save, or the one before it, failed.
        """
        self._guard(
            f"writing checkpoint {self._folder / str(step)}",
            lambda: self._manager.save(
                step,
                args=ocp.args.Composite(
                    train_state=ocp.args.StandardSave(train_state),
                    host_state=HostStateSave(host_state),
                ),
                force=True,
            ),
        )

    def check(self) -> None:
        """Raise the error of a background save, if there is one."""
        self._guard(f"writing a checkpoint in {self._folder}", self._manager.check_for_errors)

    def wait(self) -> None:
        """Block until the save under way is complete."""
        self._guard(f"writing a checkpoint in {self._folder}", self._manager.wait_until_finished)

    def _guard(self, what: str, action: Callable[[], Any]) -> None:
        # Orbax reports storage trouble as OSError, ValueError (TensorStore) or RuntimeError.
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            complete = self._manager.all_steps()
            raise CheckpointError(
                f"{what} failed: {type(error).__name__}: {_first_line(error)}. "
                f"Complete checkpoints kept: {list(complete) or 'none'}. Make room or fix the "
                "storage, then run the same command again to continue from the newest one"
            ) from error

    def restore(
        self, abstract_state: Any, step: int | None = None
    ) -> tuple[int, Any, dict[str, tuple[dict[str, np.ndarray], Any]]]:
        """Newest (or given) checkpoint, placed as `abstract_state` says.

        Args:
            abstract_state: tree of jax.ShapeDtypeStruct with shardings.
            step: which; None: the newest.

        Returns:
            step, train state, host state of this process.

        Raises:
            CheckpointError: no checkpoint, or an unreadable one; it is left as it is.
        """
        step = self._resolve(step)
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    train_state=ocp.args.StandardRestore(abstract_state),
                    host_state=HostStateRestore(),
                ),
            )
        except _READ_ERRORS as error:
            raise self._unreadable(step, error) from error
        return step, restored["train_state"], restored["host_state"]

    def restore_host_state(
        self, step: int | None = None
    ) -> tuple[int, dict[str, tuple[dict[str, np.ndarray], Any]]]:
        """Only the host state of this process: what the inspection commands need."""
        step = self._resolve(step)
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(host_state=HostStateRestore())
            )
        except _READ_ERRORS as error:
            raise self._unreadable(step, error) from error
        return step, restored["host_state"]

    def _resolve(self, step: int | None) -> int:
        step = self.latest_step() if step is None else step
        if step is None:
            raise CheckpointError(
                f"no complete checkpoint in {self._folder}; the run has not saved one yet"
            )
        return step

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        older = [s for s in self._manager.all_steps() if s < step]
        way_out = (
            f"Move that folder away to continue from checkpoint {max(older)}"
            if older
            else "There is no older one; start again in another work directory"
        )
        return CheckpointError(
            f"checkpoint {self._folder / str(step)} cannot be read: {type(error).__name__}: "
            f"{_first_line(error)}. {way_out}"
        )

    def close(self) -> None:
        """Wait for the save under way, then release threads."""
        self.wait()
        self._manager.close()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "(no message)"


def load_host_state(workdir: str) -> tuple[int, dict[str, tuple[dict[str, np.ndarray], Any]]]:
    """Step and host state of a run's newest checkpoint, without touching the run.

    Raises:
        CheckpointError: when the folder holds no readable checkpoint.
    """
    folder = epath.Path(workdir) / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"{workdir} holds no run: there is no folder {folder}")
    return Checkpoints(folder, read_only=True).restore_host_state()
