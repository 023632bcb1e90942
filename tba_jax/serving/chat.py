# SPDX-License-Identifier: Apache-2.0
"""Chat formats: messages and tools become prompt tokens, and sampled tokens become messages.

The tokenizer's chat template formats messages without tools. Formats with tools are those of the
library `renderers`, which parses tool calls. Invariant: sampled tokens are never encoded again.
"""

import importlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.models.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


class Chat(NamedTuple):
    """The messages before a response of the policy, in the form of OpenAI's chat API."""

    messages: Messages
    tools: Messages = ()  # JSON schemas of the tools that the policy may call
    variables: Mapping[str, Any] = {}  # of the chat template; they override its options


class ChatFormat:
    """Conversion between chats and tokens by the tokenizer's chat template, without tools.

    A method raises ValueError if the format cannot express the chat or read the response.
    """

    stop_ids: tuple[int, ...] = ()  # that end a message, in addition to the model's stop tokens
    has_parts = False  # whether `read` divides the text of a response, so that it must be whole

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any] = {}) -> None:
        self._tokenizer, self._options = tokenizer, options

    def prompt(self, chat: Chat) -> np.ndarray:
        """Return the prompt tokens of a chat, up to the start of the response."""
        if chat.tools:
            raise ValueError(
                "the tool format of this model is not known. Set --renderer (in training "
                "--config.task.renderer) to a format of the library renderers, such as qwen3"
            )
        plain = [{"role": x["role"], "content": x.get("content") or ""} for x in chat.messages]
        text = self._tokenizer.format_chat(plain, variables={**self._options, **chat.variables})
        return self._tokenizer.encode(text, add_bos=False)

    def bridge(self, prompt: np.ndarray, completion: np.ndarray, chat: Chat) -> np.ndarray | None:
        """Return the tokens of a chat, if they begin with `prompt` and `completion`; else None."""
        return extended(self._tokenizer, np.concatenate([prompt, completion]), self.prompt(chat))

    def read(
        self, tokens: np.ndarray, text: str, prompt: np.ndarray, tools: Messages
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the message and the tool calls of a response: int32 [t] tokens and their text.

        A call has the keys id, name, and arguments or, if it is invalid, error. The message has
        only the valid calls.
        """
        return {"role": "assistant", "content": text}, []


class RendererFormat(ChatFormat):
    """The format with a name in the library `renderers`; raises ValueError without it."""

    has_parts = True

    def __init__(self, tokenizer: Tokenizer, name: str, options: Mapping[str, Any] = {}) -> None:
        super().__init__(tokenizer, options)
        try:
            self._library = importlib.import_module("renderers")
        except ImportError as error:
            text = f"renderer={name!r} needs pip install 'tba_jax[chat-tools]'"
            raise ValueError(text) from error
        if name == "auto":  # for a model unknown to the library, "auto" would parse no tool calls
            raise ValueError("renderer='auto': give the name of a format, such as qwen3 or llama-3")
        self._config = self._library.config_from_name(name)
        self._renderer = self._with(self._options)
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())

    def _with(self, options: Mapping[str, Any]) -> Any:
        """Return the library's renderer with options of its template."""
        if unknown := options.keys() - (known := self._config.template_field_names()):
            raise ValueError(f"the chat template lacks {sorted(unknown)}; it has {sorted(known)}")
        config = type(self._config)(**options) if options else self._config
        return self._library.create_renderer(self._tokenizer.library, config)

    def _call(self, name: str, chat: Chat, *arguments: Any, **options: Any) -> Any:
        """Call a method of the library, which may raise anything for a chat or a response."""
        own = self._with({**self._options, **chat.variables}) if chat.variables else self._renderer
        try:
            return getattr(own, name)(*arguments, tools=list(chat.tools) or None, **options)
        except Exception as error:
            text = f"{name} of the library renderers fails: {type(error).__name__}: {error}"
            raise ValueError(text) from error

    def prompt(self, chat: Chat) -> np.ndarray:
        messages = list(map(dict, chat.messages))
        ids = self._call("render_ids", chat, messages, add_generation_prompt=True)
        return np.array(ids, np.int32)

    def bridge(self, prompt: np.ndarray, completion: np.ndarray, chat: Chat) -> np.ndarray | None:
        new = list(map(dict, chat.messages))
        answer = max(i for i, message in enumerate(new) if message["role"] == "assistant")
        turns = prompt.tolist(), completion.tolist(), new[answer + 1 :]
        found = self._call("bridge_to_next_turn", chat, *turns)
        whole = np.array([] if found is None else found.token_ids, np.int32)
        before = np.concatenate([prompt, completion])
        return whole if np.array_equal(whole[: len(before)], before) else None

    def read(
        self, tokens: np.ndarray, text: str, prompt: np.ndarray, tools: Messages
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        ids = {"prompt_ids": prompt.tolist()}
        parsed = self._call("parse_response", Chat((), tools), tokens.tolist(), **ids)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = parsed.reasoning_content
        calls, valid, turn = [], [], zlib.crc32(prompt.tobytes() + tokens.tobytes())
        for i, call in enumerate(parsed.tool_calls):
            named = {"id": call.id or f"call_{turn:08x}_{i}", "name": call.name or "unknown"}
            if call.status != "ok":
                calls.append({**named, "error": f"the tool call is refused: {call.status}"})
                continue
            calls.append({**named, "arguments": call.arguments})
            arguments = call.arguments or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            function = {"name": named["name"], "arguments": text}
            valid.append({"id": named["id"], "type": "function", "function": function})
        return message | ({"tool_calls": valid} if valid else {}), calls


class Served(NamedTuple):
    """A served model, with the limits and settings of its requests."""

    model: str  # its name
    tokenizer: Tokenizer
    chat: ChatFormat
    eos_ids: tuple[int, ...]  # tokens that end a response
    max_length: int  # maximum number of tokens of prompt and response together
    sampling: SamplingSettings | None = None  # of a training run; None: each request has its own


def make_chat_format(tokenizer: Tokenizer, name: str, options: Mapping[str, Any]) -> ChatFormat:
    """Return the format of this name in the library `renderers`; "": the chat template."""
    return RendererFormat(tokenizer, name, options) if name else ChatFormat(tokenizer, options)


def extended(
    tokenizer: Tokenizer, before: np.ndarray, whole: np.ndarray, *, skip_special: bool = False
) -> np.ndarray | None:
    """Return tokens with the text of `whole`, int32 [t], that begin with `before`, int32 [s].

    None if the text of `whole` does not begin with the text of `before`. With `skip_special`, the
    texts are compared without special tokens.
    """
    if np.array_equal(whole[: len(before)], before):
        return whole
    text, start = (tokenizer.decode(ids, skip_special) for ids in (whole, before))
    if not text.startswith(start):
        return None
    return np.concatenate([before, tokenizer.encode(text[len(start) :], add_bos=False)])
