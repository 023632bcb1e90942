# SPDX-License-Identifier: Apache-2.0
"""The simulated searchers bring what real ones would, and the other side counts it."""

import threading
import time

import numpy as np
import pytest

from tba_jax.bench.fleet import SAMPLES, Trainer, main, make_commits, summary, table
from tba_jax.remote.messages import Heartbeat, JoinRequest, Trace, pack_put, unpack_put


def test_a_put_of_simulated_responses_is_counted_and_trained_on():
    trainer = Trainer(2, step_ms=1.0, core=-1)
    worker = threading.Thread(target=trainer.run, daemon=True)
    worker.start()
    trainer.ready()
    trainer.begin()
    server = trainer.server
    key = server.join(JoinRequest((0, 1), "bench", {})).starts[1].key
    tickets = server.request_tickets(key, 2, 0, Heartbeat()).tickets
    data = pack_put(key, make_commits(1, tickets, 32, np.random.default_rng(0)), Trace())
    assert server.put(*unpack_put(data), num_bytes=len(data)).status == "ok"
    assert server.put(*unpack_put(data)).status == "duplicate"
    deadline = time.monotonic() + 30
    while trainer._searchers[1].outbox.counts[1] and time.monotonic() < deadline:
        time.sleep(0.01)  # the trainer merges at its own pace
    figures = trainer.end()
    trainer.stop()
    worker.join(30.0)
    assert not worker.is_alive()
    assert figures["steps"] > 0 and figures["mb_per_s"] > 0
    assert trainer._searchers[1].outbox.counts == (2 * SAMPLES, 0, 0)


def _window(step_ms: float, mb_per_s: float = 0.0) -> dict[str, float]:
    return {"step_ms": step_ms, "steps": 10, "mb_per_s": mb_per_s, "trainer_cpu_share": 0.5}


def test_a_step_is_compared_with_the_window_beside_it():
    # The machine halves its pace in the middle; puts cost 4 % throughout.
    pairs = [(_window(100.0), _window(104.0, 2.0)), (_window(200.0), _window(208.0, 4.0))]
    row = summary(pairs, latencies=[0.010, 0.030])
    assert row["step_over_free"] == pytest.approx(1.04)
    assert row["step_over_free_range"] == pytest.approx([1.04, 1.04])
    assert row["mb_per_s"] == 3.0 and row["puts"] == 2
    assert row["put_p50_ms"] == pytest.approx(20.0) and row["put_p99_ms"] == pytest.approx(29.8)
    assert "put_p50_ms" not in summary(pairs, [])


def test_the_table_has_a_line_for_each_number():
    row = {"searchers": 1000, **summary([(_window(100.0), _window(104.0))], []), "late": 0}
    result = {"responses": 128, "tokens": 512, "period_s": 60.0, "rows": [row]}
    lines = list(table(result))
    assert len(lines) == 3 and lines[2].split()[:3] == ["1000", "104.0", "1.040"]


def test_numbers_that_are_none_are_one_line(capsys):
    assert main(["--searchers=many"]) == 1
    assert "--searchers=many: not a list of numbers" in capsys.readouterr().err
