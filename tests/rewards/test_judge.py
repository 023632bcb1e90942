# SPDX-License-Identifier: Apache-2.0
"""A judge over the network that is slow, down, rate-limited, or answers nonsense."""

import asyncio
import contextlib
from collections import Counter

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tba_jax.remote.http_server import HttpServer, bind
from tba_jax.rewards.judge import Judge, conversation
from tba_jax.rewards.scores import Score


@contextlib.contextmanager
def serving(answer):
    """An OpenAI-compatible server; `answer(text, attempt)` gives (status, content, headers)."""
    asked = Counter()

    async def complete(request):
        text = (await request.json())["messages"][-1]["content"]
        asked[text] += 1
        status, content, headers = await answer(text, asked[text])
        headers["connection"] = "close"  # the judge's client would keep it for a later request
        return JSONResponse({"choices": [{"message": {"content": content}}]}, status, headers)

    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    with contextlib.closing(HttpServer(app, "judge", bind("127.0.0.1", 0))) as server:
        yield f"http://127.0.0.1:{server.port}/v1", asked


async def moody(text, attempt):
    if text == "slow":
        await asyncio.sleep(3)
    if text == "limited":
        return (429, "", {"retry-after": "0"}) if attempt < 2 else (200, "4", {})
    if text == "always limited":
        return 429, "", {}
    if text == "refused":
        return 401, "", {}
    if text == "broken once":
        return (503, "", {}) if attempt == 1 else (200, "3", {})
    return 200, {"nonsense": "I would rather not say"}.get(text, f"Rating: {text[-1:]}"), {}


LOOP = asyncio.new_event_loop()
TEXTS = ["good 8", "slow", "limited", "always limited", "refused", "broken once", "nonsense", "9"]
REASONS = [None, "judge_timeout", None, "judge_rate_limit", "judge_error", None, "judge_nonsense"]


def ask(judge, completions):
    """The rewards, as a reward worker asks for them: always on one event loop."""
    return LOOP.run_until_complete(judge(["p"] * len(completions), completions))


def test_failures_are_named_and_answers_that_came_are_kept():
    with serving(moody) as (url, asked):
        judge = Judge(url, model="m", prompt="{completion}", timeout_s=1.0, retries=1)
        found = ask(judge, TEXTS)
        assert [x.reason for x in found] == [*REASONS, None]
        assert [x.reward for x in found if x.reason is None] == [8.0, 4.0, 3.0, 9.0]
        assert asked["always limited"] == 2 and asked["refused"] == 1
        assert asked["slow"] >= 2  # the server may not have read the last one
        assert "I would rather not say" in found[6].text and "401" in found[4].text
        assert ask(judge, ["good 8", "limited"]) == [found[0], found[2]]
        assert asked["good 8"] == asked["limited"] - 1 == 1  # from the cache


def test_a_judge_that_is_down_is_named():
    with serving(moody) as (url, _):
        pass
    (found,) = ask(Judge(url, model="m", prompt="{completion}", retries=0), ["9"])
    assert found.reason == "judge_down"


def test_requests_are_at_once_up_to_the_limit():
    running = most = 0

    async def counted(text, attempt):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return 200, "1", {}

    with serving(counted) as (url, _):
        judge = Judge(url, model="m", prompt="{completion}", concurrency=4, timeout_s=60)
        assert ask(judge, [str(i) for i in range(16)]) == [Score(1.0)] * 16
    assert most == 4


def test_the_judge_sees_the_whole_conversation():
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    completion = [{"role": "assistant", "content": "a"}]
    assert conversation(prompt, completion) == "system: s\nuser: u\nassistant: a"
    assert conversation("x", "y") == "x\ny"
