# SPDX-License-Identifier: Apache-2.0
"""Sources of rewards follow the config; one that cannot be used is refused in one line."""

import asyncio
import contextlib
import json
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tba_jax.config.rules import validate
from tba_jax.config.schema import make_config, replace
from tba_jax.devices.site import Site
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.functions import make_rewards
from tba_jax.rewards.scores import Completion, Score
from tba_jax.run.shared import check_environments, make_grader

POST = "abcabcabcabcabcabcabcabc:"
REWARD_MODEL = "embedded:tldr_toy_reward"
GOLD = "tba_jax.rewards.graders:digest_reward"
SITES = [Site(Mesh([device], ("model",))) for device in jax.devices()]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load("embedded:tldr_toy_policy")


def of_task(name, data_path="", **changes):
    task = {"name": name, "data_path": data_path, **changes}
    config = make_config({f"task.{field}": value for field, value in task.items()})
    return config, config.task.open()


@pytest.fixture
def custom(tmp_path):
    """Config and task of rows that have prompts alone, with an environment."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in "abcd"))
    config, task = of_task("custom", str(rows), num_eval_prompts=2, environment="game.py:Game")
    validate(config)
    return config, task


def score(source, tokenizer, completion, has_eos=True):
    ids = tokenizer.encode(completion, add_bos=False)
    if has_eos:
        ids = np.append(ids, np.int32(tokenizer.eos_ids[0]))
    responses = [Completion(POST, completion, {}, ids, has_eos)]
    return asyncio.run(source.score(responses))[0].reward


def test_a_reward_model_gets_its_settings_and_a_copy_on_each_device(tokenizer):
    config, task = of_task("tldr_toy")
    config = replace(config, {"reward.model_path": REWARD_MODEL, "eval.gold": GOLD})
    plain, gold = make_rewards(config, task, tokenizer, SITES[0])
    with contextlib.closing(gold):
        assert score(gold, tokenizer, "abc") == pytest.approx(1 - 3 * 0.06)  # three characters
    config = replace(config, {"reward.missing_eos": -1.0})
    set_up, other = make_rewards(config, task, tokenizer, SITES[0])
    other.close()
    own = score(plain, tokenizer, "abc")
    # The default, infinity, stands for "no such penalty": a cut response keeps its own score.
    assert -10 < score(plain, tokenizer, "abc", has_eos=False) < 10
    assert score(set_up, tokenizer, "abc", has_eos=False) == -1.0
    assert score(set_up, tokenizer, "abc") == pytest.approx(own, abs=1e-5)
    model = set_up.sources["reward_model"]
    assert model.on(SITES[0]) is model
    copy = model.on(SITES[3])
    assert score(copy, tokenizer, "abc") == pytest.approx(own, abs=1e-5)
    places = {d for x in jax.tree.leaves(copy._scores.params) for d in x.devices()}
    assert places == {jax.devices()[3]}


def test_an_environment_that_gives_the_rewards_needs_no_function(tokenizer, custom):
    config, task = custom
    assert make_rewards(config, task, tokenizer, SITES[0]) == (None, None)
    grades = make_grader(config, task, tokenizer, None).grade(
        [Prompt(0, "a", np.zeros(1, np.int32), {})] * 2,
        [np.zeros(1, np.int32)] * 2,
        [True] * 2,
        [Score(1.0, None), None],
    )
    assert [x[1:3] for x in grades] == [(1.0, None), (None, "reward_none")]
    environments = types.SimpleNamespace(check=lambda: None, has_reward=False, name="game")
    with pytest.raises(ValueError, match=r"has no get_reward\(\), and no other reward is set"):
        check_environments(config, task, environments)


def test_rewards_that_the_user_names_are_added_to_those_of_the_environment(tokenizer):
    class Source:
        async def score(self, completions):
            return [Score(10.0), Score(None, "reward_error")]

    config, task = of_task("arithmetic")
    verdicts = [Score(5.0, None), Score(5.0, None), Score(None, "environment_error")]
    tokens = np.zeros(1, np.int32)
    rows = [Prompt(0, "a", tokens, {})] * 3, [tokens] * 3, [True] * 3
    named = replace(config, {"task.reward": "mine:score"})
    added = make_grader(named, task, tokenizer, Source()).grade(*rows, verdicts)
    assert [x.reward for x in added] == [15.0, None, None]
    assert [x.reason for x in added] == [None, "reward_error", "environment_error"]
    assert added[0].parts == {"environment": 5.0, "task.reward": 10.0}
    # The task's own reward is not added.
    own = make_grader(config, task, tokenizer, Source()).grade(*rows, verdicts)
    assert [(x.reward, x.parts) for x in own] == [(5.0, {}), (5.0, {}), (None, {})]


def test_a_learned_log_z_is_refused_where_the_prompt_is_one_token(custom):
    config, task = custom
    served = types.SimpleNamespace(chat=types.SimpleNamespace(stop_ids=()), eos_ids=())
    environments = types.SimpleNamespace(check=lambda: None, name="game", served=served)
    environments.has_reward = environments.is_agent = environments.first_token_only = True
    environments.schemas = []
    check_environments(config, task, environments)
    learned = replace(config, {"objective.log_z": "learned"})
    with pytest.raises(ValueError, match=r"objective\.log_z = learned reads the prompt"):
        check_environments(learned, task, environments)
    environments.first_token_only = False
    check_environments(learned, task, environments)


def test_a_gold_model_judges_without_the_penalties_of_training(tokenizer):
    config, task = of_task("tldr_toy")
    config = replace(config, {"reward.missing_eos": -1.0, "eval.gold": REWARD_MODEL})
    _, gold = make_rewards(config, task, tokenizer, SITES[0])
    config = replace(config, {"reward.model_path": REWARD_MODEL})
    trains, _ = make_rewards(config, task, tokenizer, SITES[0])
    assert score(gold, tokenizer, "abc") == pytest.approx(score(trains, tokenizer, "abc"), abs=1e-5)
    assert score(gold, tokenizer, "abc", has_eos=False) != -1.0


def test_a_judge_of_responses_without_references_is_refused(tokenizer, custom):
    config, task = custom
    for judge in ("a.b:c", REWARD_MODEL):
        judged = replace(config, {"eval.gold": judge})
        with pytest.raises(ValueError, match=r"task custom has no such column; add it to the data"):
            make_rewards(judged, task, tokenizer, SITES[0])
