# SPDX-License-Identifier: Apache-2.0
"""Counters of tensorstore, which nobody reads here and which are never freed.

Orbax asks tensorstore for its counters at every save and every read, for a line in a log. What
tensorstore (0.1.76 to 0.1.86) makes of JSON for Python stays in memory for ever: of these answers
up to 50 kB for each version of weights, five gigabytes in 100,000 publications. (Of the specs of
arrays 0.2 kB each: these Orbax needs.) Invariant: after `leave_out` no such answer is made.
"""

from typing import Any

import tensorstore


def leave_out() -> None:
    """Let tensorstore answer that it has counted nothing; call it before the first save or read."""
    tensorstore.experimental_collect_matching_metrics = _nothing


def _nothing(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    del args, kwargs
    return []
