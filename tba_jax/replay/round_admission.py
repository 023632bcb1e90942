# SPDX-License-Identifier: Apache-2.0
"""RoundAdmission: rounds that searchers in other processes may start with driver=sync."""

import threading
from collections.abc import Mapping, Sequence


class RoundAdmission:
    """Admits a number of rounds of each searcher, with the weights of one version.

    Args:
        searchers: IDs of the searchers.
    """

    def __init__(self, searchers: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self._left = dict.fromkeys(searchers, 0)
        self._open = dict.fromkeys(searchers, 0)
        self._version = -1

    def allow(self, rounds: Mapping[int, int], version: int) -> None:
        """Let searchers start more rounds.

        Args:
            rounds: how many, by searcher ID.
            version: version of the weights that all of them sample with.
        """
        with self._lock:
            self._version = version
            for searcher, count in rounds.items():
                self._left[searcher] += count

    def admit(self, searcher: int, version: int) -> bool:
        """Return whether this searcher may start a round with weights of this version."""
        with self._lock:
            if version != self._version or not self._left[searcher]:
                return False
            self._left[searcher] -= 1
            self._open[searcher] += 1
            return True

    def commit(self, searcher: int, latency_s: float, version: int) -> None:
        """Count a round as finished."""
        del latency_s, version
        with self._lock:
            self._open[searcher] -= 1

    def set_open(self, searcher: int, versions: Sequence[int]) -> None:
        """Set the open rounds of a searcher; its other started rounds may start again."""
        with self._lock:
            self._left[searcher] += self._open[searcher] - len(versions)
            self._open[searcher] = len(versions)
