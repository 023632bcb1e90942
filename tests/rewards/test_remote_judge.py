# SPDX-License-Identifier: Apache-2.0
"""A judge over the network that is slow, down, rate-limited, or answers nonsense."""

import contextlib
import http.server
import json
import threading
import time
from collections import Counter

from tba_jax.rewards.functions import Missing
from tba_jax.rewards.remote_judge import Judge


@contextlib.contextmanager
def serving(answer):
    """An OpenAI-compatible server; `answer(text, attempt)` gives (status, content, headers)."""
    asked, lock = Counter(), threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = body["messages"][-1]["content"]
            with lock:
                asked[text] += 1
                attempt = asked[text]
            status, content, headers = answer(text, attempt)
            if not status:
                return  # closes the connection without an answer
            data = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
            self.send_response(status)
            for name, value in {"content-length": len(data), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            with contextlib.suppress(OSError):  # the judge has given up
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def moody(text, attempt):
    if text == "slow":
        time.sleep(3)
    if text == "limited":
        return (429, "", {"retry-after": 0}) if attempt < 3 else (200, "4", {})
    if text == "always limited":
        return 429, "", {}
    if text == "refused":
        return 401, "", {}
    if text == "broken once":
        return (503, "", {}) if attempt == 1 else (200, "3", {})
    return 200, {"nonsense": "I would rather not say"}.get(text, f"Rating: {text[-1:]}"), {}


TEXTS = ["good 8", "slow", "limited", "always limited", "refused", "broken once", "nonsense", "9"]
REASONS = [None, "judge_timeout", None, "judge_rate_limit", "judge_error", None, "judge_nonsense"]


def test_failures_are_named_and_answers_that_came_are_kept():
    with serving(moody) as (url, asked):
        judge = Judge(url, model="m", prompt="{completion}", timeout_s=1.0, retries=2)
        found = judge(["p"] * 8, TEXTS, answer=["a"] * 8)
        reasons = [x.reason if isinstance(x, Missing) else None for x in found]
        assert reasons == [*REASONS, None]
        assert [x for x in found if not isinstance(x, Missing)] == [8.0, 4.0, 3.0, 9.0]
        assert asked["slow"] == asked["always limited"] == 3 and asked["refused"] == 1
        assert "I would rather not say" in found[6].text and "HTTP 401" in found[4].text
        assert judge(["p"] * 2, ["good 8", "limited"], answer=["a"] * 2) == [8.0, 4.0]
        assert asked["good 8"] == asked["limited"] - 2 == 1  # from the cache


def test_a_judge_that_is_down_is_named():
    with serving(moody) as (url, _):
        pass
    (found,) = Judge(url, model="m", prompt="{completion}", retries=0)(["p"], ["9"])
    assert isinstance(found, Missing) and found.reason == "judge_down"


def test_requests_are_at_once_and_the_rate_is_limited():
    together = threading.Barrier(16, timeout=60)

    def all_at_once(text, attempt):
        together.wait()
        return 200, "1", {}

    with serving(all_at_once) as (url, _):
        texts = [str(i) for i in range(16)]
        judge = Judge(url, model="m", prompt="{completion}", concurrency=16, timeout_s=60)
        assert judge(["p"] * 16, texts) == [1.0] * 16
        limited = Judge(url, model="m", prompt="{completion}", concurrency=16, per_second=20)
        start = time.monotonic()
        limited(["p"] * 16, texts)
        assert time.monotonic() - start >= 15 / 20
