# SPDX-License-Identifier: Apache-2.0
"""Environments in processes: what they say, and every way in which they fail."""

import asyncio
import contextlib
import json
import os
import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_sessions import LONG, Scripted, all_played, played, row

from tba_jax.environments import adapters
from tba_jax.environments.episode import Attempt, Environment
from tba_jax.environments.episodes import EnvironmentPool
from tba_jax.rewards.scores import Score
from tba_jax.serving import chat as chats
from tba_jax.serving.chat import Served

FILE = Path(__file__).with_name("environments_for_tests.py")


class Letters:
    """A tokenizer of characters."""

    def encode(self, text, add_bos=False):
        return np.array([ord(c) for c in text], np.int32)

    def decode(self, ids, skip_special=True):
        return "".join(map(chr, ids))


class Chat:
    """A chat is the text of its messages; a turn with calls is their JSON."""

    drops = "nothing"

    def prompt(self, chat):
        texts = [m["content"].replace(self.drops, "") for m in chat.messages]
        return Letters().encode("".join(texts))

    def bridge(self, prompt, completion, chat):
        before, whole = np.concatenate([prompt, completion]), self.prompt(chat)
        return whole if np.array_equal(whole[: len(before)], before) else None

    def read(self, tokens, text, prompt, tools):
        calls = json.loads(text) if text.startswith("[") else []
        return {"role": "assistant", "content": text}, calls


@contextlib.contextmanager
def pool_of(name, timeout_s=30.0, **options):
    served = Served("policy", Letters(), Chat(), (), 99)
    pool = EnvironmentPool(name, served, max_turns=9, timeout_s=timeout_s, **options)
    with contextlib.closing(pool):
        pool.check()
        yield pool


def play(pool, turns, *rows):
    """Texts and ends of the episodes of rows, whose prompts select their turns."""
    num_turns = dict.fromkeys(turns, 0)

    def next_turn(prompt):
        name = Letters().decode(prompt)[0]
        num_turns[name] += 1
        return turns[name][num_turns[name] - 1]

    rows = rows or [row(Letters(), name) for name in turns]
    found = all_played(pool, Scripted(Letters(), next_turn), rows)
    return [
        (y.finish, y.verdict, [Letters().decode(y.tokens[path]) for path in y.paths]) for y in found
    ]


CHAT = {"prompt": [{"role": "user", "content": "p"}]}


def calls(*each):
    return json.dumps([{"id": str(i), **call} for i, call in enumerate(each)])


@pytest.fixture(scope="module")
def games():
    with pool_of(f"{FILE}:Game", 2.0) as pool:
        yield pool


def test_an_environment_with_step_is_asked_turn_by_turn_and_its_rewards_are_added(games):
    ((finish, verdict, texts),) = play(games, {"p": ["a", "b", "end"]})
    assert (finish, verdict, texts) == ("done", Score(3.0, None), ["ap:abp:bend"])


def test_a_chat_whose_template_drops_a_turn_begins_another_path(games):
    games.served.chat.drops = "b"
    try:
        ((_, verdict, texts),) = play(games, {"p": ["a", "b", "end"]}, row(Letters(), "p", **CHAT))
    finally:
        del games.served.chat.drops
    # The dropped letter is in the prompt of no turn, and what was sampled before is given text.
    said = str(CHAT["prompt"])
    assert texts == [f"a{said}:ab", f"a{said}:a{said}:end"] and verdict.reward == 3.0


def test_a_chat_does_not_continue_a_turn_without_messages_that_followed_its_own(monkeypatch):
    # As in the library renderers, a bridge adds new messages and does not look at earlier ones.
    def bridge(self, prompt, completion, chat):
        return np.concatenate([prompt, completion, Letters().encode(chat.messages[-1]["content"])])

    async def play():
        session = Scripted(Letters(), ["a", "b", "c"])
        attempt = Attempt(0, 0, row(Letters(), "p"), np.zeros(2, np.uint32), LONG)
        pool = SimpleNamespace(served=SimpleNamespace(chat=Chat()), max_turns=9)

        def ask(turn):
            turn.response.set_result(session.response(session.submit(turn.prompt, turn.key, LONG)))

        episode = Environment(pool, attempt, ask)
        said = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]
        path, _ = await episode.turn(chats.Chat(said[:1]), None)
        path.messages = said
        assert (await episode.turn(chats.Chat(()), Letters().encode("pa?")))[0] is path
        await episode.turn(chats.Chat([*said, {"role": "user", "content": "!"}]), None)
        return [Letters().decode(context) for context in session.contexts]

    monkeypatch.setattr(Chat, "bridge", bridge)
    assert asyncio.run(play()) == ["p", "pa?", "pa!"]


FAILURES = {
    "hang": "environment_timeout",
    "die": "environment_crash",
    "raise": "environment_error",
    "type": "environment_type",
    "nan": "environment_nan",
}


@pytest.mark.parametrize("text", FAILURES)
def test_a_failure_has_a_name_a_line_and_costs_no_other_episode(games, text, capsys):
    bad, other = play(games, {"b": [text], "p": ["a", "end"]})
    assert bad[1] == Score(None, FAILURES[text]) and bad[2] == [text]
    (line,) = capsys.readouterr().err.splitlines()
    assert str(FILE) in line and FAILURES[text] in line
    assert other[1] == Score(2.0, None)


def test_a_class_written_for_trl_has_tools_and_a_reward_that_may_be_awaited():
    with pool_of(f"{FILE}:Counter") as pool:
        assert pool.schemas and pool.has_reward
        turns = [
            calls({"name": "add", "arguments": {"n": 4}}),
            calls({"name": "add", "arguments": {"m": 4}}, {"name": "add", "error": "no JSON"}),
            calls({"name": "reset"}),
            "stop",
        ]
        session = Scripted(Letters(), turns)
        y = played(pool, session, row(Letters(), "pq", **CHAT, start=3, more=1))
        first, *_, last = map(Letters().decode, session.contexts)
        assert first == "pfrom 3" and f"{turns[0]}7{turns[1]}error: TypeError" in last
        assert "error: no JSON" in last and "error: no tool 'reset'; there are add" in last
        assert (y.finish, y.verdict, y.num_failed_calls) == ("eos", Score(7.0, None), 3)
        assert len({*map(tuple, session.keys)}) == 4, "each turn has a key of its own"


def test_typed_functions_are_tools_without_a_state_or_a_reward():
    with pool_of(f"tba_jax.environments.tools:python, {FILE}:lookup") as pool:
        assert pool.schemas and not pool.has_reward
        asked = calls(
            {"name": "lookup", "arguments": {"key": "a"}},
            {"name": "python", "arguments": {"code": "3*4"}},
        )
        ((finish, verdict, texts),) = play(pool, {"p": [asked, "x"]}, row(Letters(), "p", **CHAT))
        assert (finish, verdict, texts) == ("eos", None, [f"{asked}112\nx"])


@pytest.fixture
def openenv():
    """URL of a server with the messages of OpenEnv, which returns what it receives."""
    library = pytest.importorskip("websockets.sync.server", reason="websockets is not installed")
    fields = {"text": {"type": "string"}, "metadata": {"type": "object"}}

    def schema(connection, request):
        found = json.dumps({"action": {"properties": fields}})
        return connection.respond(200, found) if request.path == "/schema" else None

    def serve(connection):
        for message in map(json.loads, connection):
            kind, data = "observation", message["data"]
            answer = {"observation": {"seen": data, "metadata": {}}, "reward": None, "done": False}
            if message["type"] == "step":
                answer |= {"reward": 0.5, "done": data["text"] == "end"}
            if data == {"text": "bad"}:
                kind, answer = "error", {"code": "VALIDATION_ERROR", "message": "no"}
            connection.send(json.dumps({"type": kind, "data": answer}))

    with library.serve(serve, "127.0.0.1", 0, process_request=schema) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


@pytest.mark.parametrize("columns", [{"seed": 3}, {**CHAT, "seed": 3}])
def test_a_server_of_openenv_plays_an_episode_in_each_session(openenv, columns):
    with pool_of(f"openenv:{openenv}") as pool:
        assert pool.first_token_only and pool.has_reward and not pool.is_agent
        turns = {"p": ["a", "bad", "end"]}
        ((finish, verdict, (text,)),) = play(pool, turns, row(Letters(), "p", **columns))
    assert (finish, verdict) == ("done", Score(1.0, None))
    seen = json.dumps({"seen": {"prompt": columns.get("prompt", "p"), "seed": 3}})
    assert text == f"\n{seen}a" + '{"seen": {"text": "a"}}baderror: noend'


def test_many_episodes_share_few_processes_and_coroutines_run_concurrently():
    with pool_of(f"{FILE}:Concurrent", 30.0) as pool:
        rows = [row(Letters(), "p", **CHAT, start=i % 5) for i in range(64)]
        session = Scripted(Letters(), lambda p: "x" if "]" in Letters().decode(p) else waits)
        session.num_slots, waits = 64, calls({"name": "wait"})
        found = all_played(pool, session, rows)
        pids = {Letters().decode(y.tokens).partition("]")[2][:-1] for y in found}
        assert pids == {str(each.process.pid) for each in pool.workers.workers}
        assert len(pids) == 4
        # Booleans, None and numpy's scalars count as in reward functions.
        wanted = [(1.0, None), (None, "reward_none"), (0.5, None), (1.0, None)]
        wanted = [Score(*each) for each in [*wanted, (None, "environment_type")]]
        assert [y.verdict for y in found] == [wanted[i % 5] for i in range(64)]


def test_a_call_that_hangs_costs_the_episodes_of_its_worker_and_no_other(capsys):
    with pool_of(f"{FILE}:Game", 1.0, num_workers=2) as pool:
        turns = {"a": ["hang"], "b": ["nap", "end"], "c": ["a", "a"], "d": ["a", "end"]}
        reasons = [verdict.reason for _, verdict, _ in play(pool, turns)]
        assert reasons == ["environment_timeout", None, "environment_lost", None]
        ((_, verdict, _),) = play(pool, {"p": ["a", "end"]})
        assert verdict == Score(2.0, None)
    assert "a turn took longer than 1 s (reward.timeout_s)" in capsys.readouterr().err


def test_a_pool_that_is_closed_ends_the_session_that_waits_for_it():
    with pool_of(f"{FILE}:Game", 60.0) as pool:
        session = Scripted(Letters(), lambda prompt: pool.close() or "hang")
        with pytest.raises(RuntimeError, match="environments of this run were closed"):
            played(pool, session, row(Letters(), "p"))


@pytest.mark.slow
def test_an_import_may_take_longer_than_a_call(tmp_path):
    game = "class Game:\n    def init(self, prompt): ...\n    def step(self, text): ..."
    (tmp_path / "slow.py").write_text(f"import time\ntime.sleep(3)\n{game}")
    with pool_of(f"{tmp_path / 'slow.py'}:Game", 1.5):
        pass


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lookup,lookup", "two of the tools lookup, lookup have one name"),
        ("Untyped", "DocstringParsingException: .* undescribed"),
        ("Slow", "OSError: no such server"),
        ("Absent", "has no attribute 'Absent'"),
        ("os", "neither reset"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(name, reason):
    names = ",".join(f"{FILE}:{each}" for each in name.split(","))
    with pytest.raises(ValueError, match=reason) as error, pool_of(names):
        pass
    assert "\n" not in str(error.value)


def test_a_worker_ends_with_the_process_of_its_taskset(tmp_path, monkeypatch):
    (tmp_path / "bridge.py").write_text("import sys, time\nprint(2, flush=True)\ntime.sleep(0.2)\n")
    monkeypatch.setattr(adapters.verifiers_bridge, "__file__", str(tmp_path / "bridge.py"))
    codes: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "_exit", codes.put)
    assert adapters.load("verifiers:some/taskset")().is_agent
    assert codes.get(timeout=60) == 1
