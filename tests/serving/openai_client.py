# SPDX-License-Identifier: Apache-2.0
"""Program of a user with an OpenAI client; run by the interpreter of a venv that has `openai`.

python openai_client.py BASE_URL plain|tools
"""

import json
import sys

import openai

URL, WHAT = sys.argv[1:]
CLIENT = openai.OpenAI(base_url=URL, api_key="secret", max_retries=2)
ASK = {"model": "start", "messages": [{"role": "user", "content": "7+5-3"}], "max_tokens": 12}


def plain():
    assert [m.id for m in CLIENT.models.list()] == ["start"]
    chat = CLIENT.chat.completions.create(**ASK, seed=1, logprobs=True, top_logprobs=0)
    choice = chat.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert len(choice.logprobs.content) == chat.usage.completion_tokens
    exact = CLIENT.chat.completions.create(**ASK, seed=1, extra_body={"return_token_ids": True})
    assert exact.choices[0].message.content == choice.message.content
    assert len(exact.choices[0].model_extra["token_ids"]) == chat.usage.completion_tokens
    assert len(exact.model_extra["prompt_token_ids"]) == chat.usage.prompt_tokens
    with CLIENT.chat.completions.create(
        **ASK, seed=1, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content and chunks[-1].usage == chat.usage
    whole = CLIENT.completions.create(model="start", prompt="7+5-3=", max_tokens=12, seed=2)
    stop = whole.choices[0].text[1]
    cut = CLIENT.completions.create(
        model="start", prompt="7+5-3=", max_tokens=12, seed=2, stop=[stop]
    )
    assert cut.choices[0].text == whole.choices[0].text[:1]
    assert cut.choices[0].finish_reason == "stop"
    for error, call in (
        (openai.BadRequestError, lambda: CLIENT.chat.completions.create(**ASK, temperature=-1)),
        (openai.NotFoundError, lambda: CLIENT.completions.create(model="other", prompt="a")),
        (
            openai.AuthenticationError,
            lambda: CLIENT.with_options(api_key="wrong").models.list(),
        ),
    ):
        try:
            call()
        except error as found:
            assert found.body["message"]
        else:
            raise AssertionError(error)


def tools():
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    chat = CLIENT.chat.completions.create(**ASK, tools=[tool])
    (call,) = chat.choices[0].message.tool_calls
    assert chat.choices[0].finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 3})
    answer = {"role": "tool", "tool_call_id": call.id, "content": "10"}
    messages = [*ASK["messages"], chat.choices[0].message.model_dump(exclude_none=True), answer]
    CLIENT.chat.completions.create(**{**ASK, "messages": messages}, tools=[tool])
    with CLIENT.chat.completions.create(**ASK, tools=[tool], stream=True) as stream:
        deltas = [c.choices[0] for c in stream]
    (call,) = [x for d in deltas for x in d.delta.tool_calls or ()]
    assert call.function.name == "add" and deltas[-1].finish_reason == "tool_calls"


if __name__ == "__main__":
    {"plain": plain, "tools": tools}[WHAT]()
    print(f"{WHAT}: all checks passed")
