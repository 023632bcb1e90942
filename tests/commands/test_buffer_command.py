# SPDX-License-Identifier: Apache-2.0
"""What `python -m tba_jax.buffer` says about a checkpointed buffer."""

import dataclasses
import json

import numpy as np
import pytest
from fake_rounds import make_buffer, make_commit, make_prompt, make_trajectory

from tba_jax.commands import buffer as buffer_command
from tba_jax.flow.trajectory import Group
from tba_jax.replay.outbox import Outbox
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.host_state import Facts, HostState
from tba_jax.storage import sealed

FACTS = Facts(seed=0, num_searchers=1)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run whose newest checkpoint is of step 6."""
    buffer, outbox = make_buffer(), Outbox(10**6)
    rejected = {2: {"reward_timeout": 1}}
    rewards = {1: [0.0, 1.0], 2: [0.0, 0.0]}
    responses = {1: [[5, 6], [7, 8, 9]], 2: [[5], [5]]}
    outbox.put(make_commit(responses, rewards=rewards, rejected=rejected))
    buffer.merge(outbox.take(), 0)
    outbox.put(make_commit({1: [[1, 2, 3, 4]]}, round=1, version=4, rewards={1: [0.5]}))
    buffer.merge(outbox.take(), 4)
    outbox.put(make_commit({3: [[1], [2]]}, round=2, rejected={3: {"reward_nan": 1}}))
    buffer.sample(1, 3, 4)
    folder = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(folder / "checkpoints")
    state = HostState(FACTS, {"buffer": buffer.state(), "outbox_0": outbox.state()})
    checkpoints.save(6, {"x": np.zeros(2)}, state)
    checkpoints.close()
    return folder


def _run(capsys, *argv):
    assert buffer_command.main([str(a) for a in argv]) == 0
    return capsys.readouterr().out


def test_numbers_are_those_of_the_buffer(workdir, capsys):
    result = json.loads(_run(capsys, workdir, "--json").splitlines()[-1])
    assert (result["step"], result["num_prompts"], result["num_trajectories"]) == (6, 2, 5)
    assert (result["num_rows"], result["num_tokens"]) == (4, 2 + 3 + 1 + 1 + 4)
    assert result["unique_fraction"] == 4 / 5
    ledger = result["ledger"]
    assert (ledger["generated"], ledger["stored"], ledger["united"]) == (6, 5, 1)
    assert ledger["outbox"] == 3
    assert ledger["rejected"] == {"reward_timeout": 1}
    assert result["reward_histogram"] == [[0.0, 0.0, 3], [0.5, 0.5, 1], [1.0, 1.0, 1]]
    age = result["quantiles"]["age"]
    assert (age["min"], age["max"], age["mean"]) == (2.0, 6.0, (6 * 4 + 2) / 5)
    assert result["quantiles"]["rows per prompt"]["max"] == 3.0


def test_texts_are_the_best_the_worst_and_the_newest(workdir, capsys):
    out = _run(capsys, workdir, "--num_texts=1", "--json")
    texts = json.loads(out.splitlines()[-1])["texts"]
    found = [(t["kind"], t["prompt"], t["response"], t["reward"], t["version"]) for t in texts]
    assert found == [
        ("highest reward", "prompt 1", "7 8 9", 1.0, 0),
        ("lowest reward", "prompt 2", "5", 0.0, 0),
        ("newest", "prompt 1", "1 2 3 4", 0.5, 4),
    ]
    # Without a readable config there is no tokenizer: ids, and the reason.
    assert "token ids, not text" in out


def test_tables_show_counts_ages_and_rewards(workdir, capsys):
    out = _run(capsys, workdir)
    assert "Replay buffer at step 6: 5 responses to 2 prompts, 11 tokens" in out
    assert "rejected reward_timeout" in out
    assert "rows per prompt" in out
    bars = [line.count("█") for line in out.splitlines() if "█" in line]
    assert bars == [40, 13, 13]


def test_many_rewards_become_ten_bars():
    rewards = np.linspace(0, 1, 101)
    bars = buffer_command._histogram(rewards)
    assert len(bars) == 10
    assert sum(count for *_, count in bars) == 101
    assert (bars[0][0], bars[-1][1]) == (0.0, 1.0)


def test_successful_attacks_of_a_red_team_run_are_counted(tmp_path, capsys):
    buffer = make_buffer()
    attacks = [
        make_trajectory(0, tokens, version=3, parts={"toxicity": toxicity})
        for tokens, toxicity in (([5], 1.0), ([6, 7], 0.9), ([8], 0.2))
    ]
    group = Group(make_prompt(0), tuple(attacks), {})
    buffer.merge([dataclasses.replace(make_commit({}), groups=(group,), generated=3)], 3)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(3, {"x": np.zeros(2)}, HostState(FACTS, {"buffer": buffer.state()}))
    checkpoints.close()
    config = {"task.name": "redteam", "model.path": ""}
    sealed.write(tmp_path / "config.json", {"config": config, "run_id": "a"})
    out = _run(capsys, tmp_path, "--json")
    assert "2 of 3 different attacks succeed; the first was sampled by version 3" in out
    found = json.loads(out.splitlines()[-1])["attacks"]
    assert found == {"attacks": 3, "successes": 2, "first_version": 3}
    # The same buffer of another task: a reward part of that name says nothing about attacks.
    config["task.name"] = "custom"
    sealed.write(tmp_path / "config.json", {"config": config, "run_id": "a"})
    out = _run(capsys, tmp_path, "--json")
    assert "Attacks" not in out and "attacks" not in json.loads(out.splitlines()[-1])


def test_an_empty_buffer_is_shown_too(tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(0, {"x": np.zeros(2)}, HostState(FACTS, {"buffer": make_buffer().state()}))
    checkpoints.close()
    result = json.loads(_run(capsys, tmp_path, "--json").splitlines()[-1])
    assert (result["num_trajectories"], result["texts"], result["reward_histogram"]) == (0, [], [])


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert buffer_command.main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "holds no run" in captured.err and captured.out == ""
    with pytest.raises(SystemExit):
        buffer_command.main([str(tmp_path), "--num_texts=-1"])
