# SPDX-License-Identifier: Apache-2.0
"""Chat formats: messages and tools become prompt tokens, and sampled tokens become messages.

The library `renderers` has formats of models with tool calls. Without the library, the tokenizer's
chat template formats messages, and tools are refused, because no code here parses tool calls.
Invariant: sampled tokens are never re-encoded from text.
"""

import importlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.models.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
NONE: Mapping[str, Any] = {}


class ChatFormat:
    """Conversion between chats and tokens by the tokenizer's chat template, without tools.

    `variables` are variables of the template, such as {"enable_thinking": False}. All methods raise
    ValueError if the format cannot express messages or tools, or read a response.

    Attributes:
        stop_ids: tokens that end a message, in addition to the model's stop tokens.
    """

    stop_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(
        self, messages: Messages, tools: Messages, variables: Mapping[str, Any] = NONE
    ) -> np.ndarray:
        """Return the prompt tokens of messages, up to the start of the response."""
        if tools:
            raise ValueError(
                "tools: the tool format of this model is not known. Set --renderer=NAME, or in a "
                "training run --config.task.renderer=NAME, to a format of the library renderers, "
                "such as qwen3"
            )
        plain = [{"role": x["role"], "content": text_of(x)} for x in messages]
        text = self._tokenizer.format_chat(plain, variables=variables)
        return self._tokenizer.encode(text, add_bos=False)

    def bridge(
        self,
        prompt: np.ndarray,
        completion: np.ndarray,
        messages: Messages,
        tools: Messages,
        variables: Mapping[str, Any] = NONE,
    ) -> np.ndarray | None:
        """Return a prompt that extends an earlier prompt and its completion by new messages.

        The result is None if the format cannot extend the tokens. The conversation then forks.
        """
        before = np.concatenate([prompt, completion])
        return extended(self._tokenizer, before, self.prompt(messages, tools, variables))

    def read(
        self, tokens: np.ndarray, text: str, prompt: np.ndarray, tools: Messages
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the message and the tool calls of a response.

        A call has an ID, a name, and arguments or the key "error". The message has only the valid
        calls.

        Args:
            tokens: int32 [t], the response.
            text: text of the response, without a stop string.
        """
        return {"role": "assistant", "content": text}, []


class RendererFormat(ChatFormat):
    """A format of the library `renderers`, which supports tools.

    Args:
        name: name of the format in the library.

    Raises:
        ValueError: the library is not installed, or has no format of this name.
    """

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        super().__init__(tokenizer)
        try:
            self._library = importlib.import_module("renderers")
            configs = importlib.import_module("renderers.configs")
        except ImportError as error:
            raise ValueError(
                f"renderer={name!r} needs the library renderers. Run pip install "
                "'tba_jax[chat-tools]'"
            ) from error
        if name == "auto":  # for a model unknown to the library, "auto" would parse no tool calls
            raise ValueError("renderer='auto': give the name of a format, such as qwen3 or llama-3")
        self._config = configs.config_from_name(name)
        self._renderer = self._with({})
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())

    def _with(self, variables: Mapping[str, Any]) -> Any:
        """Return the renderer with these options."""
        known = self._config.template_field_names()
        if not known >= variables.keys():
            raise ValueError(
                f"chat_template_kwargs {sorted(variables)}: the format {self._config.name} of the "
                f"library renderers has {sorted(known)}. Leave out the others"
            )
        config = type(self._config)(**variables)
        return self._library.create_renderer(self._tokenizer.library, config)

    def prompt(
        self, messages: Messages, tools: Messages, variables: Mapping[str, Any] = NONE
    ) -> np.ndarray:
        renderer = self._with(variables) if variables else self._renderer
        rendered = renderer.render_ids(
            list(map(_checked, messages)), tools=list(tools) or None, add_generation_prompt=True
        )
        return np.array(rendered, np.int32)

    def bridge(
        self,
        prompt: np.ndarray,
        completion: np.ndarray,
        messages: Messages,
        tools: Messages,
        variables: Mapping[str, Any] = NONE,
    ) -> np.ndarray | None:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            return None
        renderer = self._with(variables) if variables else self._renderer
        found = renderer.bridge_to_next_turn(
            prompt.tolist(),
            completion.tolist(),
            list(map(_checked, messages[answers[-1] + 1 :])),
            tools=list(tools) or None,
        )
        whole = np.array([] if found is None else found.token_ids, np.int32)
        before = np.concatenate([prompt, completion])
        return whole if np.array_equal(whole[: len(before)], before) else None

    def read(
        self, tokens: np.ndarray, text: str, prompt: np.ndarray, tools: Messages
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        try:
            parsed = self._renderer.parse_response(
                tokens.tolist(), tools=list(tools) or None, prompt_ids=prompt.tolist()
            )
        except Exception as error:  # the library parses arbitrary sampled tokens
            raise ValueError(
                f"the library renderers cannot read a response: {type(error).__name__}: {error}"
            ) from error
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = parsed.reasoning_content
        calls, turn = [], zlib.crc32(prompt.tobytes() + tokens.tobytes())
        for i, call in enumerate(parsed.tool_calls):
            named = {"id": call.id or f"call_{turn:08x}_{i}", "name": call.name or "unknown"}
            if call.status != "ok":
                calls.append({**named, "error": f"the tool call is refused: {call.status}"})
                continue
            calls.append({**named, "arguments": call.arguments})
            is_text = isinstance(call.arguments, str)
            arguments = call.arguments if is_text else json.dumps(call.arguments or {})
            function = {"name": named["name"], "arguments": arguments}
            valid = message.setdefault("tool_calls", [])
            valid.append({"id": named["id"], "type": "function", "function": function})
        return message, calls


def make_chat_format(tokenizer: Tokenizer, renderer: str) -> ChatFormat:
    """Return the format of this name in the library `renderers`; "": the chat template.

    Raises:
        ValueError: see `RendererFormat`.
    """
    return RendererFormat(tokenizer, renderer) if renderer else ChatFormat(tokenizer)


def extended(
    tokenizer: Tokenizer, before: np.ndarray, whole: np.ndarray, *, skip_special: bool = False
) -> np.ndarray | None:
    """Return tokens that begin with `before`, int32 [s], and have the text of `whole`, int32 [t].

    None if the text of `whole` does not begin with the text of `before`.

    Args:
        skip_special: whether to ignore the text of special tokens.
    """
    if np.array_equal(whole[: len(before)], before):
        return whole
    text, start = (tokenizer.decode(ids, skip_special) for ids in (whole, before))
    if not text.startswith(start):
        return None
    return np.concatenate([before, tokenizer.encode(text[len(start) :], add_bos=False)])


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may have several parts.

    Raises:
        ValueError: a part of the content is not text.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise ValueError("messages: only parts of type text are supported. Send text alone")
    return "".join(part["text"] for part in content)


def _checked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is one text and whose tool calls are well formed."""
    for call in message.get("tool_calls") or ():
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise ValueError("messages: every tool call needs a function with name and arguments")
    return {**message, "role": message["role"], "content": text_of(message)}
