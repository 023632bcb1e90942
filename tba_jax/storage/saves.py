# SPDX-License-Identifier: Apache-2.0
"""Options of Orbax's asynchronous saves, and the names of folders that are not complete yet.

Orbax 0.12.0 creates the directories of an asynchronous save in the background. Its writes wait for
a signal that has the number of the newest save of the process. If a version of the weights and a
checkpoint begin at the same time, a write waits for a signal that is never sent, and fails after
five minutes. Invariant: the directories of a save exist before `save` returns, so no write waits
for a signal (tests/storage/test_steps.py).
"""

from collections.abc import Callable

import orbax.checkpoint as ocp
from etils import epath

_UNFINISHED = ".orbax-checkpoint-tmp"
TIMEOUT_S = 600
"""Time in seconds after which an incomplete save counts as failed."""


def in_background(
    timeout_s: int = TIMEOUT_S, finished: Callable[[], None] | None = None
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


def unfinished(final_path: epath.Path) -> epath.Path:
    """Return the path of a folder of Orbax while it is being written."""
    return final_path.with_name(final_path.name + _UNFINISHED)


def finished_name(name: str) -> str | None:
    """Return the final name of an unfinished folder of Orbax; None for any other name."""
    final, is_unfinished, _ = name.partition(_UNFINISHED)
    return final if is_unfinished else None
