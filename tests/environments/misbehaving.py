# SPDX-License-Identifier: Apache-2.0
"""An environment of a run that fails in a way that the prompt decides."""

import os
import time

WAYS = ("hang", "crash", "raise", "type", "flood", "nan", "good", "good")


class Misbehaving:
    """Gym-like."""

    def init(self, prompt):
        self.way = WAYS[sum(map(ord, prompt)) % len(WAYS)]

    def step(self, text):
        match self.way:
            case "hang":
                time.sleep(1000)
            case "crash":
                os._exit(3)
            case "raise":
                raise KeyError("no such key")
            case "type":
                return 3, 1.0, False
            case "flood":
                return "x" * 10**7, 1.0, False
            case "nan":
                return "", float("nan"), True
        return "", float(len(text) % 2), True
