# SPDX-License-Identifier: Apache-2.0
"""Options of Orbax's asynchronous saves, and the names of folders that are not complete yet.

Orbax 0.12.0 creates the directories of an asynchronous save in the background. Its writes wait for
a signal that has the number of the newest save of the process. If a version of the weights and a
checkpoint begin at the same time, a write waits for a signal that is never sent, and fails after
five minutes. Invariant: the directories of a save exist before `save` returns, so no write waits
for a signal (tests/storage/test_saves.py).

Orbax gives the unfinished folder of a step the same name in every process. If a process is
suspended during a save and replaced, it would later write into the folder of its successor.
Invariant: a writer changes no unfinished folder of another writer (tests/run/test_checkpoint.py).

When one array cannot be written, Orbax closes the event loop of the save while the other arrays are
still being written. Each of these writes then prints a traceback. Invariant: the loop of a save is
closed after all its writes have ended (tests/storage/test_saves.py).
"""

import asyncio
import copy
import errno
import functools
import os
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

_UNFINISHED = ".orbax-checkpoint-tmp"
_LAST_WRITES_S = 30.0  # a failed save waits so long for its other writes


def tree_handler(
    processes: ocp.options.MultiprocessingOptions,
) -> ocp.StandardCheckpointHandler:
    """Return Orbax's handler of a tree of arrays, with saves that end after their last write."""
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=processes)
    kinds = (int, float, np.number, np.ndarray, jax.Array)
    arrays = [(kind, _ending_writes(ocp.type_handlers.get_type_handler(kind))) for kind in kinds]
    # StandardCheckpointHandler has no argument for the handlers of its arrays.
    handler._impl = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=processes,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(*arrays),
    )
    return handler


def _ending_writes(arrays: ocp.type_handlers.TypeHandler) -> ocp.type_handlers.TypeHandler:
    """Return a copy of a type handler whose event loop is closed after its last write."""
    arrays = copy.copy(arrays)
    serialize = arrays.serialize

    async def serialize_all(values: Any, infos: Any, args: Any = None) -> Any:
        for info in infos:
            # Orbax awaits this in the event loop of the writes, before the first of them.
            info.await_path_creation = functools.partial(_watch, info.await_path_creation)
        return await serialize(values, infos, args)

    arrays.serialize = serialize_all
    return arrays


async def _watch(path_exists: Callable[[], Any]) -> Any:
    _close_after_writes(asyncio.get_running_loop())
    return await path_exists()


def _close_after_writes(loop: Any) -> None:
    if "close" in vars(loop):
        return
    close = loop.close

    def close_after_writes() -> None:
        writes = asyncio.all_tasks(loop)
        if writes and not loop.is_closed():
            ended = asyncio.wait(writes, timeout=_LAST_WRITES_S)
            for write in loop.run_until_complete(ended)[0]:
                # The first error of the save has been reported; asyncio logs errors that none read.
                if not write.cancelled():
                    write.exception()
        close()

    loop.close = close_after_writes


def in_background(
    timeout_s: int, finished: Callable[[], None] | None = None
) -> ocp.options.AsyncOptions:
    """Return options of a save that continues after `save` has returned.

    Args:
        timeout_s: longest time that the processes of a save wait for each other, in seconds.
        finished: called when all files are written, before the save becomes visible.
    """
    return ocp.options.AsyncOptions(
        timeout_secs=timeout_s,
        post_finalization_callback=finished,
        create_directories_asynchronously=False,
    )


def finished_name(name: str) -> str | None:
    """Return the final name of an unfinished folder of Orbax; None for any other name."""
    final, is_unfinished, _ = name.partition(_UNFINISHED)
    return final if is_unfinished else None


def has_writer(name: str) -> bool:
    """Return whether the name of an unfinished folder has the suffix of a `Writer`."""
    return re.search(rf"{_UNFINISHED}-[0-9a-f]{{16}}$", name) is not None


def remove(unfinished: epath.Path, patience_s: float = 2.0) -> None:
    """Delete an unfinished folder; give up after `patience_s` if other writers keep adding files.

    Writes of a failed save may end later than the save, and a replaced process may still write.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return unfinished.rmtree(missing_ok=True)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
        if time.monotonic() > end:
            return
        time.sleep(0.05)


class Writer:
    """Names of the unfinished folders of saves, and their deletion after a failed save.

    In a job of several processes, all processes write into the same unfinished folder, so its name
    has no random part.

    Args:
        folder: parent of the complete folders.
        confirm: raises an error if this process may no longer write to `folder`; called before an
            unfinished folder is created and before it becomes visible.
    """

    def __init__(self, folder: epath.PathLike, confirm: Callable[[], None]) -> None:
        self._folder, self._confirm = epath.Path(folder), confirm
        owner = "" if jax.process_count() > 1 else f"-{secrets.token_hex(8)}"
        self._suffix = _UNFINISHED + owner

    def unfinished(self, final_path: epath.Path) -> epath.Path:
        """Return the path of a folder while it is being written."""
        return final_path.with_name(final_path.name + self._suffix)

    @property
    def temporary_path_class(self) -> type[ocp.path.atomicity.AtomicRenameTemporaryPath] | None:
        """Value of Orbax's option `temporary_path_class`; None in an object store."""
        if "://" in str(self._folder):
            return None
        unfinished, confirm = self.unfinished, self._confirm

        class Unfinished(ocp.path.atomicity.AtomicRenameTemporaryPath):
            @classmethod
            def from_final(cls, final_path: epath.Path, **options: Any) -> "Unfinished":
                return cls(unfinished(final_path), final_path, **options)

            async def create(self) -> epath.Path:
                confirm()
                return await super().create()

            async def finalize(self) -> None:
                confirm()
                await super().finalize()

        return Unfinished

    def remove_unfinished(self, watch_s: float = 1.0) -> None:
        """Delete the unfinished folders of this writer after a save that failed.

        TensorStore creates a folder again for a write that ends later than the save. This method
        therefore looks for such folders for `watch_s` seconds.
        """
        end = time.monotonic() + watch_s
        while has_writer(self._suffix) and time.monotonic() < end:
            for path in self._folder.iterdir():
                if path.name.endswith(self._suffix) and not os.path.islink(path):
                    remove(path)
            time.sleep(0.1)
