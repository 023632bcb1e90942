# SPDX-License-Identifier: Apache-2.0
"""The main command, with searchers as slow as machines of their own would be, on a small machine.

    python -m tba_jax.bench.slow_searchers CHUNK_MS [ARGUMENTS OF tba_jax.main]

A chunk of decode steps takes each searcher so many milliseconds at least; what it does not need to
compute it sleeps. Many searchers then are as fast as many, although they share the cores of one.
"""

import functools
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

from tba_jax.search.continuous import ContinuousSearch


def slowed(step: Callable[..., bool], chunk_s: float) -> Callable[..., bool]:
    """A searcher's step that takes so many seconds at least, where there was something to do."""

    @functools.wraps(step)
    def slow(*args: Any) -> bool:
        start = time.perf_counter()
        did = step(*args)
        if did:
            time.sleep(max(0.0, chunk_s - (time.perf_counter() - start)))
        return did

    return slow


def main() -> None:
    """Run the command, in this process and as its own."""
    ContinuousSearch.step = slowed(ContinuousSearch.step, float(sys.argv.pop(1)) / 1e3)
    runpy.run_module("tba_jax.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
