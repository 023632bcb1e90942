# SPDX-License-Identifier: Apache-2.0
"""The HTTP routes over a real decode session: exact tokens, streams, refusals, lost clients."""

import concurrent.futures
import json
import socket
import time

import fake_models
import jax
import numpy as np
import pytest
from fake_models import START_MODEL_LOGIT, logprob_bound
from served_model import NUM_SLOTS, ServedModel, folder_with_template

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.run.model_parts import START_MODEL

PROMPT = [1, 28, 16, 26, 18, 24, 34]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = folder_with_template(tmp_path_factory.mktemp("model"))
    with ServedModel(folder).running() as found:
        yield found


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def eventually(condition, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def decoded(model, prompt, seed, num, **settings):
    return fake_models.decode(
        model.decoder,
        model.params,
        [np.array(prompt, np.int32)],
        num_samples=num,
        key=jax.random.key(seed),
        settings=SamplingSettings(**settings),
        num_slots=NUM_SLOTS,
    )


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_tokens_and_log_probs_are_those_of_the_engine(model, seed):
    wanted = decoded(model, PROMPT, seed, 3, max_new_tokens=9, top_p=0.9)
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 9, "top_p": 0.9, "seed": seed}
    body |= {"logprobs": 1, "return_token_ids": True}
    status, found = model.post("/v1/completions", body)
    assert status == 200
    bound = logprob_bound(model.config, len(PROMPT) + 9, START_MODEL_LOGIT)
    for i, choice in enumerate(found["choices"]):
        n = wanted.lengths[0, i]
        assert choice["token_ids"] == wanted.tokens[0, i, :n].tolist()
        values = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        # Another number of slots is another program.
        np.testing.assert_allclose(values, wanted.token_logprobs[0, i, :n], rtol=0, atol=bound)
        assert choice["finish_reason"] == ("stop" if wanted.has_eos[0, i] else "length")
        assert choice["text"] == model.tokenizer.decode(choice["token_ids"])
    assert found["usage"]["completion_tokens"] == wanted.lengths.sum()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "7+5-3="}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "7"}], "stop": ["7", "1"], "seed": 5},
        ),
    ],
)
def test_a_stream_has_the_same_tokens_and_text(model, path, body):
    body = {"max_tokens": 40, "seed": 1, "n": 2, "return_token_ids": True, "logprobs": True} | body
    _, whole = model.post(path, body)
    _, text = model.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = events(text)
    assert last["usage"] == whole["usage"] and last["choices"] == []
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert sum((c["token_ids"] for c in own), []) == choice["token_ids"]
        parts = [c["text"] if "text" in c else c["delta"]["content"] for c in own]
        wanted = choice["text"] if "text" in choice else choice["message"]["content"]
        assert "".join(parts) == wanted
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert not any(stop in wanted for stop in body.get("stop", ()))


def test_a_stop_string_of_one_request_does_not_end_another(model):
    body = {"prompt": "7+5-3=", "max_tokens": 30, "seed": 1, "return_token_ids": True}
    _, free = model.post("/v1/completions", body)
    text = free["choices"][0]["text"]
    stop = text[1:2]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        stopped = pool.submit(model.post, "/v1/completions", {**body, "stop": stop})
        again = pool.submit(model.post, "/v1/completions", body)
        assert again.result()[1]["choices"] == free["choices"]
        (choice,) = stopped.result()[1]["choices"]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) < len(free["choices"][0]["token_ids"])


def test_models_and_health(model):
    (card,) = model.get("/v1/models")[1]["data"]
    assert (card["id"], card["max_model_len"]) == ("start", 256)
    assert model.get("/health") == (200, {"status": "ok"})


ASKS = {
    "completions": {"prompt": "1"},
    "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
# Parameters of vLLM and OpenAI that would change a response.
REFUSED = [
    ("chat/completions", name, {name: value})
    for name, value in {
        "chat_template": "{{ messages }}",
        "add_generation_prompt": False,
        "reasoning_effort": "low",
        "add_special_tokens": True,
        "truncate_prompt_tokens": 3,
        "guided_json": {},
        "guided_regex": "a",
        "structured_outputs": {"choice": ["a"]},
        "response_format": {"type": "json_object"},
        "invented": 1,
    }.items()
]
REFUSED += [("completions", name, {name: 5}) for name in ("echo", "min_p", "best_of", "messages")]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/nothing", {}, 404, "there is no route POST /v1/nothing"),
        ("/v1/completions", b"{", 400, "the body is not JSON"),
        ("/v1/completions", {}, 400, "prompt: wanted a text or a list of token IDs"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 10**6}, 400, "maximum context length"),
        ("/v1/completions", {"prompt": "1", "logit_bias": {"3": 1}}, 400, "logit_bias"),
        *((f"/v1/{path}", {**ASKS[path], **body}, 400, name) for path, name, body in REFUSED),
        ("/v1/completions", {"prompt": ["1", "2"]}, 400, "prompt = ['1', '2']: wanted a text or"),
        ("/v1/completions", {"prompt": "1", "n": 10**9}, 400, "1 to 128 samples"),
        ("/v1/completions", {"prompt": "1", "model": "gpt"}, 404, "does not exist"),
        ("/v1/chat/completions", {"messages": "hi"}, 400, "wanted a list of objects"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
            400,
            "--renderer=NAME",
        ),
    ],
)
def test_a_bad_request_is_refused_in_one_line(model, path, body, status, message):
    found, answer = model.post(path, body)
    assert found == status
    assert message in answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_variables_of_the_chat_template_are_honoured(model):
    body = {**ASKS["chat/completions"], "max_tokens": 1, "return_token_ids": True}
    body |= {"messages": [{"role": "user", "content": "7"}], "chat_template_kwargs": {"ending": 1}}
    found = model.post("/v1/chat/completions", body)[1]["prompt_token_ids"]
    assert model.tokenizer.decode(found) == "7=1"


def test_a_web_page_cannot_write(model):
    """A page may send text without permission, but not JSON."""
    plain = {"content-type": "text/plain"}
    status, answer = model.post("/v1/completions", {"prompt": "1"}, plain)
    assert status == 400 and "the content type is not JSON" in answer["error"]["message"]


def test_a_large_body_is_refused_and_half_a_body_costs_nothing(model):
    assert model.post("/v1/completions", b" " * 10 * 2**20)[0] == 413
    for more in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
        with socket.create_connection(("127.0.0.1", model.server.port)) as link:
            link.sendall(HEAD + more)
    assert model.post("/v1/completions", {"prompt": "1", "max_tokens": 1})[0] == 200


def test_a_client_that_vanishes_frees_its_slots(model):
    body = {"prompt": "1+1=", "max_tokens": 250, "min_tokens": 250, "n": 100}
    data = json.dumps({**body, "stream": True}).encode()
    before = model.session.statistics.tokens
    with socket.create_connection(("127.0.0.1", model.server.port)) as link:
        link.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        eventually(lambda: not model.session.is_idle)
    eventually(lambda: model.session.is_idle)
    assert model.session.statistics.tokens - before < 50 * 250  # 100 samples have twice as many
    assert model.session.room == NUM_SLOTS and not model.queue._live


def test_a_wrong_token_is_refused():
    model = ServedModel(START_MODEL, token="secret")
    with model.running():
        assert model.get("/v1/models")[0] == 401
        body = {"prompt": "1", "max_tokens": 1}
        assert model.post("/v1/completions", body)[0] == 401
        # With a token, any content type may be sent.
        own = {"authorization": "Bearer secret", "content-type": "text/plain"}
        assert model.post("/v1/completions", body, own)[0] == 200


def test_the_generate_route_names_token_ids(model):
    sampling = {"max_tokens": 5, "seed": 3, "logprobs": 1, "skip_special_tokens": False}
    _, found = model.post(
        "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}
    )
    wanted = decoded(model, PROMPT, 3, 1, max_new_tokens=5)
    (choice,) = found["choices"]
    assert choice["token_ids"] == wanted.tokens[0, 0, : wanted.lengths[0, 0]].tolist()
    names = [each["token"] for each in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]
