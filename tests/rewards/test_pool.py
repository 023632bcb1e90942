# SPDX-License-Identifier: Apache-2.0
"""The reward pool against rewards that hang, raise, crash and return nonsense."""

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tba_jax import workers
from tba_jax.rewards import functions
from tba_jax.rewards.functions import RewardPool
from tba_jax.rewards.scores import Completion, RewardFailure, Score

# A user's module in the working directory: what the reward does is written in the completion.
REWARDS = '''
import asyncio, os, signal, subprocess, sys, time

ACTIONS = {
    "hang": lambda: time.sleep(600),
    "_exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "memory": lambda: float(len(bytearray(2**35))),
    "pid": os.getpid,
}

def score_one(text):
    name = text.partition(" ")[2]
    if text in ACTIONS:
        return ACTIONS[text]()
    if text == "raise":
        raise Unpicklable("broken on purpose", 1)
    if text == "message":
        raise ValueError("x" * 10**7)
    if text.startswith("child "):  # a shell, and what it starts, outlive a killed Python
        os.system(f"sleep 600 & echo $! > {name}")
        if name.startswith("hang"):
            time.sleep(600)
        if name.startswith("die"):
            os._exit(1)
    if text.startswith("print "):
        print(text, flush=True)
        subprocess.run("echo of a child 1>&2", shell=True)
    if text.startswith("imported "):
        return name in sys.modules
    if text.startswith("sleep "):
        time.sleep(float(name))
    return float(len(text))

class Unpicklable(Exception):
    """Two arguments in, one kept: such an exception cannot be rebuilt in another process."""
    def __init__(self, message, code):
        super().__init__(message)

def by_text(prompts, completions, **columns):
    return [score_one(text) for text in completions]

def by_column(prompts, completions, answer, **columns):
    return [float(p + c == a) for p, c, a in zip(prompts, completions, answer)]

def sizes(prompts, completions, **columns):
    return [float(len(completions))] * len(completions)

ranked = []

def ranks(prompts, completions, **columns):
    """Compares the completions of a call; the first call is slow, as a cold start is."""
    if not ranked:
        time.sleep(0.3 * len(completions))
    ranked.append(len(completions))
    if "raise" in completions:
        raise ValueError("broken on purpose")
    order = sorted(completions)
    return [order.index(text) + 0.5 * len(order) for text in completions]

loops = set()

async def counts_loops(prompts, completions, **columns):
    loops.add(asyncio.get_running_loop())
    return [float(len(loops))] * len(completions)

def as_dict(prompts, completions, **columns):
    return dict.fromkeys(completions, 1.0)

def make_jobs():
    async def handle(message, reply):
        if message == "wait":
            await asyncio.Event().wait()
        while True:
            await reply("pong")
    return handle

def words(prompts, completions, **columns):
    return ["good"] * len(completions)
'''


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The working directory of these tests, with the user's modules in it."""
    path = tmp_path_factory.mktemp("rewards")
    (path / "user_rewards.py").write_text(REWARDS)
    (path / "slow_to_import.py").write_text("import time\ntime.sleep(600)\n")
    (path / "ends_at_import.py").write_text("import os\nos._exit(1)\n")
    before = os.getcwd()
    os.chdir(path)
    yield path
    os.chdir(before)


@pytest.fixture
def make(folder):
    pools = []

    def made(name="by_text", num_workers=1, timeout_s=1.0, logs=None, row=None):
        function = name if ":" in name else f"user_rewards:{name}"
        options = {"num_workers": num_workers, "timeout_s": timeout_s, "logs": logs, "row": row}
        pools.append(RewardPool(function, **options))
        return pools[-1]

    yield made
    for pool in pools:
        pool.close()


def score(pool, texts, prompts=None, **columns):
    rows = zip(prompts or [""] * len(texts), texts, *columns.values(), strict=True)
    found = [Completion(*x[:2], dict(zip(columns, x[2:], strict=True))) for x in rows]
    return asyncio.run(pool.score(found))


def rewards(*arguments, **columns):
    return [found.reward for found in score(*arguments, **columns)]


def reasons(*arguments):
    return [found.reason for found in score(*arguments)]


def test_a_trial_that_is_late_does_not_fail_and_waits_seconds_only(make, monkeypatch):
    monkeypatch.setattr(functions, "_TRIAL_S", 0.1)
    start_s, pool = time.monotonic(), make(row=("", {"answer": "hang"}), timeout_s=500.0)
    pool.check()
    assert time.monotonic() - start_s < 100  # with the start of a worker on a busy machine
    assert reasons(pool, ["1"]) == [None]


def test_items_keep_their_order_and_columns_and_a_call_has_whole_groups(make):
    pool = make("by_column")
    n = 100
    completions = [str(i) for i in range(n)]
    answer = [f"p{i}{i}" if i % 3 else "wrong" for i in range(n)]
    result = score(pool, completions, [f"p{i}" for i in range(n)], answer=answer)
    assert result == [Score(float(i % 3 != 0)) for i in range(n)]
    assert score(pool, [], answer=[]) == []
    pool = make("sizes", num_workers=2)
    prompts = [*"a" * 24, *"b" * 8, *"c" * 8, *"d" * 4]
    assert rewards(pool, ["x"] * 44, prompts) == [24.0] * 24 + [8.0] * 16 + [4.0] * 4
    # Responses that are alone share calls.
    assert rewards(pool, ["x"] * 5, "abcde") == [5.0] * 5


FAILURES = {
    "raise": ("reward_error", "broken on purpose"),
    "_exit": ("reward_crash", "its process ended (exit code 0)"),
    "nan": ("reward_nan", "returned nan"),
    "memory": ("reward_error", "MemoryError"),
    "message": ("reward_error", "(cut)"),
    "none": ("reward_none", "returned None"),
    "hang": ("reward_timeout", "took longer than 2 s"),
}


def test_each_failure_has_its_reason_and_no_other_item_fails(make):
    texts = ["a" * i for i in range(12)]
    found = score(make(num_workers=2, timeout_s=2.0), [*texts, *FAILURES])
    assert found[:12] == [Score(float(i)) for i in range(12)]
    for text, failed in zip(FAILURES, found[12:], strict=True):
        reason, message = FAILURES[text]
        assert failed[:2] == (None, reason)
        assert message in failed.text


@pytest.mark.slow
def test_a_function_that_compares_responses_gives_equal_rewards_when_it_is_slow_at_first(make):
    for _ in range(2):
        pool = make("ranks", num_workers=2)
        for _ in range(2):
            assert rewards(pool, ["b", "d", "a", "c"]) == [3.0, 5.0, 2.0, 4.0]
        raised = score(pool, ["b", "raise", "a", "c"])
        assert raised[1].reason == "reward_error"
        assert [x.reward for x in raised] == [2.5, None, 1.5, 3.5]  # ranks among the others


def test_a_coroutine_that_waits_for_ever_is_late_although_other_jobs_are_answered(monkeypatch):
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.setattr(workers, "MOST_DEADLINES", 4)
    jobs, end = importlib.import_module("user_rewards").make_jobs, time.monotonic() + 60.0

    async def ask(pool):
        waits, plays = workers.Job(pool), workers.Job(pool)
        waiting = asyncio.ensure_future(waits.ask("wait", 0.5, "a wait"))
        with pytest.raises(workers.WorkerFailed, match="by another job|another job ended"):
            while time.monotonic() < end:
                assert await plays.ask("ping", 60.0, "a ping") == "pong"
        with pytest.raises(workers.WorkerFailed, match="a wait took longer than 0.5 s"):
            await waiting

    with contextlib.closing(workers.WorkerPool("job", jobs, (), num_workers=1)) as pool:
        pool.run(ask(pool)).result(120.0)


@pytest.mark.parametrize("num_workers", [1, 0])
def test_coroutines_of_a_worker_share_one_event_loop(make, monkeypatch, num_workers):
    monkeypatch.syspath_prepend(os.getcwd())
    pool = make("counts_loops", num_workers=num_workers)
    assert [rewards(pool, ["a"]) for _ in range(3)] == [[1.0]] * 3


def test_processes_import_neither_jax_nor_transformers(make):
    heavy = ["jax", "jaxlib", "flax", "transformers", "torch", "grain", "matplotlib"]
    texts = [f"imported {name}" for name in [*heavy, "user_rewards", "tba_jax.workers"]]
    pool = make("user_rewards:by_text")
    assert rewards(pool, texts) == [0.0] * len(heavy) + [1.0, 1.0]
    # A process that is killed while it is idle loses nothing.
    os.kill(int(rewards(pool, ["pid"])[0]), signal.SIGKILL)
    assert score(pool, ["abc"] * 2) == [Score(3.0)] * 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("words", "words' returned 'good', a str, as a reward; want a number"),
        ("as_dict", "as_dict' returned dict; want a list with a number or None"),
    ],
)
def test_a_function_that_can_never_work_is_an_error_not_a_reward(
    make, monkeypatch, function, message
):
    monkeypatch.syspath_prepend(os.getcwd())  # the function is called in this process
    with pytest.raises(ValueError, match=message):
        score(make(function, num_workers=0), ["a", "b", "c", "d"] * 2)


def test_imports_that_hang_or_end_the_process_are_named(make, monkeypatch):
    with pytest.raises(RewardFailure, match="ends_at_import:f: its process ended .exit code 1."):
        score(make("ends_at_import:f"), ["a"])
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 1.0)
    with pytest.raises(
        RewardFailure, match="with the import of the user.s module .* took longer than 1 s"
    ):
        score(make("slow_to_import:f"), ["a"])


def test_closing_ends_a_score_under_way(make):
    pool = make()
    score(pool, ["a"])
    closer = threading.Timer(0.3, pool.close)
    closer.start()
    for texts in (["sleep 0.5"] * 8, ["a"]):
        with pytest.raises(RuntimeError, match="workers were closed"):
            score(pool, texts)
    closer.join(10)


def test_processes_die_with_a_killed_parent(folder):
    """Those that hang in user code, and those that wait for work and find their pipe closed."""
    script = """
import asyncio, time
from tba_jax.rewards.functions import RewardPool
from tba_jax.rewards.scores import Completion
pools = [RewardPool("user_rewards:by_text", timeout_s=600.0) for _ in "ab"]
def score(pool, text):
    return asyncio.run(pool.score([Completion("", text)]))
print(*(int(score(pool, "pid")[0].reward) for pool in pools), flush=True)
for pool, name in zip(pools, ("idle.pid", "hang.pid")):
    score(pool, f"child {name}")
"""
    (folder / "parent.py").write_text(script)
    options = {"cwd": folder, "stdout": subprocess.PIPE, "text": True}
    options["env"] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "parent.py"], **options) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        for name in ("idle.pid", "hang.pid"):
            wait_for(lambda file=folder / name: file.exists() and file.read_text())
            pids.append(int((folder / name).read_text()))
        assert len(pids) == 4 and all(map(runs, pids))
        parent.kill()
    wait_for(lambda: not any(map(runs, pids)))


@pytest.mark.parametrize(("how", "reason"), [("hang", "reward_timeout"), ("die", "reward_crash")])
def test_what_a_killed_process_started_is_killed_too(make, folder, how, reason):
    assert reasons(make(), [f"child {how}_late.pid"]) == [reason]
    wait_for(lambda: not runs(int((folder / f"{how}_late.pid").read_text())))


def test_each_process_has_a_log_file(make, tmp_path):
    pool = make(logs=tmp_path / "logs")
    score(pool, ["print me", "kill"])
    score(pool, ["print again"])
    (file,) = (tmp_path / "logs").iterdir()
    assert file.name.startswith("reward-") and file.name.endswith("-0.log")
    # The call with "kill", each item alone, the items without a failure.
    assert file.read_text() == "print me\nof a child\n" * 3 + "print again\nof a child\n"


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
