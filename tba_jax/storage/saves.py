# SPDX-License-Identifier: Apache-2.0
"""How Orbax saves in the background here, where checkpoints and versions are saved at once.

Orbax (0.12.0) makes the directories of an asynchronous save behind its back: writes wait for a
signal under the number of the newest save of the process, whoever began it. When a version of the
weights is begun between the lines of a checkpoint, or the other way round, a write waits for a
signal that nobody sends, five minutes, and fails. Invariant: no save of this project waits for a
signal; its directories exist before `save` returns.
"""

from collections.abc import Callable

import orbax.checkpoint as ocp


def in_background(
    timeout_s: int, finished: Callable[[], None] | None = None
) -> ocp.options.AsyncOptions:
    """Options of a save that goes on after `save` has returned.

    Args:
        timeout_s: of what Orbax's processes wait for one another.
        finished: called when all is written, before it is visible.
    """
    return ocp.options.AsyncOptions(
        timeout_secs=timeout_s,
        post_finalization_callback=finished,
        create_directories_asynchronously=False,
    )
