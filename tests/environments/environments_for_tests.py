# SPDX-License-Identifier: Apache-2.0
"""Environments that processes of tests import."""

import asyncio
import os
import time

import numpy as np


class Game:
    """Has gym's `step`; the action names its behaviour."""

    def init(self, prompt):
        self.prompt = prompt

    def step(self, text):
        match text:
            case "hang":
                time.sleep(1000)
            case "nap":
                time.sleep(0.3)
            case "die":
                os._exit(3)
            case "raise":
                raise KeyError("no such key")
            case "type":
                return 3, 1.0, False
            case "nan":
                return "", float("nan"), True
        return f"{self.prompt}:{text}", 1.0, text == "end"


class Counter:
    """As TRL wants one."""

    def __init__(self):
        self._n = 0

    def reset(self, start, **row):
        self._n = start
        return f"from {start}"

    def add(self, n: int) -> int:
        """Add n.

        Args:
            n: how much.
        """
        self._n += n
        return self._n

    async def get_reward(self):
        return self._n


LOCK = asyncio.Lock()  # belongs to the event loop of its first use, as a keep-alive client


class Concurrent(Counter):
    """Coroutines of sixteen episodes, with a shared object of asyncio."""

    num_waiting = 0

    async def wait(self) -> str:
        """Wait for the other episodes of this process."""
        Concurrent.num_waiting += 1
        while Concurrent.num_waiting < 16:
            await asyncio.sleep(0.01)
        return str(os.getpid())

    async def get_reward(self):
        async with LOCK:
            await asyncio.sleep(0.01)
        return {0: True, 1: None, 2: np.float32(0.5), 3: np.bool_(True), 4: "much"}[self._n]


class Untyped(Counter):
    def undescribed(self, n):
        return n


class Slow:
    def __init__(self):
        raise OSError("no such server")

    def init(self, prompt): ...

    def step(self, text): ...


def lookup(key: str) -> str:
    """Look up a key.

    Args:
        key: what to look up.
    """
    return {"a": "1"}[key]
