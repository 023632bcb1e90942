# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint belongs to: every part of a run that changes has another name."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
from absl import flags

import tba_jax
from tba_jax.run.errors import CheckpointError, UserError
from tba_jax.run.host_state import KINDS, Facts, check_facts, fingerprints
from tba_jax.run.model_parts import START_MODEL
from tba_jax.run.shared import make_task


@pytest.fixture
def made_of(tmp_path):
    """A model folder, a data file and a reward file, and a function that names them."""
    model = tmp_path / "model"
    shutil.copytree(START_MODEL, model)
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4000)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = tmp_path / "mine.py"
    reward.write_text("def reward(prompts, completions, **columns):\n    return [1.0]\n")

    objective = tmp_path / "loss.py"
    objective.write_text(
        "import dataclasses\n"
        "from tba_jax.train.objectives.tb import TrajectoryBalance\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Ours(TrajectoryBalance):\n"
        "    pass\n"
    )

    def names(**task):
        config = tba_jax.load_config(
            "math",
            objective={"name": f"{objective}:Ours"},
            task={
                "name": "custom",
                "data_path": str(data),
                "reward": f"{reward}:reward",
                "num_eval_prompts": 8,
                **task,
            },
        )
        return fingerprints(config, make_task(config), model)

    return names, model, data, reward, objective


def test_each_part_that_changes_has_another_name(made_of):
    names, model, data, reward, objective = made_of
    before = names()
    assert before == names() and set(before) == set(KINDS)

    def changed():
        now = names()
        return [kind for kind in KINDS if now[kind] != before[kind]]

    # One row of 4,000, of the same length.
    data.write_text(data.read_text().replace('"1234"', '"1243"'))
    assert changed() == ["data"]
    reward.write_text(reward.read_text().replace("1.0", "2.0"))
    assert changed() == ["data", "reward"]
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    safetensors.numpy.save_file(
        {name: np.asarray(x * 1.5, x.dtype) for name, x in weights.items()},
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert changed() == ["data", "model", "reward"]
    tokens = model / "tokenizer_config.json"
    tokens.write_text(tokens.read_text() + "\n")
    assert changed() == ["data", "model", "reward", "tokenizer"]
    objective.write_text(objective.read_text() + "\n")
    assert changed() == list(KINDS)


def test_an_environment_that_changes_has_another_name(made_of, tmp_path):
    names, *_ = made_of
    game = tmp_path / "game.py"
    game.write_text("class Game:\n    def reset(self, **row):\n        return None\n")
    before = names(environment=f"{game}:Game")
    assert before["reward"] != names()["reward"]
    game.write_text(game.read_text().replace("None", "'go'"))
    assert names(environment=f"{game}:Game")["reward"] != before["reward"]


THEN = Facts(1, 1, "run-a", dict.fromkeys(KINDS, "f00d"))


def test_what_changed_is_named_with_the_way_on():
    now = dataclasses.replace(THEN, fingerprints=THEN.fingerprints | {"data": "d00d", "model": "1"})
    assert check_facts(20, THEN, THEN, ()) == []
    older = {kind: "f00d" for kind in KINDS if kind != "objective"}
    assert check_facts(20, dataclasses.replace(THEN, fingerprints=older), THEN, ()) == []
    with pytest.raises(UserError) as caught:
        check_facts(20, THEN, now, ())
    assert str(caught.value) == (
        "data and model changed since checkpoint 20 was written (data: f00d then, d00d now; "
        "model: f00d then, 1 now). Restore the files of the start of the run, or continue with "
        "the changed files: --accept_changed=data --accept_changed=model"
    )
    with pytest.raises(UserError, match="^model changed.*--accept_changed=model$"):
        check_facts(20, THEN, now, ["data"])
    assert check_facts(20, THEN, now, ["data", "model"]) == [
        "data changed since checkpoint 20 was written; accepted",
        "model changed since checkpoint 20 was written; accepted",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_main_command_accepts_each_kind(kind):
    import tba_jax.commands.train  # noqa: F401  (defines the flags)

    assert flags.FLAGS["accept_changed"].parser.parse(kind) == kind


@pytest.mark.parametrize("changes", [{"run_id": "run-b"}, {"seed": 2}])
def test_a_checkpoint_of_another_run_is_not_continued(changes):
    now = dataclasses.replace(THEN, **changes)
    with pytest.raises(CheckpointError, match="checkpoint 20 is of .* was copied there"):
        check_facts(20, THEN, now, KINDS)
