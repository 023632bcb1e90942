# SPDX-License-Identifier: Apache-2.0
"""The main command, with searchers as slow as machines of their own would be, on a small machine.

    python -m tba_jax.bench.slow_searchers CHUNK_MS [ARGUMENTS OF tba_jax.main]

A chunk of decode steps takes each searcher so many milliseconds at least; what it does not need to
compute it sleeps. Many searchers then are as fast as many, although they share the cores of one.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.main import cli
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    ContinuousSearch.step = slowed(ContinuousSearch.step, float(argv[0]) / 1e3)
    return cli(["tba_jax.main", *argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
