# SPDX-License-Identifier: Apache-2.0
"""Options for asynchronous saves of Orbax, while a checkpoint and weights are saved concurrently.

Orbax 0.12.0 creates the directories of an asynchronous save in the background. Its writes wait for
a signal under the number of the newest save of the process. If a version of the weights and a
checkpoint begin concurrently, a write waits for a signal that is never sent, and fails after five
minutes. Invariant: the directories of a save exist before `save` returns, so that no write waits
for a signal (tests/storage/test_saves.py).
"""

from collections.abc import Callable

import orbax.checkpoint as ocp


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
