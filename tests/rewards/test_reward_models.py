# SPDX-License-Identifier: Apache-2.0
"""Learned rewards: scores equal transformers', whatever the batch, the length or the tokenizer."""

import asyncio
import itertools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import load_folder
from jax.sharding import Mesh
from red_team_models import CHARACTERS, write_model

from tba_jax.devices.site import DeviceLock, Site
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards import reward_models
from tba_jax.rewards.reward_models import RewardModel
from tba_jax.rewards.scores import Completion

GOLDEN = Path(__file__).parents[1] / "golden"
# A golden classifier with one label, by tests/golden/make_golden.py; those of other families are
# compared in tests/models/test_families.py.
NAME = "gpt_neox_reward"
# float32, two implementations: 4e-6 of the largest score, which is near 1
# (tests/models/test_families).
TOLERANCE = 1e-5
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
TOKENS = (*SPECIAL, *CHARACTERS)
WANTED = np.load(GOLDEN / f"{NAME}.npz")
ROWS = list(WANTED["tokens"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A golden reward model with a tokenizer; eos is 1."""
    return write(tmp_path_factory.mktemp("models"), NAME)


def write(folder, name, special=SPECIAL):
    """A golden model with these special tokens, whose other tokens are characters."""
    roles = {"eos_token": "<eos>", "pad_token": "<pad>"}
    return Path(write_model(folder / name, name, special, roles))


def load(folder, policy=None, **options):
    tokenizer = Tokenizer.load(policy or folder)
    options = {"site": one(jax.devices()[0]), **options}
    return RewardModel(str(folder), policy_tokenizer=tokenizer, **options)


def one(device):
    return Site(Mesh([device], ("model",)))


def words(ids):
    return "".join(TOKENS[i] for i in ids)


def score(model, rows, num_prompt_tokens=5, has_eos=None):
    prompts = [words(row[:num_prompt_tokens]) for row in rows]
    responses = [np.asarray(row[num_prompt_tokens:], np.int32) for row in rows]
    texts = [words(r) for r in responses]
    has_eos = has_eos or [True] * len(rows)
    found = zip(prompts, texts, [{}] * len(rows), responses, has_eos, strict=True)
    return rewards(model, itertools.starmap(Completion, found))


def rewards(model, completions):
    return [score.reward for score in asyncio.run(model.score(list(completions)))]


def test_scores_equal_those_of_transformers_in_any_batch(folder, monkeypatch):
    monkeypatch.setattr(reward_models, "ROWS", 4)
    model, rows = load(folder), ROWS
    # Five rows in batches of four, of several lengths and in an order that packing changes.
    mixed = [rows[0], rows[1][:7], rows[1], rows[0][:6], rows[0]]
    got = score(model, mixed)
    want = WANTED["logits"][:, 0]
    np.testing.assert_allclose([got[0], got[2], got[4]], want[[0, 1, 0]], atol=TOLERANCE)
    alone = [score(model, [row])[0] for row in mixed]
    np.testing.assert_allclose(got, alone, atol=1e-6)  # float32 rounding of other batch rows
    assert got[1] != got[2]


def test_another_vocabulary_is_read_through_the_text(folder, tmp_path):
    """The policy's ids mean other words; the scores are those of the words, eos set anew."""
    policy = write(tmp_path, NAME, special=SPECIAL[::-1])
    complete = [np.append(row[row != 1], 1) for row in ROWS]
    expected = score(load(folder), complete)
    model = load(folder, policy=policy)
    prompts = [words(row[:5]) for row in complete]
    texts = [words(row[5:-1]) for row in complete]
    theirs = [Tokenizer.load(policy).encode(words(row[5:]), add_bos=False) for row in complete]
    got = rewards(model, map(Completion, prompts, texts, [{}, {}], theirs))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_chat_is_read_in_the_models_own_template_where_it_has_one(folder, tmp_path):
    row = ROWS[0]
    shutil.copytree(folder, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        f"{TOKENS[7]}{{{{ messages[0].content }}}}{TOKENS[9]}"
    )
    response = row[5:].astype(np.int32)
    columns = {"prompt": [{"role": "user", "content": words(row[:5])}]}
    chat = [Completion(words(row[:3]), words(response), columns, response)]
    plain = load(folder)
    got = rewards(load(tmp_path / "chat"), chat)
    own = np.concatenate([[7], row[:5], [9], response])
    np.testing.assert_allclose(got, score(plain, [own], 7), atol=1e-6)
    # Without a template of its own it reads what the policy does.
    got = rewards(plain, chat)
    others = np.concatenate([row[:3], response])
    np.testing.assert_allclose(got, score(plain, [others], 3), atol=1e-6)


def test_a_model_divided_over_devices_scores_alike_and_no_device_has_it_whole(folder):
    model, pair, launched = load(folder), Mesh(jax.devices()[4:6], ("model",)), []
    want = score(model, ROWS)

    class Turns(DeviceLock):
        def locked(self, program, devices):
            return lambda *args: launched.append(list(devices)) or program(*args)

    site = Site(pair, Turns(30.0))
    for there in (load(folder, site=site), model.on(site)):
        launched.clear()
        # Sums over two devices: float32 rounding in another order.
        np.testing.assert_allclose(score(there, ROWS), want, atol=TOLERANCE)
        assert launched == [list(pair.devices.flat)]
        leaves = jax.tree.leaves(there._scores.params)
        assert {d for x in leaves for d in x.devices()} == set(pair.devices.flat)
        held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        assert held < 0.8 * sum(x.nbytes for x in leaves)  # embeddings and norms stay whole


def test_a_score_that_is_not_finite_is_a_named_failure(folder):
    model = load(folder, missing_eos=-1.0)
    params = model._scores.params
    params = {**params, "score": jnp.full_like(params["score"], jnp.nan)}
    model._scores = model._scores._replace(params=params)
    assert score(model, ROWS, has_eos=[True, False]) == [None, -1.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2_classifier", "labels; wanted a .* one label"),
        ("gpt_neox", "language model's head"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, name))


def test_what_is_too_long_is_refused(folder):
    limit = load_folder(folder)[0].max_positions
    with pytest.raises(ValueError, match=f"has {limit} positions; a prompt with its response"):
        score(load(folder), [np.full(limit + 1, 3, np.int32)])
