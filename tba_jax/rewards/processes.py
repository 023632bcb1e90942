# SPDX-License-Identifier: Apache-2.0
"""Start of a process that runs user code: a reward function or an environment."""

import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time

from tba_jax.rewards import containment, output


def enter_process(folder: str, parent: int, groups: str, max_memory_bytes: int) -> None:
    """Prepare a new process for user code; the process ends when its parent ends.

    Args:
        folder: folder from which user modules can be imported.
        groups: folder of `containment.Groups` and of `output.Output`.
        max_memory_bytes: memory limit; 0: no limit.
    """
    output.redirect(groups)
    containment.enter(groups, max_memory_bytes)

    def exit_with_parent() -> None:
        # A parent that was killed cannot stop a process that hangs in user code.
        # The parent of a process that a fork server started is not the process that it serves.
        served = multiprocessing.parent_process()
        while os.getppid() == parent and (served is None or served.is_alive()):
            time.sleep(1.0)
        containment.leave(groups)

    # atexit would not run this: multiprocessing leaves without its functions.
    multiprocessing.util.Finalize(None, containment.end, (groups, parent), exitpriority=0)
    threading.Thread(target=exit_with_parent, name="exit-with-parent", daemon=True).start()
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's file must not hide a module of the library
