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
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.serving.chat import ChatFormat
from tba_jax.serving.queue import Update

Kind = Literal["generate", "completions", "chat"]
MAX_STOP_IDS = 32
"""Maximum number of tokens that may end a response."""
MAX_SAMPLES = 128
"""Maximum number of samples of a request."""

# Parameters that are not supported, and their values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "spaces_between_special_tokens": (True,),
}
# Parameters that cannot change a response: labels, caches and the order of requests.
_UNUSED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key cache_salt priority "
    "request_id".split()
)
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Sampling(BaseModel):
    """Parameters of sampling; None: the default of the model or run."""

    model_config = ConfigDict(extra="forbid", strict=True)

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


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _V1(_Sampling):
    """Parameters of the routes of OpenAI clients."""

    model: str = ""
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class _Completion(_V1):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]


class _Chat(_V1):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = []
    tool_choice: str = "auto"
    chat_template_kwargs: dict[str, Any] = {}


class _Generate(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = ""
    token_ids: list[TokenId]
    sampling_params: _Sampling = _Sampling()


_MODELS: dict[Kind, type[BaseModel]] = {
    "generate": _Generate,
    "completions": _Completion,
    "chat": _Chat,
}
_WANTED = {
    "prompt": "wanted a text, a list of token IDs, or a list of either",
    "token_ids": "wanted a list of token IDs",
    "messages": "wanted a list of objects",
    "stop": "wanted up to 16 texts, none empty",
    "logprobs": "only sampled tokens have log-probs. Set 1 or true",
    "n": f"wanted 1 to {MAX_SAMPLES} samples",
}


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
        kind = {
            401: "authentication_error",
            404: "not_found_error",
            429: "rate_limit_error",
            503: "server_error",
            500: "server_error",
        }.get(self.status, "invalid_request_error")
        found = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": found}


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
        id: ID of the response.
        created: time of the request, in seconds.
    """

    kind: Kind
    served: Served
    request: _V1
    prompts: tuple[np.ndarray, ...]
    settings: tuple[SamplingSettings, ...]
    key: np.ndarray
    tools: Sequence[Mapping[str, Any]]
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def num_samples(self) -> int:
        """Return the number of samples of each prompt."""
        return self.request.n

    def keys(self, prompt: int) -> np.ndarray:
        """Return uint32 [n 2]: the keys of a prompt's samples."""
        first = prompt * self.num_samples
        return fold_in(self.key, np.arange(first, first + self.num_samples))

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of a response, up to its first stop string."""
        request = self.request
        text = self.served.tokenizer.decode(tokens, skip_special=request.skip_special_tokens)
        kept = request.include_stop_str_in_output
        ends = [i + kept * len(x) for x in request.stop if (i := text.find(x)) >= 0]
        return text[: min(ends, default=None)]

    def envelope(self, *, is_chunk: bool = False) -> dict[str, Any]:
        """Return the fields of a response besides its choices."""
        if self.kind == "generate":
            return {"request_id": self.id, "model": self.served.model}
        kinds = {"chat": ("chat.completion", "chatcmpl")}
        kind, start = kinds.get(self.kind, ("text_completion", "cmpl"))
        chunk = ".chunk" if is_chunk and self.kind == "chat" else ""
        return {
            "id": f"{start}-{self.id}",
            "object": kind + chunk,
            "created": self.created,
            "model": self.served.model,
        }

    def usage(self, num_sampled: int) -> dict[str, int]:
        """Return the token counts of the request."""
        num_prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }

    def response(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Return the whole response; `updates` has the samples, prompt by prompt."""
        found = self.envelope()
        found["choices"] = [self._choice(i, update) for i, update in enumerate(updates)]
        if self.kind == "chat" and self.request.return_token_ids:
            found["prompt_token_ids"] = self.prompts[0].tolist()
        found["usage"] = self.usage(sum(len(update.tokens) for update in updates))
        return found

    def _choice(self, index: int, update: Update) -> dict[str, Any]:
        prompt = self.prompts[index // self.num_samples]
        choice: dict[str, Any] = {"index": index, "finish_reason": update.finish}
        if self.kind == "chat":
            text = self.text(update.tokens)
            message = self.served.chat.message(update.tokens, text, prompt, self.tools)
            if message.get("tool_calls") and update.finish == "stop":
                choice["finish_reason"] = "tool_calls"
            choice["message"] = message
        elif self.kind == "completions":
            choice["text"] = self.text(update.tokens)
            if self.request.return_token_ids:
                choice["prompt_token_ids"] = prompt.tolist()
        choice["logprobs"] = self.logprobs(update, 0)
        if self.request.return_token_ids:
            choice["token_ids"] = update.tokens.tolist()
        return choice

    def logprobs(self, update: Update, start: int) -> dict[str, Any] | None:
        """Return the log-probs of a sample's tokens from `start` on; None if not requested."""
        if self.request.logprobs is False:
            return None
        tokens = update.tokens[start:].tolist()
        values = update.token_logprobs[start:].astype(float).tolist()
        texts = [self._token(token) for token in tokens]
        if self.kind == "completions":
            return {
                "tokens": texts,
                "token_logprobs": values,
                "top_logprobs": None,
                "text_offset": None,
            }
        return {
            "content": [
                {"token": x, "logprob": value, "bytes": list(x.encode()), "top_logprobs": []}
                for x, value in zip(texts, values, strict=True)
            ]
        }

    def _token(self, token: int) -> str:
        if self.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.served.tokenizer.decode([token], skip_special=False)


class Deltas:
    """The stream of one sample: the part that each update adds to the response.

    Tool calls are parsed from whole messages, so a chat with tools receives its text at the end.
    """

    def __init__(self, call: Call, sample: int, prompt: int) -> None:
        self._call, self._prompt = call, call.prompts[prompt]
        self._index = prompt * call.num_samples + sample
        self._text, self._num_tokens, self._is_first = "", 0, True

    def next(self, update: Update) -> dict[str, Any] | None:
        """Return the choice of the stream for an update; None if it adds nothing."""
        call = self._call
        if len(update.tokens) == self._num_tokens and not update.finish:
            return None
        choice: dict[str, Any] = {"index": self._index, "finish_reason": update.finish or None}
        choice["logprobs"] = call.logprobs(update, self._num_tokens)
        if call.request.return_token_ids:
            choice["token_ids"] = update.tokens[self._num_tokens :].tolist()
            if self._is_first:
                choice["prompt_token_ids"] = self._prompt.tolist()
        self._num_tokens = len(update.tokens)
        if call.kind == "chat":
            choice["delta"] = self._delta(update, choice)
        elif call.kind == "completions":
            choice["text"] = self._added(update)
        self._is_first = False
        return choice

    def _delta(self, update: Update, choice: dict[str, Any]) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if self._is_first else {}
        if not self._call.tools:
            return {**delta, "content": self._added(update)}
        if not update.finish:
            return delta
        call = self._call
        whole = call.served.chat.message(
            update.tokens, call.text(update.tokens), self._prompt, call.tools
        )
        if whole.get("tool_calls"):
            whole["tool_calls"] = [{"index": i, **x} for i, x in enumerate(whole["tool_calls"])]
            choice["finish_reason"] = "tool_calls" if update.finish == "stop" else update.finish
        return whole

    def _added(self, update: Update) -> str:
        """Return the new text, without an end that may be the start of a stop string or character.

        Such an end is sent when later tokens show what it is.
        """
        text = self._call.text(update.tokens)
        if not update.finish:
            text = text.rstrip("\ufffd")
            held = max((_overlap(text, stop) for stop in self._call.request.stop), default=0)
            text = text[: len(text) - held]
        added, self._text = text[len(self._text) :], max(text, self._text, key=len)
        return added


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)


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
        if kind == "generate":
            always = ("return_token_ids", "return_tokens_as_token_ids", "logprobs")
            request = _V1.model_construct(
                **{**dict(request.sampling_params), **dict.fromkeys(always, True)}
            )
        stop_ids = _stop_ids(kind, request, served)
        settings = tuple(_settings(request, served, prompt, stop_ids) for prompt in prompts)
    except ValueError as error:
        raise ApiError(str(error)) from error
    if request.n * len(prompts) > MAX_SAMPLES:
        raise ApiError(f"n = {request.n}: {_WANTED['n']}", param="n")
    seed = seed if request.seed is None else request.seed
    key = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return Call(kind, served, request, prompts, settings, key, tools)


def _validated(kind: Kind, body: Mapping[str, Any]) -> Any:
    """Return the request as its pydantic model.

    Raises:
        ApiError: a parameter is not supported, or has a wrong value.
    """
    body = _supported(body, kind)
    if kind == "generate" and isinstance(body.get("sampling_params"), dict):
        body["sampling_params"] = _supported(body["sampling_params"], kind)
    try:
        return _MODELS[kind].model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        names = [x for x in first["loc"] if isinstance(x, str) and x != "sampling_params"]
        name = names[0] if names else ""
        rule = _WANTED.get(name, first["msg"])
        if first["type"] == "extra_forbidden":
            rule = "the parameter is not supported. Leave it out"
        shown = "" if first["type"] == "missing" else f" = {first['input']!r:.80}"
        raise ApiError(f"{name}{shown}: {rule}", param=name) from None


def _supported(given: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the parameters without those that change nothing.

    Raises:
        ApiError: a parameter that is not supported has another value.
    """
    found = {k: v for k, v in given.items() if v is not None and k not in _UNUSED}
    if kind != "generate":  # special tokens are added to texts, and never to chats
        is_neutral = found.pop("add_special_tokens", kind == "completions")
        if is_neutral is not (kind == "completions"):
            raise ApiError(
                f"add_special_tokens = {is_neutral!r:.80} is not supported. Leave it out",
                param="add_special_tokens",
            )
    for name, values in _NEUTRAL.items():
        if name in found and found[name] not in values:
            value = found[name]
            raise ApiError(f"{name} = {value!r:.80} is not supported. Leave it out", param=name)
        if name != "tool_choice" or kind != "chat":
            found.pop(name, None)
    if isinstance(found.get("stop"), str):
        found["stop"] = [found["stop"]]
    return found


def _stop_ids(kind: Kind, sampling: _Sampling, served: Served) -> tuple[int, ...]:
    own = () if sampling.ignore_eos else served.eos_ids
    more = served.chat.stop_ids if kind == "chat" else ()
    found = tuple(dict.fromkeys((*own, *more, *sampling.stop_token_ids)))
    if len(found) > MAX_STOP_IDS:
        raise ApiError(
            f"stop_token_ids: with the model's own there are {len(found)} stop tokens, but the "
            f"limit is {MAX_STOP_IDS}. Send fewer stop_token_ids"
        )
    return found


def _settings(
    given: _Sampling, served: Served, prompt: np.ndarray, stop_ids: tuple[int, ...]
) -> SamplingSettings:
    room = served.max_length - len(prompt)
    wanted = given.max_completion_tokens or given.max_tokens
    is_run = served.sampling is not None
    if room < 1 or (wanted is not None and wanted > room and not is_run):
        raise ApiError(
            f"the prompt has {len(prompt)} tokens and the response may have "
            f"{wanted or 1}; the maximum context length is {served.max_length}. Shorten the "
            "prompt, or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if given.stop and given.min_tokens:
        raise ApiError(
            "min_tokens with stop: a stop text cannot be prevented before min_tokens tokens. Leave "
            "out one of them"
        )
    decode = served.tokenizer.decode
    stops = None
    if given.stop:
        stops = StopStrings(tuple(given.stop), lambda ids: decode(ids, skip_special=False))
    default = served.sampling or SamplingSettings(room)
    named = {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": None if given.top_k is None else max(0, given.top_k),
        "min_new_tokens": given.min_tokens,
    }
    for name, value in named.items():
        own = getattr(default, name)
        if is_run and value is not None and value != own:
            raise ApiError(
                f"{name} = {value}: the training run samples with {own}. Leave it out", param=name
            )
    chosen = {k: getattr(default, k) if v is None else v for k, v in named.items()}
    return SamplingSettings(
        room if wanted is None else min(wanted, room),
        stop_ids=stop_ids,
        stop_strings=stops,
        **chosen,
    )


def _prompts(
    kind: Kind, request: Any, served: Served, tools: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, ...]:
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
