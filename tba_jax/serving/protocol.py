# SPDX-License-Identifier: Apache-2.0
"""Requests and responses of the HTTP routes, as JSON objects.

There are three kinds of route: `generate` takes token IDs from training clients (verifiers,
prime-rl); `completions` and `chat` serve OpenAI clients. Invariant: a parameter is honoured, or
refused by its name; only parameters that cannot change a response are accepted and not used.
"""

import dataclasses
import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import MAX_STOP_IDS, SamplingSettings
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.serving.chat import Chat, ChatFormat

Kind = Literal["generate", "completions", "chat"]
MAX_SAMPLES = 128
"""Maximum number of samples of a request."""

# Parameters that cannot change a response: labels, caches and the order of requests.
_UNUSED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key cache_salt priority "
    "request_id".split()
)
# Parameters that are not supported, with the values that change nothing.
_NEUTRAL: dict[str, Any] = dict.fromkeys(
    ("presence_penalty", "frequency_penalty", "min_p", "top_logprobs", "prompt_logprobs"), 0
)
_NEUTRAL |= {"repetition_penalty": 1, "logit_bias": {}, "response_format": {"type": "text"}}
_NEUTRAL |= {"echo": False, "parallel_tool_calls": True, "add_generation_prompt": True}
# Sampling settings that a training run sets.
_SETTINGS = {"temperature", "top_p", "top_k", "min_tokens"}
# What is wanted of parameters about which pydantic's messages do not say it.
_WANTED = {
    "prompt": "wanted a text or a list of token IDs",
    "token_ids": "wanted a list of token IDs",
    "messages": "wanted a list of objects with role and content, which is text; a tool call has a "
    "function",
    "logprobs": "wanted 1 or true: only sampled tokens have log-probs",
}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}


class ApiError(Exception):
    """A refused request: what is wrong and what to do, and the HTTP status.

    `param` is the parameter at fault, and `code` a short name that clients compare with.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        kind = _ERRORS.get(status, "invalid_request_error")
        self.status, self.code = status, code
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Served(NamedTuple):
    """A served model, with the limits and settings of its requests.

    Attributes:
        model: name of the model.
        tokenizer, chat: its tokenizer and chat format.
        eos_ids: tokens that end a response.
        max_length: maximum number of tokens of prompt and response together.
        sampling: sampling settings of a training run, which requests cannot change; None: requests
            have their own.
    """

    model: str
    tokenizer: Tokenizer
    chat: ChatFormat
    eos_ids: tuple[int, ...]
    max_length: int
    sampling: SamplingSettings | None = None


# --- parameters ----------------------------------------------------------------------------------

_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Length = Annotated[int, Field(ge=1)]
_Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class _Request(BaseModel, extra="forbid", strict=True):
    """Parameters of all routes; None: the default of the model or run."""

    objects: ClassVar = ("text_completion", "text_completion", "cmpl")
    """`object` of a response and of a chunk of a stream, and the start of `id`."""

    model: str = ""
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    seed: int | None = Field(None, ge=0, lt=2**63)
    max_tokens: _Length | None = None
    max_completion_tokens: _Length | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, AfterValidator(lambda k: max(0, k))] | None = None  # -1: off
    min_tokens: int | None = Field(None, serialization_alias="min_new_tokens")
    stop: _Texts = Field([], max_length=16)
    stop_token_ids: list[_TokenId] = Field([], max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    logprobs: bool | Annotated[int, Field(ge=0, le=1)] = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class _Completion(_Request):
    prompt: str | list[_TokenId]


class _Generate(_Request):
    logprobs: bool | int = True
    return_token_ids: bool = True
    return_tokens_as_token_ids: bool = True
    prompt: list[_TokenId] = Field(alias="token_ids")


def _text(content: Any) -> str:
    """Return the text of a message's content, which may have several parts."""
    parts = [{"text": content}] if isinstance(content, str) else content or ()
    return "".join(part.get("text", "") for part in parts)


class _ToolCall(BaseModel, extra="allow"):
    function: dict[Literal["name", "arguments"], Any]


class _Message(BaseModel, extra="allow"):
    role: str
    content: Annotated[
        str | list[dict[Literal["type", "text"], str]] | None, AfterValidator(_text)
    ] = ""
    tool_calls: list[_ToolCall] | None = None


class _Chat(_Request):
    objects: ClassVar = ("chat.completion", "chat.completion.chunk", "chatcmpl")
    messages: list[_Message]
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def chat(self) -> Chat:
        """Return the messages, and the tools that the policy may call."""
        messages = [{"content": "", **x.model_dump(exclude_unset=True)} for x in self.messages]
        tools = [] if self.tool_choice == "none" else self.tools
        return Chat(messages, tools, self.chat_template_kwargs)


_MODELS: dict[Kind, Any] = {"generate": _Generate, "completions": _Completion, "chat": _Chat}


def parse(kind: Kind, body: Mapping[str, Any], served: Served, seed: int) -> "Call":
    """Return the call of a request's JSON object, or raise ApiError if the request is refused.

    `seed` is that of a request that has none.
    """
    request = _validated(kind, body)
    if request.model and request.model != served.model:
        text = f"the model {request.model!r:.80} does not exist. This server has {served.model!r}"
        raise ApiError(text, status=404, param="model", code="model_not_found")
    chat = request.chat if kind == "chat" else Chat(())
    try:
        prompt = served.chat.prompt(chat) if kind == "chat" else request.prompt
        if isinstance(prompt, str):
            prompt = served.tokenizer.encode(prompt, add_bos=True)
        if len(prompt) == 0:
            raise ValueError("the prompt is empty. Give at least one token")
        settings = _settings(request, chat, served, len(prompt))
    except ValueError as error:
        raise ApiError(str(error)) from error
    seed = seed if request.seed is None else request.seed
    keys = fold_in(np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32), np.arange(request.n))
    return Call(kind, served, request, chat, np.asarray(prompt, np.int32), settings, keys)


def _validated(kind: Kind, body: Mapping[str, Any]) -> Any:
    """Return the parameters of a request, or raise ApiError with the name of a wrong one."""
    given = dict(body)
    if kind == "generate" and isinstance(own := given.pop("sampling_params", None), dict):
        given = {**own, **given}
    # A chat's template writes special tokens.
    neutral = dict.fromkeys(given) | _NEUTRAL | {"add_special_tokens": kind == "completions"}
    given = {k: v for k, v in given.items() if v not in (None, neutral[k]) and k not in _UNUSED}
    try:
        return _MODELS[kind].model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        rule = _WANTED.get(name, first["msg"])
        if first["loc"] == (name,) and first["type"] == "extra_forbidden":
            rule = "the parameter is not supported. Leave it out"
        shown = f" = {given[name]!r:.80}" if name in given else ""
        raise ApiError(f"{name}{shown}: {rule}", param=name) from None


def _settings(request: _Request, chat: Chat, served: Served, length: int) -> SamplingSettings:
    """Return the sampling settings of a prompt of a length, or raise ApiError or ValueError."""
    room, run = served.max_length - length, served.sampling
    wanted = request.max_completion_tokens or request.max_tokens
    if room < 1 or (wanted and wanted > room and run is None):
        text = f"the prompt has {length} tokens and the response may have {wanted or 1}; the "
        text += f"maximum context length is {served.max_length}. Shorten the prompt, or lower "
        raise ApiError(f"{text}max_tokens", param="max_tokens", code="context_length_exceeded")
    if request.stop and request.min_tokens:
        raise ValueError("min_tokens with stop: a stop text may come earlier. Leave out one")
    decode = functools.partial(served.tokenizer.decode, skip_special=False)
    stops = StopStrings(request.stop, decode) if request.stop else None
    limits: Any = {"max_new_tokens": min(wanted or room, room), "stop_strings": stops}
    given = request.model_dump(include=_SETTINGS, by_alias=True, exclude_none=True)
    if run is None:
        own = () if request.ignore_eos else served.eos_ids
        ends = (*own, *(served.chat.stop_ids if chat.messages else ()), *request.stop_token_ids)
        return SamplingSettings(**limits, **given, stop_ids=tuple(dict.fromkeys(ends)))
    more = sorted({*request.stop_token_ids} - {*served.eos_ids})
    given |= {"n": request.n, "seed": request.seed, "ignore_eos": request.ignore_eos}
    fixed = vars(run) | {"n": 1, "seed": None, "ignore_eos": False}
    for name, value in {**given, "stop_token_ids": more}.items():
        if value != (has := fixed.get(name, [])):
            name = "min_tokens" if name == "min_new_tokens" else name
            text = f"{name} = {value}: the training run has {has}. Leave it out"
            raise ApiError(text, param=name)
    return dataclasses.replace(run, stop_ids=served.eos_ids, **limits)


# --- responses -----------------------------------------------------------------------------------


class Update(NamedTuple):
    """All tokens of one sample so far.

    Attributes:
        tokens: int32 [t].
        token_logprobs: float32 [t], log-probs under the distribution that was sampled from.
        finish: "stop" or "length", the reason why the sample ended; "": it has not ended.
    """

    tokens: np.ndarray
    token_logprobs: np.ndarray
    finish: str = ""


NOTHING = Update(np.empty(0, np.int32), np.empty(0, np.float32))
"""A sample without tokens."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A parsed request.

    Attributes:
        request: parameters of the request.
        chat: messages and tools of a chat; no messages for other kinds.
        prompt: int32 [s].
        keys: uint32 [n 2], threefry key data of each sample.
    """

    kind: Kind
    served: Served
    request: Any
    chat: Chat
    prompt: np.ndarray
    settings: SamplingSettings
    keys: np.ndarray
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def response(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Return the whole response, of all samples."""
        choices = list(map(self.choice, range(len(updates)), updates))
        found = self.envelope(choices, updates)
        if self.request.return_token_ids:
            found["prompt_token_ids"] = self.prompt.tolist()
        return found

    def envelope(self, choices: Sequence[Any], updates: Sequence[Update] = ()) -> dict[str, Any]:
        """Return a response, or a chunk of a stream, with choices, and token counts of updates."""
        found = {"model": self.served.model, "choices": choices, "created": self.created}
        if updates:
            prompt, sampled = len(self.prompt), sum(len(y.tokens) for y in updates)
            counts = {"prompt_tokens": prompt, "completion_tokens": sampled}
            found["usage"] = {**counts, "total_tokens": prompt + sampled}
        if self.kind == "generate":
            return found | {"request_id": self.id}
        *names, start = self.request.objects
        return found | {"id": f"{start}-{self.id}", "object": names[self.request.stream]}

    def choice(self, index: int, update: Update, before: Update = NOTHING) -> dict[str, Any]:
        """Return the choice of a sample, or in a stream what an update adds to the one before it.

        Tool calls are parsed from whole messages, so a chat with tools receives its text at the
        end.
        """
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
        if request.stream and not (self.chat.tools and update.finish):
            delta = {} if start else {"role": "assistant"}
            return choice | {"delta": delta if self.chat.tools else {**delta, "content": added}}
        message = self.message(update)
        for i, call in enumerate(message.get("tool_calls", ())):
            call |= {"index": i} if request.stream else {}
            choice["finish_reason"] = update.finish.replace("stop", "tool_calls")
        return choice | {"delta" if request.stream else "message": message}

    def message(self, update: Update) -> dict[str, Any]:
        """Return the message of a sample that has ended."""
        read = self.served.chat.read
        return read(update.tokens, self._text(update), self.prompt, self.chat.tools)[0]

    def _text(self, update: Update) -> str:
        """Return the text of a sample up to its first stop string.

        An unfinished sample's end that may be the start of a stop string or character is left out;
        it is sent when later tokens show what it is.
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
        parts = [list(tokenizer.token_bytes(token)) for token in tokens]
        content = [
            {"token": text, "logprob": value, "bytes": part, "top_logprobs": []}
            for text, value, part in zip(texts, values, parts, strict=True)
        ]
        return {"content": content}
