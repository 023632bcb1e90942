# SPDX-License-Identifier: Apache-2.0
"""Requests and responses of the HTTP routes, as JSON objects.

There are three kinds of route: `generate` takes token IDs from training clients (verifiers,
prime-rl); `completions` and `chat` serve OpenAI clients. Invariant: a parameter is honoured, or
refused by its name; only parameters that cannot change a response are accepted and not used.
"""

import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import MAX_STOP_IDS, SamplingSettings
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.serving.chat import ChatFormat, Messages

Kind = Literal["generate", "completions", "chat"]
MAX_SAMPLES = 128
"""Maximum number of samples of a request."""

# Parameters that are not supported: those that zero, false or an empty value turns off, and others
# with the value that changes nothing.
_OFF = frozenset(
    "presence_penalty frequency_penalty min_p logit_bias echo suffix top_logprobs prompt_logprobs "
    "functions use_beam_search bad_words continue_final_message documents".split()
)
_NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1,
    "length_penalty": 1,
    "best_of": 1,
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "add_generation_prompt": True,
    "spaces_between_special_tokens": True,
}
# Parameters that cannot change a response: labels, caches and the order of requests.
_UNUSED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key cache_salt priority "
    "request_id".split()
)
_WANTED = {
    "prompt": "wanted a text, a list of token IDs, or a list of either",
    "token_ids": "wanted a list of token IDs",
    "messages": "wanted a list of objects",
    "stop": "wanted up to 16 texts, none empty",
    "logprobs": "only sampled tokens have log-probs. Set 1 or true",
    "n": f"wanted 1 to {MAX_SAMPLES} samples",
}
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
}
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ApiError(Exception):
    """A refused request.

    Args:
        message: what is wrong, and what to do.
        status: HTTP status code.
        param: the parameter at fault.
        code: short name that clients compare with.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        kind = _ERRORS.get(self.status, "invalid_request_error")
        found = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": found}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _Request(BaseModel):
    """Parameters of all routes; None: the default of the model or run."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = ""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_tokens: int | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    logprobs: bool | Annotated[int, Field(ge=0, le=1)] = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class _Completion(_Request):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]


class _Chat(_Request):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}


class _Generate(_Request):
    token_ids: list[TokenId]


_MODELS: dict[Kind, type[_Request]] = {
    "generate": _Generate,
    "completions": _Completion,
    "chat": _Chat,
}


class Served(NamedTuple):
    """A served model, with the limits and settings of its requests.

    Attributes:
        model: name of the model.
        tokenizer: tokenizer of the model.
        chat: chat format of the model.
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


class Update(NamedTuple):
    """All tokens of one sample so far.

    Attributes:
        sample: index of the sample.
        tokens: int32 [t].
        token_logprobs: float32 [t], log-probs under the distribution that was sampled from.
        finish: "stop" or "length", the reason why the sample ended; "": it has not ended.
    """

    sample: int
    tokens: np.ndarray
    token_logprobs: np.ndarray
    finish: str = ""


@dataclasses.dataclass(eq=False)
class Generation:
    """Samples of one prompt of a request.

    Attributes:
        prompt: int32 [s].
        keys: uint32 [n 2], threefry key data of each sample.
        settings: sampling settings.
        is_streamed: whether updates before the end are wanted.
        notify: receives updates, or the error of a refused prompt, on another thread.
    """

    prompt: np.ndarray
    keys: np.ndarray
    settings: SamplingSettings
    is_streamed: bool
    notify: Callable[[Update | Exception], None]


@dataclasses.dataclass(frozen=True)
class Call:
    """A parsed request.

    Attributes:
        kind: kind of the route.
        served: the model.
        request: parameters of the request.
        prompts: int32 [s] each.
        settings: sampling settings of each prompt; their length limits differ.
        key: uint32 [2], threefry key data; sample j of prompt i draws from fold_in(key, i n + j).
        tools: tools of a chat.
    """

    kind: Kind
    served: Served
    request: _Request
    prompts: tuple[np.ndarray, ...]
    settings: tuple[SamplingSettings, ...]
    key: np.ndarray
    tools: Messages
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def num_samples(self) -> int:
        """Return the number of samples of all prompts."""
        return len(self.prompts) * self.request.n

    def generation(self, i: int, notify: Callable[[Update | Exception], None]) -> Generation:
        """Return the generation of prompt i; `notify` receives its updates."""
        n = self.request.n
        keys = fold_in(self.key, np.arange(i * n, (i + 1) * n))
        return Generation(self.prompts[i], keys, self.settings[i], self.request.stream, notify)

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of a response, up to its first stop string."""
        request = self.request
        text = self.served.tokenizer.decode(tokens, skip_special=request.skip_special_tokens)
        kept = request.include_stop_str_in_output
        ends = [i + kept * len(x) for x in request.stop if (i := text.find(x)) >= 0]
        return text[: min(ends, default=None)]

    def response(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Return the whole response; `updates` has the samples, prompt by prompt."""
        found = self.envelope([Choice(self, i).next(update) for i, update in enumerate(updates)])
        if self.kind == "chat" and self.request.return_token_ids:
            found["prompt_token_ids"] = self.prompts[0].tolist()
        found["usage"] = self.usage(updates)
        return found

    def envelope(self, choices: Sequence[Any]) -> dict[str, Any]:
        """Return a response, or a chunk of a stream, with these choices."""
        if self.kind == "generate":
            return {"request_id": self.id, "model": self.served.model, "choices": choices}
        name, start = "text_completion", "cmpl"
        if self.kind == "chat":
            name = "chat.completion.chunk" if self.request.stream else "chat.completion"
            start = "chatcmpl"
        return {
            "id": f"{start}-{self.id}",
            "object": name,
            "created": self.created,
            "model": self.served.model,
            "choices": choices,
        }

    def usage(self, updates: Sequence[Update]) -> dict[str, int]:
        """Return the token counts of the request."""
        prompt, sampled = sum(map(len, self.prompts)), sum(len(y.tokens) for y in updates)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }


class Choice:
    """One sample of a call: the whole choice, or in a stream what each update adds to it.

    Tool calls are parsed from whole messages, so a chat with tools receives its text at the end.

    Args:
        call: the call.
        index: index among all samples of the call.
    """

    def __init__(self, call: Call, index: int) -> None:
        self._call, self._index = call, index
        self._prompt = call.prompts[index // call.request.n]
        self._num_sent, self._text_sent, self._is_first = 0, "", True

    def next(self, update: Update) -> dict[str, Any] | None:
        """Return the choice for an update; None if it adds nothing."""
        kind, request, start = self._call.kind, self._call.request, self._num_sent
        if len(update.tokens) == start and not update.finish:
            return None
        choice: dict[str, Any] = {"index": self._index, "finish_reason": update.finish or None}
        choice["logprobs"] = None if request.logprobs is False else self._logprobs(update, start)
        if request.return_token_ids:
            choice["token_ids"] = update.tokens[start:].tolist()
            if self._is_first and (request.stream or kind == "completions"):
                choice["prompt_token_ids"] = self._prompt.tolist()
        if kind == "completions":
            choice["text"] = self._added(update)
        elif kind == "chat":
            choice["delta" if request.stream else "message"] = self._message(update, choice)
        self._num_sent, self._is_first = len(update.tokens), False
        return choice

    def _message(self, update: Update, choice: dict[str, Any]) -> dict[str, Any]:
        call, is_stream = self._call, self._call.request.stream
        delta: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
        if is_stream and not call.tools:
            return {**delta, "content": self._added(update)}
        if not update.finish:
            return delta
        text = call.text(update.tokens)
        message = call.served.chat.message(update.tokens, text, self._prompt, call.tools)
        if calls := message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls" if update.finish == "stop" else update.finish
            if is_stream:
                message["tool_calls"] = [{"index": i, **x} for i, x in enumerate(calls)]
        return message

    def _added(self, update: Update) -> str:
        """Return the new text, without an end that may be the start of a stop string or character.

        Such an end is sent when later tokens show what it is.
        """
        text = self._call.text(update.tokens)
        if not update.finish:
            text = text.rstrip("\ufffd")
            held = (
                n
                for stop in self._call.request.stop
                for n in range(1, len(stop))
                if text.endswith(stop[:n])
            )
            text = text[: len(text) - max(held, default=0)]
        added, self._text_sent = text[len(self._text_sent) :], max(text, self._text_sent, key=len)
        return added

    def _logprobs(self, update: Update, start: int) -> dict[str, Any]:
        """Return the log-probs of the tokens from `start` on."""
        call = self._call
        values = update.token_logprobs[start:].astype(float).tolist()
        texts = [
            f"token_id:{token}"
            if call.request.return_tokens_as_token_ids
            else call.served.tokenizer.decode([token], skip_special=False)
            for token in update.tokens[start:]
        ]
        if call.kind == "completions":
            found = {"tokens": texts, "token_logprobs": values}
            return {**found, "top_logprobs": None, "text_offset": None}
        own_bytes = map(call.served.tokenizer.token_bytes, update.tokens[start:])
        return {
            "content": [
                {"token": x, "logprob": value, "bytes": list(own), "top_logprobs": []}
                for x, value, own in zip(texts, values, own_bytes, strict=True)
            ]
        }


def parse(
    kind: Kind,
    body: Mapping[str, Any],
    served: Served,
    seed: int,
    extend: Callable[[np.ndarray], np.ndarray] = lambda prompt: prompt,
) -> Call:
    """Return the call of a request's JSON object.

    Args:
        kind: kind of the route.
        body: the JSON object.
        seed: seed of a request that has no `seed`.
        extend: returns the tokens of a prompt whose text or messages continue sampled tokens.

    Raises:
        ApiError: the request is refused.
    """
    request = _validated(kind, body)
    if request.model and request.model != served.model:
        raise ApiError(
            f"the model {request.model!r:.80} does not exist. This server has {served.model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    tools = [] if kind != "chat" or request.tool_choice == "none" else request.tools
    try:
        prompts = tuple(map(extend, _prompts(kind, request, served, tools)))
        stop_ids = _stop_ids(kind, request, served)
        settings = tuple(_settings(request, served, len(each), stop_ids) for each in prompts)
    except ValueError as error:
        raise ApiError(str(error)) from error
    if request.n * len(prompts) > (MAX_SAMPLES if served.sampling is None else 1):
        rule = _WANTED["n"] if served.sampling is None else "a turn of an episode has one sample"
        raise ApiError(f"n = {request.n} for {len(prompts)} prompts: {rule}", param="n")
    seed = seed if request.seed is None else request.seed
    key = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return Call(kind, served, request, prompts, settings, key, tools)


def _validated(kind: Kind, body: Mapping[str, Any]) -> Any:
    """Return the parameters of a request.

    Raises:
        ApiError: a parameter is not supported, or has a wrong value.
    """
    if kind == "generate" and isinstance(own := body.get("sampling_params"), dict):
        body = {**own, **{k: v for k, v in body.items() if k != "sampling_params"}}
    found = {k: v for k, v in body.items() if v is not None and k not in _UNUSED}
    # Special tokens are added to texts, and never to chats.
    neutral = {**_NEUTRAL, "add_special_tokens": kind == "completions"}
    for name in (_OFF | neutral.keys()) & found.keys():
        value = found.pop(name)
        if value if name in _OFF else value != neutral[name]:
            raise ApiError(f"{name} = {value!r:.80} is not supported. Leave it out", param=name)
    if isinstance(found.get("stop"), str):
        found["stop"] = [found["stop"]]
    try:
        request = _MODELS[kind].model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        rule = _WANTED.get(name, first["msg"])
        if first["type"] == "extra_forbidden":
            rule = "the parameter is not supported. Leave it out"
        shown = "" if first["type"] == "missing" else f" = {first['input']!r:.80}"
        raise ApiError(f"{name}{shown}: {rule}", param=name) from None
    if kind != "generate":
        return request
    always = ("return_token_ids", "return_tokens_as_token_ids", "logprobs")
    return request.model_copy(update=dict.fromkeys(always, True))


def _prompts(kind: Kind, request: Any, served: Served, tools: Messages) -> tuple[np.ndarray, ...]:
    """Return the prompts of a request.

    Raises:
        ApiError, ValueError: a prompt is empty, or cannot be tokenized.
    """
    if kind == "generate":
        prompts = [request.token_ids]
    elif kind == "chat":
        prompts = [served.chat.prompt(request.messages, tools, request.chat_template_kwargs)]
    else:
        many = request.prompt
        if isinstance(many, str) or not many or isinstance(many[0], int):
            many = [many]
        encode = served.tokenizer.encode
        prompts = [encode(x, add_bos=True) if isinstance(x, str) else x for x in many]
    if any(len(x) == 0 for x in prompts):
        raise ApiError("the prompt is empty. Give at least one token")
    return tuple(np.asarray(x, np.int32) for x in prompts)


def _stop_ids(kind: Kind, request: _Request, served: Served) -> tuple[int, ...]:
    if served.sampling is not None:
        return served.eos_ids
    own = () if request.ignore_eos else served.eos_ids
    more = served.chat.stop_ids if kind == "chat" else ()
    found = tuple(dict.fromkeys((*own, *more, *request.stop_token_ids)))
    if len(found) > MAX_STOP_IDS:
        raise ApiError(
            f"stop_token_ids: with the model's own there are {len(found)} stop tokens, but the "
            f"limit is {MAX_STOP_IDS}. Send fewer stop_token_ids"
        )
    return found


def _settings(
    request: _Request, served: Served, prompt_length: int, stop_ids: tuple[int, ...]
) -> SamplingSettings:
    room, run = served.max_length - prompt_length, served.sampling
    wanted = request.max_completion_tokens or request.max_tokens
    if room < 1 or (wanted is not None and wanted > room and run is None):
        raise ApiError(
            f"the prompt has {prompt_length} tokens and the response may have "
            f"{wanted or 1}; the maximum context length is {served.max_length}. Shorten the "
            "prompt, or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    stops = None
    if request.stop:
        if request.min_tokens:
            raise ApiError(
                "min_tokens with stop: a stop text cannot be prevented before min_tokens tokens. "
                "Leave out one of them"
            )
        decode = served.tokenizer.decode
        stops = StopStrings(request.stop, lambda ids: decode(ids, skip_special=False))
    default = run or SamplingSettings(room)
    given: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": None if request.top_k is None else max(0, request.top_k),
        "min_new_tokens": request.min_tokens,
    }
    if run is not None:
        fixed: dict[str, Any] = {name: (x, getattr(run, name)) for name, x in given.items()}
        fixed["seed"] = request.seed, None
        fixed["ignore_eos"] = request.ignore_eos, False
        fixed["stop_token_ids"] = sorted({*request.stop_token_ids} - {*served.eos_ids}), []
        for name, (value, own) in fixed.items():
            if value not in (None, own):
                text = f"{name} = {value}: the training run has {own}. Leave it out"
                raise ApiError(text, param=name)
    return SamplingSettings(
        room if wanted is None else min(wanted, room),
        stop_ids=stop_ids,
        stop_strings=stops,
        **{name: getattr(default, name) if x is None else x for name, x in given.items()},
    )
