# SPDX-License-Identifier: Apache-2.0
"""The simulated searchers bring what real ones would, and the other side counts it."""

import threading
import time

import numpy as np
import pytest

from tba_jax.bench.fleet import SAMPLES, Trainer, main, make_commits, table
from tba_jax.run.fleet.messages import Hello, Vitals, encode


def test_a_put_of_simulated_responses_is_counted_and_trained_on():
    trainer = Trainer(2, step_ms=1.0, core=-1)
    worker = threading.Thread(target=trainer.run, daemon=True)
    worker.start()
    trainer.ready()
    trainer.begin()
    welcome, _ = trainer.join(Hello((0, 1), "bench", {}))
    caller = welcome.seats[1].caller
    tickets = trainer.assign(caller, 2, 0, Vitals()).tickets
    data = encode(make_commits(1, tickets, 32, np.random.default_rng(0)))
    assert trainer.put(caller, data).verdict == "ok"
    assert trainer.put(caller, data).verdict == "duplicate"
    deadline = time.monotonic() + 30
    while trainer._outboxes[1].counts[1] and time.monotonic() < deadline:
        time.sleep(0.01)  # the trainer merges at its own pace
    figures = trainer.end()
    worker.join(30.0)
    assert not worker.is_alive()
    assert figures["steps"] > 0 and figures["mb_per_s"] > 0
    assert trainer._outboxes[1].counts == (2 * SAMPLES, 0, 0)


def test_the_table_has_a_line_for_each_number():
    row = {"searchers": 1000, "step_ms": 100.0, "mb_per_s": 9.5, "trainer_cpu_share": 0.5}
    result = {"responses": 128, "tokens": 512, "period_s": 60.0}
    lines = list(table({**result, "rows": [{**row, "puts": 7, "late": 0}]}))
    assert len(lines) == 3 and lines[2].split()[:2] == ["1000", "100.0"]


def test_numbers_that_are_none_are_one_line(capsys):
    pytest.importorskip("ray", reason="a fleet needs the extra `fleet`")
    assert main(["--searchers=many"]) == 1
    assert "--searchers=many: wanted numbers with commas" in capsys.readouterr().err
