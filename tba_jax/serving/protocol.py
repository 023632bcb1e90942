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
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import MAX_STOP_IDS, SamplingSettings
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.serving.chat import ChatFormat, Messages

Kind = Literal["generate", "completions", "chat"]
MAX_SAMPLES = 128
"""Maximum number of samples of a request."""

# Parameters that cannot change a response: labels, caches and the order of requests.
_UNUSED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key cache_salt priority "
    "request_id".split()
)
_ERRORS = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}


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


# Types of parameters; the last three have one value, which changes nothing.
_TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Stop = Annotated[str, Field(min_length=1)]
_Zero = Annotated[float, Field(ge=0, le=0)]
_One = Annotated[float, Field(ge=1, le=1)]
_Text = dict[Literal["type"], Literal["text"]]
_STRICT = ConfigDict(extra="forbid", strict=True)


def _wanted(text: str, **options: Any) -> Any:
    """Return a field; an error about its value says this text."""
    return Field(description=f"wanted {text}", **options)


class _StreamOptions(BaseModel):
    model_config = _STRICT

    include_usage: bool = False


class _Request(BaseModel):
    """Parameters of all routes; None: the default of the model or run."""

    model_config = _STRICT

    model: str = ""
    n: int = _wanted(f"1 to {MAX_SAMPLES} samples", default=1, ge=1, le=MAX_SAMPLES)
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, AfterValidator(lambda k: max(0, k))] | None = None  # -1: off
    min_tokens: int | None = None
    stop: Annotated[
        list[_Stop], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
    ] = _wanted("up to 16 texts, none empty", default=[], max_length=16)
    stop_token_ids: list[_TokenId] = []
    ignore_eos: bool = False
    logprobs: bool | Annotated[int, Field(ge=0, le=1)] = _wanted(
        "1 or true: only sampled tokens have log-probs", default=False
    )
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    # Not supported: only the value that changes nothing is accepted.
    presence_penalty: _Zero = 0
    frequency_penalty: _Zero = 0
    repetition_penalty: _One = 1
    min_p: _Zero = 0
    top_logprobs: _Zero = 0
    prompt_logprobs: _Zero = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}
    response_format: _Text = {}


class _Completion(_Request):
    prompt: str | list[_TokenId] = _wanted("a text or a list of token IDs")
    echo: Literal[False] = False
    add_special_tokens: Literal[True] = True


class _Chat(_Request):
    messages: list[dict[str, Any]] = _wanted("a list of objects")
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    parallel_tool_calls: Literal[True] = True
    add_generation_prompt: Literal[True] = True
    add_special_tokens: Literal[False] = False  # the template writes them


class _Generate(_Request):
    logprobs: bool | int = True
    return_token_ids: bool = True
    return_tokens_as_token_ids: bool = True
    token_ids: list[_TokenId] = _wanted("a list of token IDs")


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
        kind: kind of the route.
        served: the model.
        request: parameters of the request.
        prompt: int32 [s].
        settings: sampling settings.
        keys: uint32 [n 2], threefry key data of each sample.
        tools: tools of a chat.
    """

    kind: Kind
    served: Served
    request: Any
    prompt: np.ndarray
    settings: SamplingSettings
    keys: np.ndarray
    tools: Messages
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def response(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Return the whole response, of all samples."""
        choices = list(map(self.choice, range(len(updates)), updates))
        found = self.envelope(choices) | {"usage": self.usage(updates)}
        if self.kind == "chat" and self.request.return_token_ids:
            found["prompt_token_ids"] = self.prompt.tolist()
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
        prompt, sampled = len(self.prompt), sum(len(y.tokens) for y in updates)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

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
            if not start and (request.stream or self.kind == "completions"):
                choice["prompt_token_ids"] = self.prompt.tolist()
        if self.kind == "completions":
            choice["text"] = self._added(update, before)
        elif self.kind == "chat" and request.stream and not (self.tools and update.finish):
            choice["delta"] = {} if start else {"role": "assistant"}
            if not self.tools:
                choice["delta"]["content"] = self._added(update, before)
        elif self.kind == "chat":
            message = self.message(update)
            if calls := message.get("tool_calls"):
                is_whole = update.finish == "stop"
                choice["finish_reason"] = "tool_calls" if is_whole else update.finish
                if request.stream:
                    message["tool_calls"] = [{"index": i, **x} for i, x in enumerate(calls)]
            choice["delta" if request.stream else "message"] = message
        return choice

    def message(self, update: Update) -> dict[str, Any]:
        """Return the message of a sample that has ended."""
        text = self._text(update)
        return self.served.chat.read(update.tokens, text, self.prompt, self.tools)[0]

    def _added(self, update: Update, before: Update) -> str:
        return self._text(update)[len(self._text(before)) :]

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
        values = update.token_logprobs[start:].astype(float).tolist()
        texts = [
            f"token_id:{token}"
            if self.request.return_tokens_as_token_ids
            else self.served.tokenizer.decode([token], skip_special=False)
            for token in update.tokens[start:]
        ]
        if self.kind == "completions":
            found = {"tokens": texts, "token_logprobs": values}
            return {**found, "top_logprobs": None, "text_offset": None}
        own_bytes = map(self.served.tokenizer.token_bytes, update.tokens[start:])
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
        prompt = extend(_prompt(kind, request, served, tools))
        settings = _settings(kind, request, served, len(prompt))
    except ValueError as error:
        raise ApiError(str(error)) from error
    seed = seed if request.seed is None else request.seed
    key = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return Call(kind, served, request, prompt, settings, fold_in(key, np.arange(request.n)), tools)


def _validated(kind: Kind, body: Mapping[str, Any]) -> Any:
    """Return the parameters of a request.

    Raises:
        ApiError: a parameter is not supported, or has a wrong value.
    """
    if kind == "generate" and isinstance(own := body.get("sampling_params"), dict):
        body = {**own, **{k: v for k, v in body.items() if k != "sampling_params"}}
    model = _MODELS[kind]
    try:
        given = {k: v for k, v in body.items() if v is not None and k not in _UNUSED}
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            rule = "the parameter is not supported. Leave it out"
        else:
            rule = model.model_fields[name].description or first["msg"]
        shown = "" if first["type"] == "missing" else f" = {body[name]!r:.80}"
        raise ApiError(f"{name}{shown}: {rule}", param=name) from None


def _prompt(kind: Kind, request: Any, served: Served, tools: Messages) -> np.ndarray:
    """Return the prompt of a request, int32 [s].

    Raises:
        ApiError, ValueError: the prompt is empty, or cannot be tokenized.
    """
    if kind == "chat":
        prompt = served.chat.prompt(request.messages, tools, request.chat_template_kwargs)
    else:
        prompt = request.token_ids if kind == "generate" else request.prompt
        if isinstance(prompt, str):
            prompt = served.tokenizer.encode(prompt, add_bos=True)
    if len(prompt) == 0:
        raise ApiError("the prompt is empty. Give at least one token")
    return np.asarray(prompt, np.int32)


def _settings(
    kind: Kind, request: _Request, served: Served, prompt_length: int
) -> SamplingSettings:
    """Return the sampling settings of a prompt.

    Raises:
        ApiError, ValueError: the response has no room, or a value is out of range.
    """
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
    decode, stops = served.tokenizer.decode, None
    if request.stop:
        if request.min_tokens:
            raise ApiError(
                "min_tokens with stop: a stop text cannot be prevented before min_tokens tokens. "
                "Leave out one of them"
            )
        stops = StopStrings(request.stop, lambda ids: decode(ids, skip_special=False))
    most = room if wanted is None else min(wanted, room)
    if run is not None:
        fixed = {"n": 1, "temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
        fixed |= {"min_tokens": run.min_new_tokens, "seed": None, "ignore_eos": False}
        fixed |= {"stop_token_ids": []}
        more = sorted({*request.stop_token_ids} - {*served.eos_ids})
        given = request.model_copy(update={"stop_token_ids": more})
        for name, own in fixed.items():
            if (value := getattr(given, name)) not in (None, own):
                text = f"{name} = {value}: the training run has {own}. Leave it out"
                raise ApiError(text, param=name)
        return dataclasses.replace(
            run, max_new_tokens=most, stop_ids=served.eos_ids, stop_strings=stops
        )
    own = () if request.ignore_eos else served.eos_ids
    more = served.chat.stop_ids if kind == "chat" else ()
    stop_ids = tuple(dict.fromkeys((*own, *more, *request.stop_token_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        raise ApiError(
            f"stop_token_ids: with the model's own there are {len(stop_ids)} stop tokens, but the "
            f"limit is {MAX_STOP_IDS}. Send fewer stop_token_ids"
        )
    return SamplingSettings(
        most,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        min_new_tokens=request.min_tokens or 0,
        stop_ids=stop_ids,
        stop_strings=stops,
    )
