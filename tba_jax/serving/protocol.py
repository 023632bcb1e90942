# SPDX-License-Identifier: Apache-2.0
"""Requests and responses of the HTTP routes, as JSON objects.

There are three kinds of route: `generate` takes token IDs from training clients (verifiers,
prime-rl); `completions` and `chat` serve OpenAI clients. Invariant: a parameter that would change
the sampled tokens is honoured or refused, never ignored.
"""

import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.environments.chat import ChatFormat
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.serving.queue import Update

Kind = Literal["generate", "completions", "chat"]
MAX_STOP_IDS = 32
"""Maximum number of tokens that may end a response."""
MAX_SAMPLES = 128
"""Maximum number of samples of a request."""
_MAX_STOP_STRINGS = 16

# Parameters that change the sampled tokens, and their values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "allowed_token_ids": (),
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
        prompts: int32 [s] each.
        num_samples: number of samples of each prompt.
        settings: sampling settings of each prompt; their length limits differ.
        key: uint32 [2], threefry key data; sample j of prompt i draws from fold_in(key, i n + j).
        stop: texts that end a response and are cut from its text.
        tools: tools of a chat.
        is_streamed: whether the response is streamed.
        has_usage: whether the stream ends with token counts.
        has_token_ids, has_logprobs: whether responses have token IDs and log-probs.
        names_ids: whether tokens of log-probs are written "token_id:ID".
        id: ID of the response.
        created: time of the request, in seconds.
    """

    kind: Kind
    served: Served
    prompts: tuple[np.ndarray, ...]
    num_samples: int
    settings: tuple[SamplingSettings, ...]
    key: np.ndarray
    stop: tuple[str, ...]
    tools: Sequence[Mapping[str, Any]]
    is_streamed: bool
    has_usage: bool
    has_token_ids: bool
    has_logprobs: bool
    names_ids: bool
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def keys(self, prompt: int) -> np.ndarray:
        """Return uint32 [n 2]: the keys of a prompt's samples."""
        first = prompt * self.num_samples
        return fold_in(self.key, np.arange(first, first + self.num_samples))

    def text(self, tokens: np.ndarray) -> str:
        """Return the text of a response, up to its first stop string."""
        text = self.served.tokenizer.decode(tokens)
        return text[: min((i for s in self.stop if (i := text.find(s)) >= 0), default=None)]

    def envelope(self, *, is_chunk: bool = False) -> dict[str, Any]:
        """Return the fields of a response besides its choices."""
        if self.kind == "generate":
            return {"request_id": self.id, "model": self.served.model}
        kind, start = (
            ("chat.completion", "chatcmpl")
            if self.kind == "chat"
            else (
                "text_completion",
                "cmpl",
            )
        )
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
        if self.kind == "chat" and self.has_token_ids:
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
            if self.has_token_ids:
                choice["prompt_token_ids"] = prompt.tolist()
        choice["logprobs"] = self.logprobs(update, 0)
        if self.has_token_ids:
            choice["token_ids"] = update.tokens.tolist()
        return choice

    def logprobs(self, update: Update, start: int) -> dict[str, Any] | None:
        """Return the log-probs of a sample's tokens from `start` on; None if not requested."""
        if not self.has_logprobs:
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
        if self.names_ids:
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
        if call.has_token_ids:
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
            held = max((_overlap(text, stop) for stop in self._call.stop), default=0)
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
    _check_model(body, served)
    given = body if kind != "generate" else _get(body, "sampling_params", dict, {})
    tools = [] if body.get("tool_choice") == "none" else _get(body, "tools", list, None) or []
    for name, values in _NEUTRAL.items():
        value = given.get(name)
        if value is not None and value not in values and not (kind == "generate" and not value):
            raise ApiError(f"{name} = {value!r:.80} is not supported. Leave it out", param=name)
    try:
        prompts = tuple(map(extend, _prompts(kind, body, served, tools)))
        return _call(kind, body, given, served, prompts, tools, seed)
    except ValueError as error:
        raise ApiError(str(error)) from error


def _check_model(body: Mapping[str, Any], served: Served) -> None:
    name = body.get("model")
    if name is not None and name != served.model:
        raise ApiError(
            f"the model {name!r:.80} does not exist. This server has {served.model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _call(
    kind: Kind,
    body: Mapping[str, Any],
    given: Mapping[str, Any],
    served: Served,
    prompts: tuple[np.ndarray, ...],
    tools: Sequence[Mapping[str, Any]],
    seed: int,
) -> Call:
    stop = given.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stop) > _MAX_STOP_STRINGS or not all(isinstance(x, str) and x for x in stop):
        raise ApiError(f"stop: wanted up to {_MAX_STOP_STRINGS} texts, none empty", param="stop")
    stop_ids = tuple(_ids(given.get("stop_token_ids") or (), "stop_token_ids"))
    own = () if given.get("ignore_eos") else served.eos_ids
    more = served.chat.stop_ids if kind == "chat" else ()
    stop_ids = tuple(dict.fromkeys((*own, *more, *stop_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        raise ApiError(
            f"stop_token_ids: with the model's own there are {len(stop_ids)} stop tokens, but the "
            f"limit is {MAX_STOP_IDS}. Send fewer stop_token_ids"
        )
    num_samples = _get(given, "n", int, 1)
    if not 1 <= num_samples * len(prompts) <= MAX_SAMPLES:
        raise ApiError(f"n = {num_samples}: wanted 1 to {MAX_SAMPLES} samples", param="n")
    seed = _get(given, "seed", int, seed)
    if not 0 <= seed < 2**63:
        raise ApiError(f"seed = {seed}: wanted 0 to 2**63 - 1", param="seed")
    logprobs = given.get("logprobs")
    if isinstance(logprobs, int) and logprobs > 1:
        raise ApiError("logprobs > 1: only sampled tokens have log-probs. Set 1", param="logprobs")
    options = body.get("stream_options") or {}
    is_generate = kind == "generate"
    if is_generate and body.get("stream"):
        raise ApiError("stream is not supported on this route", param="stream")
    return Call(
        kind=kind,
        served=served,
        prompts=prompts,
        num_samples=num_samples,
        settings=tuple(_settings(given, served, prompt, stop, stop_ids) for prompt in prompts),
        key=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        stop=stop,
        tools=tools,
        is_streamed=bool(body.get("stream")),
        has_usage=bool(options.get("include_usage")),
        has_token_ids=is_generate or bool(body.get("return_token_ids")),
        has_logprobs=is_generate or (logprobs is not None and logprobs is not False),
        names_ids=is_generate or bool(body.get("return_tokens_as_token_ids")),
    )


def _settings(
    given: Mapping[str, Any],
    served: Served,
    prompt: np.ndarray,
    stop: tuple[str, ...],
    stop_ids: tuple[int, ...],
) -> SamplingSettings:
    room = served.max_length - len(prompt)
    wanted = given.get("max_completion_tokens", given.get("max_tokens"))
    is_run = served.sampling is not None
    if room < 1 or (wanted is not None and wanted > room and not is_run):
        raise ApiError(
            f"the prompt has {len(prompt)} tokens and the response may have "
            f"{wanted or 1}; the maximum context length is {served.max_length}. Shorten the "
            "prompt, or lower max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    decode = served.tokenizer.decode
    if stop and given.get("min_tokens"):
        raise ApiError(
            "min_tokens with stop: a stop text cannot be prevented before min_tokens tokens. Leave "
            "out one of them"
        )
    stops = StopStrings(stop, lambda ids: decode(ids, skip_special=False)) if stop else None
    default = served.sampling or SamplingSettings(room)
    settings = SamplingSettings(
        room if wanted is None else min(wanted, room),
        temperature=_number(given, "temperature", default.temperature),
        top_p=_number(given, "top_p", default.top_p),
        top_k=max(0, _get(given, "top_k", int, default.top_k)),
        min_new_tokens=_get(given, "min_tokens", int, default.min_new_tokens),
        stop_ids=stop_ids,
        stop_strings=stops,
    )
    for name in ("temperature", "top_p", "top_k", "min_new_tokens") if is_run else ():
        value, own = getattr(settings, name), getattr(default, name)
        if value != own:
            raise ApiError(
                f"{name} = {value}: the training run samples with {own}. Leave it out", param=name
            )
    return settings


def _prompts(
    kind: Kind, body: Mapping[str, Any], served: Served, tools: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, ...]:
    """Return the prompts of a request.

    Raises:
        ApiError, ValueError: the prompt is missing, or cannot be tokenized.
    """
    if kind == "generate":
        prompts = [_ids(body.get("token_ids"), "token_ids")]
    elif kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(x, dict) for x in messages):
            raise ApiError("messages: wanted a list of objects", param="messages")
        prompts = [served.chat.prompt(messages, tools)]
    else:
        given = body.get("prompt")
        many = [given]
        if isinstance(given, list) and given and not isinstance(given[0], int):
            many = given
        prompts = [
            served.tokenizer.encode(x, add_bos=True) if isinstance(x, str) else _ids(x, "prompt")
            for x in many
        ]
    if any(len(x) == 0 for x in prompts):
        raise ApiError("the prompt is empty. Give at least one token")
    return tuple(np.asarray(x, np.int32) for x in prompts)


def _ids(value: Any, name: str) -> list[int]:
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(type(x) is int and 0 <= x < 2**31 for x in value):
        raise ApiError(f"{name}: wanted a list of token IDs", param=name)
    return list(value)


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(f"{name} = {value!r:.80}: wanted a number", param=name)
    return float(value)


def _get(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ApiError(f"{name} = {value!r:.80}: wanted a {kind.__name__}", param=name)
    return value
