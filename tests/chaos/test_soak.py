# SPDX-License-Identifier: Apache-2.0
"""The soak's arithmetic; the soak itself is a command."""

import os

import numpy as np
from chaos import soak


def test_growth_is_distinguished_from_noise():
    rng = np.random.default_rng(0)
    samples = []
    for i in range(200):
        main = {"rss_mib": 900 + 0.2 * i + rng.normal(0, 3), "threads": 40.0 + i % 3}
        rewards = {"rss_mib": 80 + rng.normal(0, 3), "processes": 2.0}
        samples.append((5.0 * i, {"main": main, "rewards": rewards, "run": {"step": float(i)}}))
    found = soak.fit(samples)
    assert found["grown"] == ["main rss_mib"]
    grows = found["slopes"]["main rss_mib"]
    assert abs(grows["per_hour"] - 144) < 4 * grows["error"] < 20


def test_a_process_is_looked_at():
    found = soak.look(os.getpid())
    assert 20 < found["rss_mib"] < 1e5 and found["threads"] >= 1 and found["descriptors"] > 2


def test_threads_of_saves_are_no_growth_and_a_thread_that_stays_is():
    def samples(base):
        # The run becomes faster, so more looks meet a save: every sixth, then five of six.
        return [
            (5.0 * i, {"main": {"threads": base(i) + 6.0 * (i % 6 < 1 + i // 125)}, "rewards": {}})
            for i in range(600)
        ]

    assert soak.fit(samples(lambda i: 30.0))["grown"] == []
    assert soak.fit(samples(lambda i: 30.0 + i // 200))["grown"] == ["main threads"]
