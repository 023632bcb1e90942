# SPDX-License-Identifier: Apache-2.0
"""Hangs with an environment that hangs; prints the process ID of the environment."""

import sys
import time

from tba_jax.environments.pool import EnvironmentPool

if __name__ == "__main__":
    pool = EnvironmentPool(sys.argv[1], timeout_s=200.0)
    environment = pool.open()
    environment.begin({"prompt": "p"})
    while environment.poll() is None:
        time.sleep(0.01)
    environment.turn("hang")
    print(pool.workers.pids[0], flush=True)
    time.sleep(200)
