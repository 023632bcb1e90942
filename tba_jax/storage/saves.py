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
"""

import errno
import os
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

_UNFINISHED = ".orbax-checkpoint-tmp"


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
    """Names the unfinished folders of saves, and deletes them after a failed save.

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
