# SPDX-License-Identifier: Apache-2.0
"""Requests and responses of the HTTP routes, as JSON objects.

`generate` is for training clients (verifiers, prime-rl), which send token IDs; `completions` and
`chat` are for OpenAI clients. Invariant: a request is refused by the name of any parameter that the
server does not support, unless the parameter or its value cannot change a response.
"""

import dataclasses
import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, FiniteFloat, ValidationError

from tba_jax.decoding.requests import MAX_STOP_IDS, SamplingSettings, StopStrings
from tba_jax.decoding.sampling import fold_in
from tba_jax.serving.chat import Chat, ChatFormat, Served
from tba_jax.serving.failures import ApiError

Kind = Literal["generate", "completions", "chat"]

# Parameters that are refused, with the value that changes no response and is therefore accepted.
# `Any`: every value is accepted, because labels, caches and priorities change no response.
_REFUSED: dict[str, Any] = dict.fromkeys(
    ("presence_penalty", "frequency_penalty", "min_p", "top_logprobs", "prompt_logprobs"), 0
)
_REFUSED |= {"repetition_penalty": 1, "logit_bias": {}, "response_format": {"type": "text"}}
_REFUSED |= {"echo": False, "parallel_tool_calls": True, "add_generation_prompt": True}
_REFUSED |= dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier"), Any)
_REFUSED |= dict.fromkeys(("prompt_cache_key", "cache_salt", "priority", "request_id"), Any)

# --- requests ------------------------------------------------------------------------------------

_TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
_Length = Annotated[int, Field(ge=1)]
_Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class _Request(BaseModel, extra="forbid", strict=True):
    """Parameters of all routes; an error has the description of a field that has one."""

    objects: ClassVar = ("cmpl", "text_completion", "text_completion")
    """Start of `id`, `object` of a response, and `object` of a part of a stream."""
    chat: ClassVar[Any] = Chat(())

    model: str = ""
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=0, lt=2**63)
    max_tokens: _Length | None = None
    max_completion_tokens: _Length | None = None
    temperature: FiniteFloat = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, AfterValidator(lambda k: max(0, k))] = 0  # -1: all tokens, as 0
    min_tokens: int = Field(0, ge=0)
    stop: _Texts = Field([], max_length=16)
    stop_token_ids: _TokenIds = Field([], max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    logprobs: bool | Annotated[int, Field(ge=0, le=1)] = Field(
        False, description="1 or true: only sampled tokens have log-probs"
    )
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class _Completion(_Request):
    prompt: str | _TokenIds = Field(description="a text or a list of token IDs")


class _Generate(_Request):
    prompt: _TokenIds = Field(alias="token_ids")
    logprobs: bool | int = True
    return_token_ids: bool = True
    return_tokens_as_token_ids: bool = True


def _text(content: Any) -> str:
    """Return the text of a message's content: a text, a list of texts with their type, or None."""
    parts = [{"text": content}] if isinstance(content, str) else content or ()
    return "".join(part.get("text", "") for part in parts)


def _tried(variables: dict[str, Any], info: Any) -> dict[str, Any]:
    """Format a chat with the variables, so that a refusal names the variables."""
    info.context.prompt(Chat([{"role": "user", "content": ""}], variables=variables))
    return variables


class _ToolCall(BaseModel, extra="allow"):
    function: dict[Literal["name", "arguments"], Any]


class _Message(BaseModel, extra="allow"):
    role: str
    content: Annotated[
        str | list[dict[Literal["type", "text"], str]] | None, AfterValidator(_text)
    ] = ""
    tool_calls: list[_ToolCall] | None = None


class _Chat(_Request):
    objects: ClassVar = ("chatcmpl", "chat.completion", "chat.completion.chunk")
    messages: list[_Message] = Field(
        description="a list of objects with role and content (text); a tool call has a function"
    )
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_tried)] = {}

    @property
    def chat(self) -> Chat:
        messages = [{"content": "", **x.model_dump(exclude_unset=True)} for x in self.messages]
        tools = [] if self.tool_choice == "none" else self.tools
        return Chat(messages, tools, self.chat_template_kwargs)


_REQUESTS: dict[Kind, Any] = {"generate": _Generate, "completions": _Completion, "chat": _Chat}


def parse(kind: Kind, body: Mapping[str, Any], served: Served, seed: int) -> "Call":
    """Return the call of a request's JSON object, or raise ApiError if the request is refused.

    `seed` is the seed of a request that has none.
    """
    request = _validated(kind, body, served.chat)
    if request.model not in ("", served.model):
        text = f"the model {request.model!r:.80} does not exist. This server has {served.model!r}"
        raise ApiError(text, status=404, param="model", code="model_not_found")
    chat = request.chat
    try:
        prompt = served.chat.prompt(chat) if kind == "chat" else request.prompt
    except ValueError as error:
        raise ApiError(str(error), code="chat_format") from error
    try:
        if isinstance(prompt, str):
            prompt = served.tokenizer.encode(prompt, add_bos=True)
        if len(prompt) == 0:
            raise ValueError("the prompt is empty. Give at least one token")
        settings = _settings(request, served, len(prompt))
    except ValueError as error:
        raise ApiError(str(error)) from error
    seed = seed if request.seed is None else request.seed
    keys = fold_in(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), np.arange(request.n))
    return Call(kind, served, request, chat, np.asarray(prompt, np.int32), settings, keys)


def _validated(kind: Kind, body: Mapping[str, Any], chat: ChatFormat) -> Any:
    """Return the parameters of a request, or raise ApiError with the name of a wrong one."""
    model, given = _REQUESTS[kind], dict(body)
    if kind == "generate" and isinstance(given.get("sampling_params"), dict):
        given = given.pop("sampling_params") | given
    # The template of a chat writes special tokens itself.
    refused = dict.fromkeys(given) | _REFUSED | {"add_special_tokens": kind == "completions"}
    given = {k: v for k, v in given.items() if v not in (None, refused[k]) and refused[k] != Any}
    try:
        return model.model_validate(given, context=chat)
    except ValidationError as error:
        first = error.errors()[0]
    name = str(first["loc"][0])
    wanted = getattr(model.model_fields.get(name), "description", None)
    rule = f"wanted {wanted}" if wanted else first["msg"]
    if first["type"] == "extra_forbidden":
        rule = "the parameter is not supported. Leave it out"
    value = f" = {given[name]!r:.80}" if name in given else ""
    raise ApiError(f"{name}{value}: {rule}", param=name)


def _settings(request: _Request, served: Served, length: int) -> SamplingSettings:
    """Return the sampling settings of a request whose prompt has `length` tokens."""
    room, run = served.max_length - length, served.sampling
    most = request.max_completion_tokens or request.max_tokens or max(room, 1)
    if room < 1 or (most > room and run is None):
        raise ApiError(
            f"max_tokens: the prompt has {length} tokens and the response may have {most}; the "
            f"maximum context length is {served.max_length}. Shorten one of them",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if request.stop and request.min_tokens:
        raise ValueError("min_tokens with stop: a stop text may come earlier. Leave out one")
    decode = functools.partial(served.tokenizer.decode, skip_special=False)
    stops = StopStrings(request.stop, decode) if request.stop else None
    limits: Any = {"max_new_tokens": min(most, room), "stop_strings": stops}
    if run is not None:  # the request may repeat the run's settings, and have no others
        fixed = {name: getattr(run, name) for name in ("temperature", "top_p", "top_k")}
        fixed |= {"min_tokens": run.min_new_tokens, "n": 1, "seed": None, "ignore_eos": False}
        given = request.model_dump(include={*fixed}, exclude_unset=True)
        given["stop_token_ids"] = sorted({*request.stop_token_ids} - {*served.eos_ids})
        for name, value in given.items():
            if value != (wanted := fixed.get(name, [])):
                text = f"{name} = {value}: the training run has {wanted}. Leave it out"
                raise ApiError(text, param=name)
        return dataclasses.replace(run, stop_ids=served.eos_ids, **limits)
    ends = [] if request.ignore_eos else [*served.eos_ids]
    ends += [*(served.chat.stop_ids if request.chat.messages else ()), *request.stop_token_ids]
    limits |= {"min_new_tokens": request.min_tokens, "stop_ids": tuple(dict.fromkeys(ends))}
    own = request.model_dump(include={"temperature", "top_p", "top_k"})
    return SamplingSettings(**limits, **own)


# --- responses -----------------------------------------------------------------------------------


class Update(NamedTuple):
    """All tokens of one sample so far."""

    tokens: np.ndarray  # int32 [t]
    token_logprobs: np.ndarray  # float32 [t], under the distribution that was sampled from
    finish: str = ""  # "stop" or "length", the reason of the end; "": the sample has not ended


NOTHING = Update(np.empty(0, np.int32), np.empty(0, np.float32))  # before the first token


@dataclasses.dataclass(frozen=True)
class Call:
    """A parsed request, which makes its response."""

    kind: Kind
    served: Served
    request: Any  # its parameters, a `_Request`
    chat: Chat  # messages and tools of a chat; no messages for other kinds
    prompt: np.ndarray  # int32 [s]
    settings: SamplingSettings
    keys: np.ndarray  # uint32 [n 2], threefry key data of each sample
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def response(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Return the whole response, of all samples."""
        found = self.envelope(list(map(self.choice, range(len(updates)), updates)), updates)
        if self.request.return_token_ids:
            found["prompt_token_ids"] = self.prompt.tolist()
        return found

    def envelope(self, choices: Sequence[Any], updates: Sequence[Update] = ()) -> dict[str, Any]:
        """Return a response or a part of a stream; updates of all samples add numbers of tokens."""
        found = {"model": self.served.model, "choices": choices, "created": self.created}
        if updates:
            prompt, sampled = len(self.prompt), sum(len(y.tokens) for y in updates)
            counts = {"prompt_tokens": prompt, "completion_tokens": sampled}
            found["usage"] = {**counts, "total_tokens": prompt + sampled}
        if self.kind == "generate":
            return found | {"request_id": self.id}
        start, *objects = self.request.objects
        return found | {"id": f"{start}-{self.id}", "object": objects[self.request.stream]}

    def choice(self, index: int, update: Update, before: Update = NOTHING) -> dict[str, Any]:
        """Return the choice of a sample; in a stream, its tokens since the update `before`."""
        request, start = self.request, len(before.tokens)
        choice: dict[str, Any] = {"index": index, "finish_reason": update.finish or None}
        choice["logprobs"] = None if request.logprobs is False else self._logprobs(update, start)
        if request.return_token_ids:
            choice["token_ids"] = update.tokens[start:].tolist()
            choice |= {} if start else {"prompt_token_ids": self.prompt.tolist()}
        if self.kind == "generate":
            return choice
        added = self._text(update)[len(self._text(before)) :]
        if self.kind == "completions":
            return choice | {"text": added}
        # Thinking and tool calls are read from whole messages: a stream has them at its end.
        if not request.stream or (self.served.chat.has_parts and update.finish):
            message = self.message(update)
        else:
            role: dict[str, Any] = {} if start else {"role": "assistant"}
            message = role if self.served.chat.has_parts else {**role, "content": added}
        for i, call in enumerate(message.get("tool_calls", ())):
            call |= {"index": i} if request.stream else {}
            choice["finish_reason"] = update.finish.replace("stop", "tool_calls")
        return choice | {"delta" if request.stream else "message": message}

    def message(self, update: Update) -> dict[str, Any]:
        """Return the message of a finished sample, or raise ValueError if it cannot be read."""
        read = self.served.chat.read
        return read(update.tokens, self._text(update), self.prompt, self.chat.tools)[0]

    def _text(self, update: Update) -> str:
        """Return the text of a sample up to its first stop text.

        The text of an unfinished sample lacks its end if that may be the start of a stop text or of
        a character.
        """
        request = self.request
        text = self.served.tokenizer.decode(update.tokens, skip_special=request.skip_special_tokens)
        kept = request.include_stop_str_in_output
        ends = [i + kept * len(x) for x in request.stop if (i := text.find(x)) >= 0]
        text = text[: min(ends, default=None)]
        if update.finish:
            return text
        text = text.rstrip("\ufffd")
        starts = (stop[:n] for stop in request.stop for n in range(1, len(stop)))
        held = max((len(each) for each in starts if text.endswith(each)), default=0)
        return text[: len(text) - held]

    def _logprobs(self, update: Update, start: int) -> dict[str, Any]:
        """Return the log-probs of the tokens from `start` on."""
        tokenizer, tokens = self.served.tokenizer, update.tokens[start:]
        values = update.token_logprobs[start:].astype(float).tolist()
        texts = [tokenizer.decode([token], skip_special=False) for token in tokens]
        if self.request.return_tokens_as_token_ids:
            texts = [f"token_id:{token}" for token in tokens]
        if self.kind == "completions":
            found = {"tokens": texts, "token_logprobs": values}
            return {**found, "top_logprobs": None, "text_offset": None}
        content = [
            {"token": text, "logprob": x, "bytes": [*tokenizer.token_bytes(i)], "top_logprobs": []}
            for i, text, x in zip(tokens, texts, values, strict=True)
        ]
        return {"content": content}
