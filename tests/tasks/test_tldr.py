# SPDX-License-Identifier: Apache-2.0
"""TL;DR: the real task's rows, the miniature's posts and gold reward, and its embedded models."""

import asyncio
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tba_jax.devices.site import Site
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.digests import gold_score
from tba_jax.rewards.reward_models import RewardModel
from tba_jax.rewards.scores import Completions
from tba_jax.tasks import tldr_toy
from tba_jax.tasks.registry import get_task


def test_rows_of_the_data_set_are_prompts_with_a_human_reference(tmp_path):
    row = {"prompt": "SUBREDDIT: r/x\n\nPOST: long\n\nTL;DR:", "completion": " short"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    task = get_task("tldr", str(tmp_path))
    assert task.problem("train", 0) == (row["prompt"], {"answer": " short"})
    assert task.response_kind(" one\ntwo") == "several_paragraphs"
    (message,), columns = get_task("tldr", str(tmp_path), chat=True).problem("train", 0)
    assert message["content"].endswith("one short paragraph.\n\nSUBREDDIT: r/x\n\nPOST: long")
    assert columns == {"answer": " short", "prompt": [message]}
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="train.jsonl, line 1: .* text in column 'completion'"):
        get_task("tldr", str(tmp_path)).size("train")


def test_posts_are_the_same_on_every_machine():
    # Written down when the task was made: Python's random() never changes for a seed.
    assert tldr_toy.problem(0, "eval") == ("bmhmbmlhbbihibhhhmhhmihi", "hbhmgi")
    assert tldr_toy.problem(1, "train") == ("piiipcpcibbpiccpipaiaaii", "iocp")
    posts = {tldr_toy.problem(i, s)[0] for s in ("train", "eval") for i in range(500)}
    assert len(posts) == 1000 and {*map(len, posts)} == {tldr_toy.POST_CHARS}


def test_embedded_reward_model_learned_something_but_not_the_gold_reward():
    policy = Tokenizer.load("embedded:tldr_toy_policy")
    site = Site(Mesh(jax.devices()[:1], ("model",)))
    model = RewardModel("embedded:tldr_toy_reward", site=site, policy_tokenizer=policy)
    posts = [tldr_toy.problem(i, "eval") for i in range(256)]
    eos = policy.eos_ids[0]
    responses = Completions(
        [f"{post}:" for post, _ in posts],
        [digest for _, digest in posts],
        {},
        [np.append(policy.encode(d, add_bos=False), eos) for _, d in posts],
        [True] * len(posts),
    )
    scores = asyncio.run(model.score(responses)).rewards
    gold = [gold_score(*post) for post in posts]
    # 0.68 over all 1,024 (said when it was made); 256 of them within 0.05 of that.
    assert 0.6 < np.corrcoef(scores, gold)[0, 1] < 0.8
