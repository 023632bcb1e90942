# SPDX-License-Identifier: Apache-2.0
"""The benchmark measures the buffer it says it measures."""

import json

import pytest

from tba_jax.bench import replay_buffer as bench
from tba_jax.replay.store import RESPONSE_OVERHEAD_BYTES


@pytest.mark.slow
def test_figures_of_a_small_buffer(capsys):
    assert bench.main(["--num_trajectories=10000", "--mean_tokens=32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["num_trajectories"], result["num_prompts"]) == (10_000, 100)
    assert abs(result["mean_tokens"] - 32) < 1
    # 24 prompt tokens and the prompt's text add about one byte per response.
    per_response = result["bytes_per_token_counted"] * result["mean_tokens"]
    assert 0 < per_response - 8 * result["mean_tokens"] - RESPONSE_OVERHEAD_BYTES < 1.2
    assert 0 < result["draw_cpu_ms"] < 1000
    assert list(result["insert_us"]) == ["10000"]
    # Growth of a process that has freed memory to reuse says nothing at this size.
    assert result["bytes_per_token"] >= 0


def test_too_small_a_buffer_is_refused():
    with pytest.raises(SystemExit):
        bench.main(["--num_trajectories=100"])
