# SPDX-License-Identifier: Apache-2.0
"""Chats whose template drops earlier thinking.

tests/data/qwen3.jinja is the chat template of Qwen3-8B, byte for byte (Apache 2.0).
"""

from pathlib import Path

import numpy as np
import pytest
from qwen_tokenizer import qwen_like_tokenizer

from tba_jax.models.tokenizer import Tokenizer
from tba_jax.serving.chat import Chat, ChatFormat

TEMPLATE = Path(__file__).parents[1] / "data" / "qwen3.jinja"


# The template keeps the thinking of a turn up to the next message of the user.
@pytest.mark.parametrize(("role", "is_continued"), [("user", False), ("tool", True)])
def test_a_template_that_drops_thinking_continues_no_turn_that_it_would_change(
    role, is_continued, tmp_path
):
    """Environments then fork: test_environment_pool."""
    qwen_like_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    chat_format = ChatFormat(tokenizer)
    messages = [{"role": "user", "content": "7+5"}]
    prompt = chat_format.prompt(Chat(messages))
    turn = tokenizer.encode("<think>\nhm\n</think>\n\n12<|im_end|>", add_bos=False)
    answer = {"role": "assistant", "content": tokenizer.decode(turn)}
    chat = Chat([*messages, answer, {"role": role, "content": "1+1"}])
    found = chat_format.bridge(prompt, turn, chat)
    assert (found is not None) is is_continued
    if found is not None:
        before = np.concatenate([prompt, turn])
        np.testing.assert_array_equal(found[: len(before)], before)
        assert "<tool_response>\n1+1\n</tool_response>" in tokenizer.decode(found)
