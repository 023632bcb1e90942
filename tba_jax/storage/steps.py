# SPDX-License-Identifier: Apache-2.0
"""Numbered folders that Orbax writes: checkpoints and published weights.

A folder is complete or invisible, and has the digests of its files and the ID of its run.
Invariant: only folders of this run are deleted (tests/storage/test_saved_steps.py).
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from tba_jax.storage import digests
from tba_jax.storage.whole_files import is_address

FolderWriter = Callable[[epath.Path], Any]
NUM_KEPT = 2  # newest folders that stay in storage
TIMEOUT_S = 600  # seconds after which an incomplete save counts as failed
_UNFINISHED = ".orbax-checkpoint-tmp"
_DELETED = "00" + _UNFINISHED  # old folders are moved here first: no kill leaves half of one


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which also removes what it moves to `_DELETED`."""

    def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
        super()._finalize(step, steps_to_remove)
        if jax.process_index() == self._multiprocessing_options.primary_host:
            (self.directory / _DELETED).rmtree(missing_ok=True)


class SavedSteps:
    """Folders of one run, named by their steps; each has one tree of arrays, and small files.

    Args:
        folder: for example WORKDIR/checkpoints; created if it is missing, unless `read_only`.
        item: name of the tree of arrays in a folder.
        error: class of the exceptions.
        members: numbers in `jax.distributed` of the processes that save and restore together; the
            first writes shared files. None: this process alone.
        wanted: returns steps that stay in addition to the newest ones.
        before_commit: called in the first process before a folder becomes complete.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        item: str,
        *,
        error: type[Exception],
        run_id: str = "",
        members: Sequence[int] | None = None,
        read_only: bool = False,
        wanted: Callable[[], Collection[int]] = tuple,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        folder = epath.Path(folder)  # Orbax needs an absolute path
        self.folder = folder if is_address(folder) else epath.Path(os.path.abspath(folder))
        self._item, self._error = item, error
        self.run_id, self._wanted, self._before_commit = run_id, wanted, before_commit
        self._write_files: FolderWriter = lambda folder: None
        self._saving: int | None = None
        members = (jax.process_index(),) if members is None else members
        if not read_only and jax.process_index() == members[0]:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in _children(self.folder):  # remove what interrupted saves left
                name, is_unfinished, _ = path.name.partition(_UNFINISHED)
                if is_unfinished and name.isdigit():
                    path.rmtree()
        processes = ocp.options.MultiprocessingOptions(
            primary_host=members[0],
            active_processes=None if jax.process_count() == 1 else set(members),
            barrier_sync_key_prefix=f"{self.folder.name}_{members[0]}",
        )
        self._manager = _Manager(
            self.folder,
            item_handlers={item: ocp.StandardCheckpointHandler(multiprocessing_options=processes)},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self,
                save_interval_steps=0 if read_only else 1,
                create=False,
                read_only=read_only,
                todelete_subdir=None if read_only else _DELETED,
                async_options=ocp.options.AsyncOptions(
                    timeout_secs=TIMEOUT_S,
                    post_finalization_callback=self._finish_files,
                    # Orbax 0.12 lets a background save wait for the number of the newest save of
                    # the process: of two saves that begin at the same time, one would wait forever.
                    create_directories_asynchronously=False,
                ),
                multiprocessing_options=processes,
            ),
        )

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Return which folders Orbax keeps: the newest, `wanted` ones, and those of other runs."""
        steps = [each.step for each in checkpoints]
        kept = {*steps[-NUM_KEPT:], *self._wanted()}
        return [x in kept or digests.run_of(self.path(x)) != self.run_id for x in steps]

    def _finish_files(self) -> None:
        """Write small files and digests, in the first process before Orbax commits the folder."""
        final = self.path(self._saving or 0)
        writing = final.with_name(final.name + _UNFINISHED)
        folder = writing if writing.exists() else final  # objects have their final names at once
        self._write_files(folder)
        self._before_commit()
        digests.write(folder, self.run_id)

    def path(self, step: int) -> epath.Path:
        """Return the folder of a step."""
        return self.folder / str(step)

    def newest(self) -> int | None:
        """Return the newest step, if any."""
        return max(self._manager.all_steps(), default=None)

    def damage(self, step: int, *, below: str = "", share: tuple[int, int] = (0, 1)) -> list[str]:
        """Return a description of each missing or changed file; arguments of `digests.damage`."""
        return digests.damage(self.path(step), below=below, share=share)

    def write(self, step: int, tree: Any, write_files: FolderWriter = lambda folder: None) -> None:
        """Wait for the previous save, copy the tree, then write it in the background.

        Args:
            tree: may be changed or donated when this returns.
            write_files: writes small files into a folder, in the first process's background.

        Raises:
            error: this save or the previous save failed.
        """
        self.wait()  # here the error of the previous save still names its own step
        self._saving, self._write_files = step, write_files
        tree = jax.tree.map(_storable, tree)
        args = ocp.args.Composite(**{self._item: ocp.args.StandardSave(tree)})
        with self._write_errors():
            self._manager.save(step, args=args, force=True)

    def check(self) -> None:
        """Raise the error of a failed background save."""
        with self._write_errors():
            self._manager.check_for_errors()

    def wait(self, timeout_s: float = TIMEOUT_S) -> None:
        """Block until the current save is complete; raise `error` if it fails or takes longer."""
        deadline = time.monotonic() + timeout_s
        with self._write_errors():
            # Orbax limits the time of its barriers, but not of a write to storage that hangs.
            while self._manager.is_saving_in_progress():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete after {timeout_s:.0f} s")
                time.sleep(0.01)
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        # Orbax reports failures of storage as OSError, ValueError (TensorStore) or RuntimeError.
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            complete = [step for step in self._manager.all_steps() if step != self._saving]
            where = self.folder if self._saving is None else self.path(self._saving)
            raise self._error(
                f"writing {where} failed: {_brief(error)}. Complete {self.folder.name}: "
                f"{complete or 'none'}. Free space or repair the storage, then run the same "
                "command again to continue from the newest checkpoint"
            ) from error

    def read(self, step: int, abstract: Any) -> Any:
        """Read the tree of a step; does not check digests.

        Args:
            abstract: the tree with jax.ShapeDtypeStruct or numpy arrays as leaves.
        """
        args = ocp.args.Composite(**{self._item: ocp.args.StandardRestore(abstract)})
        try:
            return self._manager.restore(step, args=args)[self._item]
        except Exception as error:  # broad: damaged files raise errors of Orbax, json and others
            # Orbax raises a bare Exception for a damaged array; the cause is TensorStore's error.
            cause = error.__cause__ if type(error) is Exception and error.__cause__ else error
            why = f"cannot be read: {_brief(cause)}"
            raise self._error(f"{self.path(step)} {why}. {self._way_out(step)}") from error

    def damaged(self, step: int, found: Sequence[str]) -> Exception:
        """Return the error for a folder with damaged files, as `damage` describes them."""
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return self._error(f"{self.path(step)} is damaged: {found[0]}{more}. {self._way_out(step)}")

    def _way_out(self, step: int) -> str:
        if older := [s for s in self._manager.all_steps() if s < step]:
            return f"Move that folder away to continue from {self.path(max(older))}"
        return "There is no older one; start again in another work directory"

    def close(self) -> None:
        """Wait for the current save, then stop the threads of Orbax."""
        self.wait()
        self._manager.close()


def delete_own(folder: epath.Path, run_id: str) -> None:
    """Delete the numbered folders that a run wrote; called before their `SavedSteps` is opened."""
    for path in _children(folder):
        if path.name.isdigit() and digests.run_of(path) == run_id:
            doomed = path if is_address(path) else path.rename(f"{path}{_UNFINISHED}-old")
            doomed.rmtree()  # after a kill here `SavedSteps` removes the rest


def _storable(x: Any) -> Any:
    """Return a leaf for Orbax: with several processes, an array of this process becomes numpy."""
    is_own = isinstance(x, jax.Array) and x.is_fully_addressable
    return np.asarray(x) if is_own and jax.process_count() > 1 else x


def _children(folder: epath.Path) -> list[epath.Path]:
    """Return what a folder holds except links; nothing if an object store has no such folder."""
    return [x for x in folder.iterdir() if not os.path.islink(x)] if folder.is_dir() else []


def _brief(error: BaseException) -> str:
    """Return type and first line of an error, shortened in the middle: causes come last."""
    line = (str(error).splitlines() or ["(no message)"])[0].split(" [tensorstore_spec=")[0]
    return f"{type(error).__name__}: {line[:150]}{' ... ' * (len(line) > 390)}{line[150:][-240:]}"
