# SPDX-License-Identifier: Apache-2.0
"""A conversation whose template drops earlier thinking becomes an episode that forks.

tests/data/qwen3.jinja is the chat template of Qwen3-8B, byte for byte (Apache 2.0).
"""

import contextlib
from pathlib import Path

import numpy as np
from qwen_tokenizer import qwen_like_tokenizer

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.environments.pool import EnvironmentPool
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.serving.chat import ChatFormat
from tba_jax.serving.protocol import Served
from tests.environments.fake_sessions import Scripted, played

FILE = Path(__file__).with_name("agents_for_tests.py")
TEMPLATE = Path(__file__).parents[1] / "data" / "qwen3.jinja"
START, END = "<|im_start|>", "<|im_end|>\n"
TURNS = [f"<think>\nhm {i}\n</think>\n\nanswer {i}<|im_end|>" for i in range(3)]


def test_a_template_that_drops_thinking_makes_a_path_that_begins_at_the_prompt(tmp_path):
    qwen_like_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    chat, limits = ChatFormat(tokenizer), SamplingSettings(4000)
    served = Served("policy", tokenizer, chat, tokenizer.eos_ids, 4000, limits)
    session = Scripted(tokenizer, TURNS)
    pool = EnvironmentPool(f"{FILE}:thinking", served, max_turns=8, timeout_s=30.0)
    with contextlib.closing(pool):
        pool.check()
        start = tokenizer.encode(START, add_bos=False)
        y = played(pool, session, Prompt(0, "", start, {"prompt": "7+5"}))
    first, second, third = TURNS
    # The second request drops the thinking of the first turn: it forks. The third keeps that of the
    # second, as the template does up to the next message of the user: it continues the second.
    assistant = f"{START}assistant\n"
    user = f"user\n7+5{END}{assistant}"
    before = f"{user}answer 0{END}{START}user\n1+1{END}{assistant}"
    result = f"\n{START}user\n<tool_response>\n1+1\n</tool_response>{END}{assistant}"
    paths = [
        [(user, False), (first, True)],
        [(before, False), (second, True), (result, False), (third, True)],
    ]
    assert len(y.paths) == len(paths)
    for own, parts in zip(y.paths, paths, strict=True):
        texts = "".join(text for text, _ in parts)
        assert tokenizer.decode(y.tokens[own], skip_special=False) == texts
        sizes = [len(tokenizer.encode(text, add_bos=False)) for text, _ in parts]
        marks = np.repeat([is_sampled for _, is_sampled in parts], sizes)
        np.testing.assert_array_equal(y.is_sampled[own], marks)
        np.testing.assert_array_equal(y.token_logprobs[own], np.where(marks, -1, 0))
    # Every turn was sampled after the tokens before it in its path, and counts once.
    found = [tokenizer.decode(x, skip_special=False) for x in session.contexts]
    assert found == [START + text for text in (user, before, before + second + result)]
    assert y.is_sampled.sum() == round(100 * y.verdict.reward)
