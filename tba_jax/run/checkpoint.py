# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: Orbax saves and restores all state of a step as one atomic unit.

A checkpoint holds the train state (sharded arrays) and the host state: the replay buffer,
the tickets of the owner and the counters. `HostStateHandler` writes the host state into a file
of the same Orbax save. Processes synchronise only through the coordination service of
`jax.distributed`, because the devices may be in use by searchers.

Invariants: a checkpoint is either complete or invisible; no file contains pickled objects; the
restored state is equal to the saved state; only checkpoints of this run are deleted.
"""

import asyncio
import contextlib
import dataclasses
import os
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future as ocp_future
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from tba_jax.devices.sharding import storable
from tba_jax.run.errors import CheckpointError
from tba_jax.run.host_state import HostState, pack, read_facts, unpack
from tba_jax.storage import digests, saves
from tba_jax.storage.steps import brief

KEEP = 2
"""Number of newest checkpoints that stay on disk."""
# Errors that Orbax, TensorStore, numpy and json raise on a damaged or incomplete folder.
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


def _host_file(directory: epath.Path) -> epath.Path:
    return directory / "process_00000.npz"


class Saving(NamedTuple):
    """Processes that save together, and whether this process has the host state.

    Attributes:
        members: process numbers in `jax.distributed`; the first writes shared files.
        keeps_state: whether this process holds the host state.
    """

    members: Sequence[int] = (0,)
    keeps_state: bool = True


class HostStateHandler(ocp.AsyncCheckpointHandler):
    """Orbax handler that writes the host state into a file of the checkpoint folder."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving

    async def async_save(self, directory: epath.Path, args: Any = None) -> Any:
        """Serialise the state, then write it in the background while the caller continues."""
        if not self._saving.keeps_state:
            return []
        data = pack(args.item)

        async def write() -> None:
            _host_file(directory).write_bytes(data)

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


class _Manager(ocp.CheckpointManager):
    """Orbax's manager without Orbax's check for preemption, which needs JAX's preemption service.

    `devices.cluster` turns that service off: the step plan stops all processes together.
    """

    def reached_preemption(self, step: int) -> bool:
        """Return False."""
        del step
        return False


@dataclasses.dataclass
class _KeepNewest(PreservationPolicy):
    """Orbax policy: keep the newest checkpoints, and all folders that the run did not write."""

    folder: epath.Path
    run_id: str
    num: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        del context
        old = len(checkpoints) - self.num
        return [i >= old or not self._is_own(each.step) for i, each in enumerate(checkpoints)]

    def _is_own(self, step: int) -> bool:
        try:
            facts = read_facts(_host_file(self.folder / str(step) / "host_state"))
        except _READ_ERRORS:
            return False
        return facts.run_id == self.run_id


class Checkpoints:
    """The checkpoints of one run, in `folder`.

    Args:
        folder: for example WORKDIR/checkpoints; created if it is missing, unless `read_only`.
        run_id: ID of the run; only its checkpoints are deleted.
        keep: number of newest checkpoints to keep.
        timeout_s: seconds after which an incomplete save counts as failed.
        read_only: True for commands that only read a run.
        processes: processes that save together; None: this process alone.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run_id: str = "",
        keep: int = KEEP,
        timeout_s: int = saves.TIMEOUT_S,
        read_only: bool = False,
        processes: Saving | None = None,
    ) -> None:
        saving = Saving((jax.process_index(),)) if processes is None else processes
        self._folder = epath.Path(os.path.abspath(folder))  # Orbax refuses relative paths
        self._saving: int | None = None
        self._since = time.monotonic()  # Start of the current save.
        self._timeout_s = timeout_s
        named = None if jax.process_count() == 1 else set(saving.members)
        if named is not None and not read_only:
            # Orbax does not create the folder if the processes are named.
            self._folder.mkdir(parents=True, exist_ok=True)
        if not read_only and jax.process_index() == saving.members[0]:
            self._sweep()
        multiprocessing = ocp.options.MultiprocessingOptions(
            primary_host=saving.members[0], active_processes=named
        )
        self._manager = _Manager(
            self._folder,
            item_names=("train_state", "host_state"),
            item_handlers={
                "train_state": ocp.StandardCheckpointHandler(
                    multiprocessing_options=multiprocessing
                ),
                "host_state": HostStateHandler(saving),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_KeepNewest(self._folder, run_id, keep),
                save_interval_steps=0 if read_only else 1,
                create=not read_only and named is None,
                read_only=read_only,
                enable_async_checkpointing=True,
                async_options=saves.in_background(timeout_s, self._list_files),
                multiprocessing_options=multiprocessing,
            ),
        )

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint; None without checkpoints."""
        return self._manager.latest_step()

    def _sweep(self) -> None:
        """Remove unfinished folders of interrupted saves."""
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            final = saves.finished_name(folder.name)
            if final and final.isdigit() and not os.path.islink(folder):
                folder.rmtree()

    def _list_files(self) -> None:
        """Write the digests of all files; process 0 calls this before the commit of the save."""
        digests.write(saves.unfinished(self._folder / str(self._saving)))

    def damage(self, step: int, *, below: str = "", share: tuple[int, int] = (0, 1)) -> list[str]:
        """Return a description of each file of a checkpoint that is missing or changed.

        Args:
            below: prefix of the paths to check, for example "host_state/"; "" checks all files.
            share: (i, n): check only the i-th of n shares of the files.
        """
        return digests.damage(self._folder / str(step), below=below, share=share)

    def damaged(self, step: int, found: Sequence[str]) -> CheckpointError:
        """Return the error for a damaged checkpoint."""
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return CheckpointError(
            f"checkpoint {self._folder / str(step)} is damaged: {found[0]}{more}. "
            f"{self._way_out(step)}"
        )

    def _way_out(self, step: int) -> str:
        older = [s for s in self._manager.all_steps() if s < step]
        if older:
            return f"Move that folder away to continue from checkpoint {max(older)}"
        return "There is no older checkpoint; start again in another work directory"

    def save(self, step: int, train_state: Any, host_state: HostState) -> None:
        """Copy arrays and host state, then write them in the background.

        The copy is in host memory, so the caller may donate the arrays. On CPU no copy is made: JAX
        does not reuse a donated buffer while it is written.

        Raises:
            CheckpointError: this save or the previous save failed.
        """
        self.wait()  # Here the error of the previous save still names its own step.
        self._saving, self._since = step, time.monotonic()
        self._guard(
            lambda: self._manager.save(
                step,
                args=ocp.args.Composite(
                    train_state=ocp.args.StandardSave(storable(train_state)),
                    host_state=HostStateSave(host_state),
                ),
                force=True,
            ),
        )

    def check(self) -> None:
        """Raise the error of a failed background save."""
        self._guard(self._manager.check_for_errors)

    def wait(self) -> None:
        """Block until the current save is complete.

        Raises:
            CheckpointError: the save failed, or takes longer than `timeout_s`.
        """
        self._guard(self._wait)

    def _wait(self) -> None:
        # Orbax limits the time of its barriers, but not of a write to storage that hangs.
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                self._manager.wait_until_finished()
            except BaseException as error:  # Raised again in the calling thread.
                failures.append(error)

        thread = threading.Thread(target=wait, name="checkpoint-wait", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise TimeoutError
        if failures:
            raise failures[0]

    def abandon(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the current save, after the run failed.

        An error of the save is not raised, because the failure of the run is reported. An
        incomplete save stays invisible, and the next start removes it.
        """

        def finish() -> None:
            with contextlib.suppress(CheckpointError):
                self.wait()

        thread = threading.Thread(target=finish, name="last-save", daemon=True)
        thread.start()
        thread.join(timeout_s)

    def _guard(self, action: Callable[[], Any]) -> None:
        # Orbax reports failures of storage as OSError, ValueError (TensorStore) or RuntimeError.
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            # Orbax lists the step of a save as soon as the save begins.
            complete = [step for step in self._manager.all_steps() if step != self._saving]
            where = self._folder / str(self._saving) if self._saving is not None else self._folder
            why = f"{type(error).__name__}: {brief(error)}"
            if isinstance(error, TimeoutError):
                reason = f" ({brief(error)})" if str(error) else ""
                why = f"not complete after {time.monotonic() - self._since:.0f} s{reason}"
            raise CheckpointError(
                f"writing checkpoint {where} failed: {why}. "
                f"Complete checkpoints: {complete or 'none'}. Free space or repair the storage, "
                "then run the same command again to continue from the newest checkpoint"
            ) from error

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
        restored = self._read(
            step,
            ocp.args.Composite(
                train_state=ocp.args.StandardRestore(abstract_state),
                host_state=HostStateRestore(),
            ),
        )
        return step, restored["train_state"], restored["host_state"]

    def restore_host_state(self) -> tuple[int, HostState]:
        """Read the newest host state and check its digests; for commands that inspect a run."""
        step = self._resolve(None)
        if found := self.damage(step, below="host_state/"):
            raise self.damaged(step, found)
        restored = self._read(step, ocp.args.Composite(host_state=HostStateRestore()))
        return step, restored["host_state"]

    def _read(self, step: int, args: ocp.args.Composite) -> Any:
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as error:
            # Orbax raises a bare Exception for a damaged array; the cause is TensorStore's error.
            is_array = type(error) is Exception
            if not is_array and not isinstance(error, _READ_ERRORS):
                raise
            cause = (error.__cause__ if is_array else None) or error
            raise CheckpointError(
                f"checkpoint {self._folder / str(step)} cannot be read: {type(cause).__name__}: "
                f"{brief(cause)}. {self._way_out(step)}"
            ) from error
        inside = restored["host_state"].facts.step
        if inside not in (-1, step):
            raise CheckpointError(
                f"{self._folder / str(step)} holds step {inside}: the folder was renamed. Name it "
                f"{self._folder / str(inside)} again"
            )
        return restored

    def _resolve(self, step: int | None) -> int:
        step = self.latest_step() if step is None else step
        if step is None:
            raise CheckpointError(
                f"no complete checkpoint in {self._folder}; the run has not saved one yet"
            )
        return step

    def close(self) -> None:
        """Wait for the current save, then stop the threads of Orbax."""
        self.wait()
        self._manager.close()


def load_host_state(workdir: str) -> tuple[int, HostState]:
    """Return step and host state of the newest checkpoint of a run, without changing files.

    Raises:
        CheckpointError: the folder has no readable checkpoint.
    """
    folder = epath.Path(workdir) / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"{workdir} holds no run: there is no folder {folder}")
    return Checkpoints(folder, read_only=True).restore_host_state()
