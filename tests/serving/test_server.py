# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes over a real decode session: exact tokens, streams, refusals, lost clients."""

import concurrent.futures
import json
import socket
import time

import jax
import numpy as np
import pytest
from fake_models import START_MODEL_LOGIT, logprob_bound
from served_model import NUM_SLOTS, PROMPT

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.serving.protocol import Update, parse

GENERATE, TEXT, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "7+5-3"}]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize(
    ("path", "prompt", "seed"),
    [
        (GENERATE, {"token_ids": PROMPT}, 0),
        (TEXT, {"prompt": PROMPT}, 2**32 - 1),
        (CHAT, {"messages": MESSAGES}, 2**32 - 1),
    ],
)
def test_tokens_and_log_probs_are_those_of_the_engine(model, path, prompt, seed):
    given = {"max_tokens": 9, "top_p": 0.9, "seed": seed, "logprobs": True, "n": 2}
    given |= {"return_token_ids": True}
    found = model.ask(path, prompt | ({"sampling_params": given} if path == GENERATE else given))[1]
    start = PROMPT[path == CHAT :]  # the template has no first token
    own = {"settings": SamplingSettings(9, top_p=0.9), "num_slots": NUM_SLOTS, "num_samples": 2}
    own |= {"key": jax.random.key(seed)}
    wanted = model.decoder.decode(model.params, [np.array(start, np.int32)], **own)[0]
    # Another number of slots is another program.
    bound = logprob_bound(model.config, len(PROMPT) + 9, START_MODEL_LOGIT)
    for choice, y in zip(found["choices"], wanted, strict=True):
        tokens, logprobs = y.tokens.tolist(), choice["logprobs"]
        assert choice["token_ids"] == tokens
        assert choice["finish_reason"] == ("stop" if y.has_eos else "length")
        values = logprobs.get("token_logprobs") or [x["logprob"] for x in logprobs["content"]]
        np.testing.assert_allclose(values, y.token_logprobs, rtol=0, atol=bound)
        if path == GENERATE:
            names = [each["token"] for each in logprobs["content"]]
            assert names == [f"token_id:{token}" for token in tokens]
        else:
            assert text_of(choice) == model.tokenizer.decode(tokens)
    assert found["usage"]["completion_tokens"] == sum(len(y.tokens) for y in wanted)


@pytest.mark.parametrize(
    ("path", "body"),
    [(TEXT, {"prompt": "7+5-3="}), (CHAT, {"messages": MESSAGES, "stop": ["7", "1"], "seed": 5})],
)
def test_a_stream_has_the_same_tokens_and_text(model, path, body):
    body = {"max_tokens": 40, "seed": 1, "n": 2, "return_token_ids": True, "logprobs": True} | body
    _, whole = model.ask(path, body)
    _, text = model.ask(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *events, end = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    *chunks, last = map(json.loads, events)
    assert (end, last["usage"], last["choices"]) == ("[DONE]", whole["usage"], [])
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert sum((c["token_ids"] for c in own), []) == choice["token_ids"]
        parts = [c["text"] if path == TEXT else c["delta"]["content"] for c in own]
        wanted = text_of(choice)
        assert "".join(parts) == wanted
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert not any(stop in wanted for stop in body.get("stop", ()))


def test_a_stream_holds_back_what_may_begin_a_stop_string(model):
    call = parse("completions", {"prompt": "1", "stop": ["7+"], "stream": True}, model.served, 0)
    update = Update(model.tokenizer.encode("1-7", add_bos=False), np.zeros(3, np.float32))
    assert call.choice(0, update)["text"] == "1-"
    assert call.choice(0, update._replace(finish="length"), update)["text"] == "7"


def test_a_stop_string_of_one_request_does_not_end_another(model):
    body = {"prompt": "7+5-3=", "max_tokens": 30, "seed": 1, "return_token_ids": True}
    (free,) = model.ask(TEXT, body)[1]["choices"]
    stop = free["text"][1]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda more: model.ask(TEXT, body | more)[1], ({"stop": stop}, {}))
        (stopped,), (other,) = (found["choices"] for found in both)
    assert other == free and stopped["finish_reason"] == "stop"
    assert stopped["text"] == free["text"].partition(stop)[0]
    assert len(stopped["token_ids"]) < len(free["token_ids"])


# Body of a refused request, and the refusal, which begins with the name of the parameter.
UNSUPPORTED, UNKNOWN = "best_of messages echo min_p".split(), "the parameter is not supported"
CHAT_VALUES = {
    "chat_template": "{{ messages }}",
    "reasoning_effort": "low",
    "truncate_prompt_tokens": 3,
    "guided_json": {},
    "guided_regex": "a",
    "structured_outputs": {"choice": ["a"]},
    "response_format": {"type": "json_object"},
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "tools": [{"type": "function"}],
}
BAD_MESSAGES = [
    "hi",
    [{"content": "a"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    [{"role": "user", "tool_calls": [3]}],
]
REFUSED = [
    ("/v1/nothing", {}, 404, "there is no route POST /v1/nothing"),
    (TEXT, b"{", 400, "the body is no JSON object: Invalid JSON"),
    (TEXT, b"[1]", 400, "the body is no JSON object: Input should be"),
    (TEXT, b" " * 10 * 2**20, 413, "a request may have 4,194,304 bytes"),
    (TEXT, {}, 400, "prompt: wanted a text or a list of token IDs"),
    (TEXT, {"prompt": ["1", "2"]}, 400, "prompt = ['1', '2']: wanted a text or"),
    (TEXT, {"prompt": []}, 400, "the prompt is empty"),
    (TEXT, {"prompt": "1", "max_tokens": 0}, 400, "max_tokens = 0: Input should be"),
    (TEXT, {"prompt": "1", "max_tokens": 10**6}, 400, "maximum context length"),
    (TEXT, {"prompt": "1", "n": 10**9}, 400, "n = 1000000000: wanted 1 to 128 samples"),
    (TEXT, {"prompt": "1", "stop_token_ids": [*range(40)]}, 400, "wanted up to 32 token IDs"),
    (TEXT, {"prompt": "1", "model": "gpt"}, 404, "does not exist"),
    (GENERATE, {"token_ids": [-1]}, 400, "token_ids = [-1]: wanted a list of token IDs"),
    *((TEXT, {"prompt": "1", x: 5}, 400, f"{x} = 5: {UNKNOWN}") for x in UNSUPPORTED),
    *((CHAT, {"messages": MESSAGES, x: y}, 400, x) for x, y in CHAT_VALUES.items()),
    *((CHAT, {"messages": x}, 400, "wanted a list of objects with role") for x in BAD_MESSAGES),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_a_bad_request_is_refused_in_one_line(model, path, body, status, message):
    found, answer = model.ask(path, body)
    assert found == status
    assert message in answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_parameters_of_a_chat_are_honoured_or_change_nothing(model):
    content = [{"type": "text", "text": text} for text in "7+"]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    body |= {"return_token_ids": True, "chat_template_kwargs": {"ending": 1}, "min_p": 0}
    body |= {"add_special_tokens": False, "response_format": {"type": "text"}, "user": "me"}
    found = model.ask(CHAT, body)[1]["prompt_token_ids"]
    assert model.tokenizer.decode(found) == "7+=1"


def test_models_health_and_who_may_send(model):
    (card,) = model.ask("/v1/models")[1]["data"]
    assert (card["id"], card["max_model_len"]) == ("start", 256)
    assert model.ask("/health") == (200, {"status": "ok"})
    body, text = {"prompt": "1", "max_tokens": 1}, {"content-type": "text/plain"}
    # A web page may send text without permission, but not JSON.
    status, answer = model.ask(TEXT, body, text)
    assert status == 400 and "the content type is not JSON" in answer["error"]["message"]
    with model.listening("secret") as guarded:
        assert guarded.ask("/v1/models")[0] == guarded.ask(TEXT, body)[0] == 401
        assert guarded.ask(TEXT, body, {"authorization": "Bearer secret", **text})[0] == 200


def test_a_client_that_vanishes_frees_its_slots_and_half_a_body_costs_nothing(model):
    body = {"prompt": "1+1=", "max_tokens": 250, "min_tokens": 250, "n": 100}
    data = json.dumps({**body, "stream": True}).encode()
    before, end = model.session.statistics.tokens, time.monotonic() + 20
    with socket.create_connection(("127.0.0.1", model.port)) as link:
        link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        while model.session.is_idle:
            assert time.monotonic() < end
    while not model.session.is_idle:
        assert time.monotonic() < end
    assert model.session.statistics.tokens - before < 50 * 250  # 100 samples have twice as many
    for more in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
        with socket.create_connection(("127.0.0.1", model.port)) as link:
            link.sendall(HEAD + more)
    assert model.ask(TEXT, {"prompt": "1", "max_tokens": 1})[0] == 200
    assert model.session.room == NUM_SLOTS and not model.queue._live
