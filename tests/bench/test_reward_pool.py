# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the reward pool, small by default and whole with -m slow."""

import json

import pytest

pytest.importorskip("math_verify", reason="math-verify is not installed")
from tba_jax.bench import reward_pool


def test_sound_answers_get_their_verdicts(capsys):
    assert reward_pool.main(["--num_items=60", "--num_faults=0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["num_faults"] == result["reasons"] == {}
    assert result["num_lost"] == result["num_scored_faults"] == result["num_wrong"] == 0
    assert min(result["items_per_s"], result["items_per_s_with_faults"]) > 0


@pytest.mark.slow
def test_rates_by_processes_and_threads(capsys):
    assert reward_pool.main(["--num_items=250", "--scaling", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["scaling"]
    found = [(row["reward"], row["num_workers"], row["num_threads"]) for row in rows]
    rewards = ("faulty_math_reward", "waiting_reward")
    assert found == [(r, w, t) for r in rewards for w in (1, 2) for t in (1, 4)]
    assert all(row["items_per_s"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_verifications_with_faults_lose_none(capsys):
    assert reward_pool.main(["--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["num_items"] == 5000
    assert result["reasons"] == {"reward_timeout": 10, "reward_crash": 10, "reward_error": 10}
