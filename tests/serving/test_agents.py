# SPDX-License-Identifier: Apache-2.0
"""Agents over HTTP as environments: exact tokens and log-probs, and every way to fail by a name."""

import contextlib
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from agents_for_tests import complete
from fake_models import START_MODEL_LOGIT, logprob_bound, scored_tokens
from qwen_tokenizer import qwen_like_tokenizer
from served_model import TEMPLATE, folder_with_template

from tba_jax.config.schema import make_config
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.environments.episode import Attempt, continues
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.scores import Score
from tba_jax.run.shared import make_environments
from tba_jax.search.prompts import PromptReader
from tba_jax.serving.chat import Chat, ChatFormat
from tba_jax.serving.failures import ApiError
from tests.environments.fake_sessions import all_played

# The chat template of Qwen3-8B, byte for byte (Apache 2.0).
QWEN3 = Path(__file__).parents[1] / "data" / "qwen3.jinja"
FILE, LIMIT = Path(__file__).with_name("agents_for_tests.py"), 48
CHANGES = {"task.max_prompt_tokens": 12, "search.max_new_tokens": LIMIT, "reward.timeout_s": 30.0}
SETTINGS, START = SamplingSettings(LIMIT), np.ones(1, np.int32)


@contextlib.contextmanager
def pool_of(model, name, max_turns=8):
    settings = make_config({**CHANGES, "task.environment": f"{FILE}:{name}"})
    with contextlib.closing(make_environments(settings, model.tokenizer)) as pool:
        pool.check()
        pool.max_turns = max_turns
        yield pool


def drawn(model, environments, rows, swap=None):
    """The episodes of the rows, in order."""
    session = model.decoder.session(model.params, num_slots=4, version=3, keeps_caches=True)
    prompts = [Prompt(i, row["prompt"], START, row) for i, row in enumerate(rows)]
    return all_played(environments, session, prompts, SETTINGS, swap)


def test_every_sampled_token_has_the_log_prob_of_the_weights_that_drew_it(model):
    rows = [{"prompt": "7+5-3=", "kind": kind} for kind in ("tokens", "text", "fork", "late")]
    weights = [model.params, jax.tree.map(lambda x: x * 1.02, model.params)]
    with pool_of(model, "talk") as environments:
        episodes = drawn(model, environments, rows[:3])
        episodes += drawn(model, environments, rows[3:], swap=weights[1])
    bound = logprob_bound(model.config, 1 + LIMIT, START_MODEL_LOGIT)
    for y, row in zip(episodes, rows, strict=True):
        paths, of = [y.tokens[path] for path in y.paths], y.is_sampled
        before, after = (
            np.concatenate([scored_tokens(model.config, x, START, path) for path in paths])
            for x in weights
        )
        # Turns after a change of the weights have the version and the log-probs of the new ones.
        starts = np.diff(of.astype(int), prepend=0) == 1
        is_after = (row["kind"] == "late") & (np.cumsum(starts) > 1)
        wanted = np.where(of, np.where(is_after, after, before), 0)
        np.testing.assert_allclose(y.token_logprobs, wanted, rtol=0, atol=bound)
        assert np.abs(before - after)[of].max() > 1e-3
        assert (y.version_min, y.version_max) == (3, 3 + is_after.any())
        assert y.verdict == Score(of.sum() / 10, None)  # no token was lost or counted twice
        # A request that continues no turn begins a path of its episode.
        prompts = ["7+5-3=", "1+1="][: 1 + (row["kind"] == "fork")]
        assert len(paths) == len(prompts) and starts.sum() == 3 * len(prompts)  # turns
        assert all(map(str.startswith, map(model.tokenizer.decode, paths), prompts))


def test_a_chat_continues_an_earlier_request_and_its_answer_only():
    def chat(texts):  # capitals are the assistant's
        return [{"role": "assistant" if x.isupper() else "user", "content": x} for x in texts]

    assert continues(chat("aBc"), chat("aB"))
    # Another history, which a renderer would not notice; an answer that was not sampled here.
    assert not any(continues(chat(texts), chat("aB")) for texts in ("cBc", "aDc", "aBcBc", "ac"))


def test_a_template_that_drops_thinking_continues_no_turn_that_it_would_change(tmp_path):
    """Environments then fork: test_environment_pool."""
    qwen_like_tokenizer(tmp_path)
    shutil.copy(QWEN3, tmp_path / "chat_template.jinja")
    tokenizer, user = Tokenizer.load(tmp_path), {"role": "user", "content": "7+5"}
    chat_format = ChatFormat(tokenizer, {"enable_thinking": False})
    assert tokenizer.decode(chat_format.prompt(Chat([user]))).endswith("<think>\n\n</think>\n\n")
    thinks = {"variables": {"enable_thinking": True}}
    prompt = chat_format.prompt(Chat([user], **thinks))
    turn = tokenizer.encode("<think>\nhm\n</think>\n\n12<|im_end|>", add_bos=False)
    chat = [user, {"role": "assistant", "content": tokenizer.decode(turn)}]
    # The template keeps the thinking of a turn up to the next message of the user.
    assert chat_format.bridge(prompt, turn, Chat([*chat, user], **thinks)) is None
    chat.append({"role": "tool", "content": "1+1"})
    found = chat_format.bridge(prompt, turn, Chat(chat, **thinks))
    before = np.concatenate([prompt, turn])
    np.testing.assert_array_equal(found[: len(before)], before)
    assert "<tool_response>\n1+1\n</tool_response>" in tokenizer.decode(found)


def test_options_of_the_template_reach_prompts_and_agents(tmp_path):
    tokenizer = Tokenizer.load(folder_with_template(tmp_path / "model", TEMPLATE))
    data = tmp_path / "a.jsonl"
    data.write_text('{"prompt": "7+5"}\n{"prompt": "9"}\n')
    own = {"task.name": "custom", "task.data_path": str(data), "task.chat": "ending=1"}
    own |= {"task.environment": f"{FILE}:talk", "task.num_eval_prompts": 1}
    config = make_config({**CHANGES, **own})
    (first,), _ = PromptReader(config.task.open(), tokenizer, 40).held_out(1)
    with contextlib.closing(make_environments(config, tokenizer)) as pool:
        chat = Chat([{"role": "user", "content": first.text.removesuffix("=1")}])
        np.testing.assert_array_equal(pool.served.chat.prompt(chat), first.tokens)
    assert first.text.endswith("=1")


# How an episode ends; the last two have a short deadline.
ENDS = {
    "unread": "environment_template",  # the chat format cannot read the turn
    "unwritten": "environment_template",  # ... or write the request
    "no turn": "environment_no_turn",
    "nonsense": "environment_request",
    "first token": "environment_first_token",
    "three at once": None,
    "four turns": None,
    "good": None,
    "hang": "environment_timeout",
}


@pytest.mark.slow
def test_each_failure_is_a_rejection_by_its_name_and_costs_no_other_episode(
    model, tmp_path, capfd, monkeypatch
):
    def read(*arguments):
        raise ValueError("no message")

    monkeypatch.setattr(ChatFormat, "read", read)
    file, found = tmp_path / "late", []
    rows = [{"prompt": "7+5-3=", "kind": kind, "file": str(file)} for kind in ENDS]
    with pool_of(model, "misbehave", max_turns=3) as environments:
        for some, environments.timeout_s in ((rows[:-2], 30.0), (rows[-2:], 6.0)):
            found += drawn(model, environments, some)
        assert dict(zip(ENDS, (y.verdict.reason for y in found), strict=True)) == ENDS
        y = found[-3]
        assert (y.finish, y.verdict.reward, y.is_sampled.sum()) == ("turns", 1.0, 3)
        assert complete(file.read_text(), "7+5-3=") == "episode_ended"  # after its deadline
    lines = capfd.readouterr().err
    assert all(f"rejected as {name}" in lines for name in filter(None, ENDS.values()))


def test_agents_that_are_no_coroutines_run_at_the_same_time_in_a_few_processes(model):
    rows = [{"prompt": "7+5-3=", "kind": "meet"}] * 8  # each waits for the other of its process
    with pool_of(model, "misbehave") as environments:
        assert [y.verdict for y in drawn(model, environments, rows)] == [Score(1.0, None)] * 8
        assert len(environments.workers.workers) == 4


def test_a_client_that_disconnects_ends_its_episode_by_a_name(model):
    with pool_of(model, "misbehave") as environments:
        prompt = Prompt(0, "1", START, {"kind": "idle"})
        attempt = Attempt(0, 0, prompt, np.zeros(2, np.uint32), SETTINGS)
        ended = environments.start(attempt, lambda turn: None)
        while not environments.agents:
            time.sleep(0.01)
        (agent,) = environments.agents.values()
        body, run = {"prompt": "7+5"}, environments.workers.run
        request, waiting = (run(agent.request("completions", body)) for _ in range(2))
        while agent._open is None:
            time.sleep(0.01)
        request.cancel()
        assert ended.result().verdict.reason == "environment_disconnect"
        with pytest.raises(ApiError, match="this episode has") as error:
            waiting.result()
        assert error.value.code == "episode_ended"
