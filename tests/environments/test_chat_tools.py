# SPDX-License-Identifier: Apache-2.0
"""Tools in the format of a chat model, over a decode session that says what the test wants."""

from pathlib import Path

import fake_sessions
import numpy as np
import pytest
from fake_sessions import Scripted
from qwen_tokenizer import qwen_like_tokenizer

from tba_jax.environments.episodes import EnvironmentPool
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.scores import Score
from tba_jax.serving.chat import RendererFormat, Served

pytest.importorskip("renderers", reason="the extra `chat-tools` is not installed")
FILE = Path(__file__).with_name("environments_for_tests.py")
END = "<|im_end|>"


@pytest.fixture
def played(tmp_path):
    """Returns the episode of turns of the policy, and the session that sampled it."""
    tokenizer = qwen_like_tokenizer(tmp_path)
    chat = RendererFormat(tokenizer, "qwen3")
    served = Served("policy", tokenizer, chat, tokenizer.eos_ids, 4000)
    pool = EnvironmentPool(f"{FILE}:Counter", served, max_turns=8, timeout_s=30.0)
    pool.check()

    def play(turns):
        inner = Scripted(tokenizer, turns)
        tokens = tokenizer.encode("<|im_start|>", add_bos=False)
        messages = [{"role": "user", "content": "Count "}]
        prompt = Prompt(0, "", tokens, {"prompt": messages, "start": 3})
        return fake_sessions.played(pool, inner, prompt), inner, tokenizer

    yield play
    pool.close()


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>{END}'


def test_a_class_with_tools_runs_in_the_format_of_the_model(played, capsys):
    turns = [call("add", '{"n": 4}'), call("add", "4x"), f"7{END}"]
    y, session, tokenizer = played(turns)
    text = tokenizer.decode(y.tokens, skip_special=False)
    # `reset` continued the user's message, and the schema of the tool is in the system's.
    assert "user\nCount from 3" + END in text and '"name": "add"' in text.partition(END)[0]
    assert f"{turns[0]}\n<|im_start|>user\n<tool_response>\n7\n</tool_response>{END}" in text
    assert "<tool_response>\nerror: the tool call is refused: invalid_json\n" in text
    assert (y.verdict, y.num_failed_calls, y.finish) == (Score(7.0, None), 1, "eos")
    sampled = tokenizer.decode(y.tokens[y.is_sampled], skip_special=False)
    assert sampled == "".join(turns)
    np.testing.assert_array_equal(y.token_logprobs, np.where(y.is_sampled, -1, 0))
    for before, after in zip(session.contexts[:-1], session.contexts[1:], strict=True):
        np.testing.assert_array_equal(after[: len(before)], before)
    whole, last = np.concatenate([session.contexts[0][:1], y.tokens]), session.contexts[-1]
    np.testing.assert_array_equal(whole[: len(last)], last)
    (line,) = capsys.readouterr().err.splitlines()
    assert "invalid_json; 1 times failed_tool_call" in line


def test_an_error_of_the_library_within_an_episode_is_a_rejection_of_that_episode(
    played, monkeypatch, capsys
):
    """The library cannot read the second turn; the first one's call has been executed."""
    turns = [call("add", '{"n": 4}'), call("add", '{"n": 5}')]
    read = RendererFormat.read

    def fails(self, tokens, text, *others):
        if '"n": 5' in text:
            self._renderer = None  # an AttributeError in the call of the library
        return read(self, tokens, text, *others)

    monkeypatch.setattr(RendererFormat, "read", fails)
    y, session, _ = played(turns)
    assert y.verdict == Score(None, "environment_template")
    assert len(session.contexts) == 2 and y.num_sampled > 2
    error = capsys.readouterr().err
    assert "rejected as environment_template" in error and "AttributeError" in error
