# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes over a real decode session: exact tokens, streams, refusals, lost clients."""

import concurrent.futures
import json
import re
import socket
import time
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
from fake_models import START_MODEL_LOGIT, logprob_bound
from qwen_tokenizer import qwen_like_tokenizer
from served_model import GENERATE, NUM_SLOTS, PROMPT, TOKEN

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.serving.chat import Chat, ChatFormat, RendererFormat
from tba_jax.serving.failures import ApiError
from tba_jax.serving.protocol import Update, parse

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, ONE = [{"role": "user", "content": "7+5-3"}], {"prompt": "1"}
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def client_of(model, token=TOKEN):
    return openai.OpenAI(base_url=f"{model.guarded_url}/v1", api_key=token, max_retries=0)


def update_of(served, text, finish=""):
    tokens = served.tokenizer.encode(text, add_bos=False)
    return Update(tokens, np.zeros(len(tokens), np.float32), finish)


BODIES = {TEXT: {"prompt": PROMPT}, CHAT: {"messages": MESSAGES, "stop": ["7", "1"]}}
SAMPLED = {"max_tokens": 9, "top_p": 0.9, "seed": 2**32 - 1, "logprobs": True, "n": 2}


@pytest.mark.parametrize("path", BODIES)
def test_tokens_and_log_probs_are_those_of_the_engine_also_in_a_stream(model, path):
    body = {"model": "start", "extra_body": {"return_token_ids": True}, **BODIES[path], **SAMPLED}
    with client_of(model) as client:
        create = (client.chat.completions if path == CHAT else client.completions).create
        whole = create(**body)
        *chunks, last = create(**body, stream=True, stream_options={"include_usage": True})
    body = {"token_ids": whole.prompt_token_ids, **SAMPLED}
    _, same = model.ask(model.guarded_url + GENERATE, body, AUTHORIZED)
    start, settings = np.array(whole.prompt_token_ids, np.int32), SamplingSettings(9, top_p=0.9)
    wanted = model.decode(model.params, start, settings, seed=2**32 - 1, num=2)
    # Another number of slots is another program.
    bound = logprob_bound(model.config, len(PROMPT) + 9, START_MODEL_LOGIT)
    for choice, part, y in zip(whole.choices, same["choices"], wanted, strict=True):
        assert len(part["token_ids"]) == len(y.tokens)
        assert path == CHAT or len(choice.token_ids) == len(y.tokens)  # else a stop text may end it
        for each in (choice.model_dump(), part):
            tokens, logprobs = each["token_ids"], each["logprobs"]
            assert tokens == y.tokens[: len(tokens)].tolist()
            values = logprobs.get("token_logprobs") or [x["logprob"] for x in logprobs["content"]]
            own = y.token_logprobs[: len(tokens)]
            np.testing.assert_allclose(values, own, rtol=0, atol=bound)
        assert part["logprobs"]["content"][0]["token"] == f"token_id:{y.tokens[0]}"
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert sum((c.token_ids for c in own), []) == choice.token_ids
        text = choice.message.content if path == CHAT else choice.text
        assert "".join(c.delta.content if path == CHAT else c.text for c in own) == text
        assert path == CHAT or text == model.tokenizer.decode(choice.token_ids)
        assert own[-1].finish_reason == choice.finish_reason
    assert (last.usage, last.choices) == (whole.usage, [])
    assert last.usage.completion_tokens == sum(len(x.token_ids) for x in whole.choices)


def test_requests_at_one_time_end_at_their_own_stop_texts(model):
    body = {"prompt": "7+5-3=", "max_tokens": 40, "n": 4, "seed": 5, "ignore_eos": True}
    body |= {"skip_special_tokens": False}
    whole = [choice["text"] for choice in model.ask(TEXT, body)[1]["choices"]]
    stops = ["=", "1", "<eos>", "-", "+", "7", "2", "3"]
    with concurrent.futures.ThreadPoolExecutor(len(stops)) as pool:  # twice as many as slots
        found = pool.map(lambda stop: model.ask(TEXT, {**body, "stop": stop})[1], stops)
    for stop, answer in zip(stops, found, strict=True):
        for choice, text in zip(answer["choices"], whole, strict=True):
            assert choice["text"] == text.partition(stop)[0]
            assert (choice["finish_reason"] == "stop") == (stop in text)


@pytest.mark.parametrize("kind", ["delta", "message"])
def test_tool_calls_are_parts_of_the_message(model, tmp_path, kind):
    pytest.importorskip("renderers", reason="the extra `chat-tools` is not installed")
    tokenizer, streams = qwen_like_tokenizer(tmp_path), kind == "delta"
    chat = RendererFormat(tokenizer, "qwen3")
    served = model.served._replace(tokenizer=tokenizer, chat=chat, max_length=999)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    body = {"messages": MESSAGES, "tools": [tool], "stream": streams}
    plain = parse("chat", {**body, "tool_choice": "none"}, served, 0)
    call = parse("chat", body, served, 0)
    assert ["add" in tokenizer.decode(x.prompt) for x in (plain, call)] == [False, True]
    text = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
    update = update_of(served, text, "stop")
    for each in (call, plain) if streams else ():  # thinking or a call may be begun
        assert each.choice(0, update._replace(finish=""))["delta"] == {"role": "assistant"}
    choice = call.choice(0, update)
    (found,) = choice[kind]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and found["function"]["name"] == "add"
    assert ("index" in found) == streams
    assert call.choice(0, update._replace(finish="length"))["finish_reason"] == "length"
    with pytest.raises(ValueError, match="render_ids of the library renderers fails: Attribute"):
        chat.prompt(Chat([{"role": "assistant", "content": "", "tool_calls": [3]}]))


def test_an_unexpected_failure_is_an_error_of_the_server(model, monkeypatch, capfd):
    monkeypatch.setattr(ChatFormat, "read", lambda *arguments: {}["message"])
    status, answer = model.ask(CHAT, {"messages": MESSAGES, "max_tokens": 1})
    assert status == 500 and answer["error"]["type"] == "server_error"
    assert "KeyError: 'message'" in answer["error"]["message"]
    assert "Traceback" in capfd.readouterr().err


def test_a_stream_holds_back_what_may_begin_a_stop_string_or_a_character(model, tmp_path):
    call = parse("completions", {**ONE, "stop": ["7+"], "stream": True}, model.served, 0)
    update = update_of(model, "1-7")
    assert call.choice(0, update)["text"] == "1-"
    assert call.choice(0, update._replace(finish="length"), update)["text"] == "7"
    served = model.served._replace(tokenizer=qwen_like_tokenizer(tmp_path))
    whole = update_of(served, "é")
    half = Update(whole.tokens[:1], whole.token_logprobs[:1])
    call = parse("completions", {**ONE, "stream": True}, served, 0)
    assert call.choice(0, half)["text"] == "" and call.choice(0, whole, half)["text"] == "é"
    call = parse("chat", {"messages": MESSAGES, "logprobs": True}, served, 0)
    content = call.choice(0, half)["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [list("é".encode()[:1])]


# Parameters, with the sampling settings or the text of "7+5-3=" and an end that they give.
HONOURED = [
    ({"temperature": 0.0, "top_k": -1}, {"temperature": 0, "top_k": 0}),
    ({"max_completion_tokens": 3, "min_tokens": 2}, {"max_new_tokens": 3, "min_new_tokens": 2}),
    ({"stop_token_ids": [5, 2]}, {"stop_ids": (2, 5)}),
    ({"ignore_eos": True, "stop_token_ids": [5]}, {"stop_ids": (5,)}),
    ({"presence_penalty": 0, "min_p": None, "user": "me"}, {"temperature": 1.0, "top_p": 1.0}),
    ({}, "7+5-3="),
    ({"skip_special_tokens": False}, "7+5-3=<eos>"),
    ({"stop": ["-3", "5-"], "include_stop_str_in_output": True}, "7+5-"),
]
OF_RUN = [{"temperature": 1.0}, {"n": 2}, {"seed": 1}, {"stop_token_ids": [5]}, {"min_tokens": 1}]


def test_parameters_are_honoured_and_those_of_a_training_run_are_its_own(model):
    update = update_of(model, "7+5-3=<eos>", "stop")
    for body, wanted in HONOURED:
        call = parse("completions", ONE | body, model.served, 0)
        if isinstance(wanted, str):
            assert call.choice(0, update)["text"] == wanted
        else:
            assert vars(call.settings).items() >= wanted.items()
    run = model.served._replace(sampling=SamplingSettings(9, temperature=0.7))
    body = ONE | {"temperature": 0.7, "n": 1, "stop_token_ids": [2]}
    assert parse("completions", body, run, 0).settings.temperature == 0.7
    for body in OF_RUN:
        with pytest.raises(ApiError, match=f"{min(body)} = .*: the training run has"):
            parse("completions", ONE | body, run, 0)
    content = [{"type": "text", "text": text} for text in "7+"]
    body = {"messages": [{"role": "user", "content": content}], "add_special_tokens": False}
    body |= {"chat_template_kwargs": {"ending": 1}, "response_format": {"type": "text"}}
    prompt = parse("chat", body, model.served, 0).prompt
    assert model.tokenizer.decode(prompt) == "7+=1"


UNSUPPORTED = "best_of prompt echo min_p chat_template reasoning_effort truncate_prompt_tokens "
UNSUPPORTED += "guided_json structured_outputs response_format add_generation_prompt"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
CONTENTS = [3, [IMAGE], [{"type": "text", "text": "a"}, IMAGE]]
BAD_MESSAGES = ["hi", [{"content": "a"}], [{"role": "user", "tool_calls": [3]}]]
BAD_MESSAGES += [[{"role": "user", "content": content}] for content in CONTENTS]
# Body of a request, and the beginning of its refusal, which is the name of a wrong parameter.
REFUSED = [
    ("/v1/nothing", {}, 404, "there is no route POST /v1/nothing"),
    (TEXT, b"{", 400, "the body is no JSON object: Invalid JSON"),
    (TEXT, b"[1]", 400, "the body is no JSON object: Input should be"),
    (TEXT, b" " * 10 * 2**20, 413, "a request may have 4,194,304 bytes"),
    (TEXT, {}, 400, "prompt: wanted a text or a list of token IDs"),
    (TEXT, {"prompt": ["1", "2"]}, 400, "prompt = ['1', '2']: wanted a text or"),
    (TEXT, {"prompt": []}, 400, "the prompt is empty"),
    (TEXT, {"prompt": [10**6]}, 400, "decode() got, in row"),
    (TEXT, ONE | {"max_tokens": 0}, 400, "max_tokens = 0: Input should be"),
    (TEXT, ONE | {"max_tokens": 10**6}, 400, "max_tokens: the prompt has 2 tokens and the"),
    (TEXT, ONE | {"temperature": -1}, 400, "temperature = -1: Input should be greater"),
    (TEXT, ONE | {"n": 10**9}, 400, "n = 1000000000: Input should be less than or equal to 128"),
    (TEXT, ONE | {"stop_token_ids": [0] * 40}, 400, "stop_token_ids = [0, 0"),
    (TEXT, ONE | {"logprobs": 5}, 400, "logprobs = 5: wanted 1 or true"),
    (GENERATE, {"token_ids": [-1]}, 400, "token_ids = [-1]: Input should be greater than"),
    (CHAT, {"messages": MESSAGES, "tools": [{}]}, 400, "the tool format of this model is not"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs ="),
    *((CHAT, {"messages": MESSAGES, x: 5}, 400, f"{x} = 5: the para") for x in UNSUPPORTED.split()),
    *((CHAT, {"messages": x}, 400, "messages = ") for x in BAD_MESSAGES),
]


def test_a_bad_request_is_refused_in_one_line_that_names_its_parameter(model):
    for path, body, status, message in REFUSED:
        found, answer = model.ask(path, body)
        error = answer["error"]
        assert (found, error["message"][: len(message)]) == (status, message)
        named = re.match(r"(\w+)( =|:)", message)
        assert error["param"] == (named and named[1]) and "\n" not in error["message"]


def test_who_may_send(model):
    assert model.ask("/health") == (200, {"status": "ok"})
    body, text = ONE | {"max_tokens": 1}, {"content-type": "text/plain"}
    # A web page may send text without permission, but not JSON.
    status, answer = model.ask(TEXT, body, text)
    assert status == 400 and "the content type is not JSON" in answer["error"]["message"]
    models, completions = model.guarded_url + "/v1/models", model.guarded_url + TEXT
    assert model.ask(models)[0] == model.ask(completions, body)[0] == 401
    assert model.ask(completions, body, AUTHORIZED | text)[0] == 200
    with client_of(model) as client:
        assert [card.id for card in client.models.list()] == ["start"]
        with pytest.raises(openai.NotFoundError, match="'gpt' does not exist") as error:
            client.completions.create(model="gpt", prompt="1")
    assert error.value.param == "model"
    with client_of(model, "no") as client, pytest.raises(openai.AuthenticationError, match="no va"):
        client.models.list()


def test_a_client_that_vanishes_frees_its_slots_and_half_a_body_costs_nothing(model):
    body = {"prompt": "1+1=", "max_tokens": 250, "min_tokens": 250, "n": 100}
    data = json.dumps({**body, "stream": True}).encode()
    before, end = model.session.statistics.tokens, time.monotonic() + 20
    address = ("127.0.0.1", urlsplit(model.url).port)
    with socket.create_connection(address) as link:
        link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        while model.session.is_idle:
            assert time.monotonic() < end
    while not model.session.is_idle:
        assert time.monotonic() < end
    assert model.session.statistics.tokens - before < 50 * 250  # 100 samples have twice as many
    for more in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
        with socket.create_connection(address) as link:
            link.sendall(HEAD + more)
    assert model.ask(TEXT, ONE | {"max_tokens": 1})[0] == 200
    assert model.session.room == NUM_SLOTS
