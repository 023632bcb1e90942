# SPDX-License-Identifier: Apache-2.0
"""A judge over the network that is slow, down, rate-limited, or answers nonsense."""

import contextlib
import http.server
import json
import threading
import time
import zlib
from collections import Counter

import pytest

from tba_jax.rewards.functions import Missing
from tba_jax.rewards.pool import RewardPool
from tba_jax.rewards.remote_judge import HttpReward, Judge, last_number
from tests.integration import commands


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
        judge(["p"] * 8, TEXTS, answer=["a"] * 8)
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


def test_prompts_are_filled_in_once_and_the_last_number_counts():
    bodies = []
    judge = Judge("http://x/v1", model="m", prompt="{prompt} {completion} {answer} {other}")
    bodies.append(judge._body("{answer}", "{prompt}", {"answer": "7"}))
    assert bodies[0]["messages"][0]["content"] == "{answer} {prompt} 7 {other}"
    assert last_number("3 of 10, so 0.5") == 0.5
    with pytest.raises(ValueError, match="no number"):
        last_number("none")


def test_a_reward_process_asks_the_judge_and_counts_what_is_missing(tmp_path):
    with serving(moody) as (url, _):
        file = tmp_path / "mine.py"
        file.write_text(
            "import sys\nfrom tba_jax.rewards.remote_judge import Judge\n"
            "assert not {'jax', 'transformers'} & {*sys.modules}\n"
            f"judge = Judge({url!r}, model='m', prompt='{{completion}}', timeout_s=1, retries=0)\n"
        )
        pool = RewardPool(f"{file}:judge", num_workers=1, timeout_s=30, max_failure_rate=1.0)
        try:
            texts = ["good 8", "slow", "nonsense", "always limited"]
            found = pool.score(["p"] * 4, texts, {})
        finally:
            pool.close()
    assert found.rewards == [8.0, None, None, None]
    assert found.reasons == [None, "judge_timeout", "judge_nonsense", "judge_rate_limit"]
    assert "p" in found.first_traceback


def test_a_service_of_another_kind_is_read_by_a_function():
    reward = HttpReward("http://x", lambda p, c, columns: {"t": c}, lambda answer: answer["r"])
    reward._once = lambda body: float(len(body))
    assert reward(["p"], ["four"]) == [float(len(b'{"t": "four"}'))]


def often_failing(text, attempt):
    kind = zlib.crc32(text.encode()) % 7
    if kind == 0:
        time.sleep(1.5)
    return {
        1: (429, "", {}),
        2: (200, "I would rather not say", {}),
        3: (401, "", {}),
        4: (0, "", {}),
    }.get(kind, (200, f"Rating: {kind}", {}))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_goes_on_with_a_judge_that_often_fails_and_counts_each_failure(tmp_path):
    with serving(often_failing) as (url, _):
        (tmp_path / "mine.py").write_text(
            "from tba_jax.rewards.remote_judge import Judge\n"
            f"judge = Judge({url!r}, model='m', prompt='{{completion}}', timeout_s=0.5, retries=0)"
        )
        done = commands.run(
            tmp_path / "run",
            f"task.reward={tmp_path}/mine.py:judge",
            "reward.max_failure_rate=1.0",
            "num_steps=6",
            cache=tmp_path / "cache",
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    ledger = json.loads((tmp_path / "run" / "report.json").read_text())["ledger"]
    reasons = ("timeout", "rate_limit", "nonsense", "error", "down")
    for name in (f"judge_{reason}" for reason in reasons):
        assert ledger["rejected"].get(name, 0) > 0, ledger
    evicted = sum(count for name, count in ledger.items() if name.startswith("evicted"))
    rejected = sum(ledger["rejected"].values())
    kept = ledger["outbox"] + ledger["stored"] + ledger["duplicate"]
    assert ledger["generated"] == kept + evicted + rejected and rejected > 0, ledger
