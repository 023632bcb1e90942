# SPDX-License-Identifier: Apache-2.0
"""The reward pool against rewards that hang, raise, crash and return nonsense."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tba_jax import workers
from tba_jax.rewards import pool as pool_module
from tba_jax.rewards.pool import RewardPool, start_workers
from tba_jax.rewards.source import RewardFailure

TIMEOUT_S = 1.0

# A user's module in the working directory: what the reward does is written in the completion.
REWARDS = '''
import os, signal, subprocess, sys, time

def score_one(text):
    if text == "hang":
        time.sleep(600)
    if text == "raise":
        raise Unpicklable("broken on purpose", 1)
    if text == "_exit":
        os._exit(0)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text in ("nan", "inf"):
        return float(text)
    if text == "none":
        return None
    if text == "memory":
        return float(len(bytearray(2**35)))
    if text == "message":
        raise ValueError("x" * 10**7)
    if text.startswith("child "):  # a shell, and what it starts, outlive a killed Python
        name = text.split()[1]
        os.system(f"sleep 600 & echo $! > {name}")
        if name.startswith("hang"):
            time.sleep(600)
        if name.startswith("die"):
            os._exit(1)
    if text == "pid":
        return os.getpid()
    if text.startswith("print "):
        print(text, flush=True)
        subprocess.run("echo of a child 1>&2", shell=True)
    if text.startswith("imported "):
        return text.split()[1] in sys.modules
    if text.startswith("sleep "):
        time.sleep(float(text.split()[1]))
    return float(len(text))

class Unpicklable(Exception):
    """Two arguments in, one kept: such an exception cannot be rebuilt in another process."""
    def __init__(self, message, code):
        super().__init__(message)

def by_text(prompts, completions, **columns):
    return [score_one(text) for text in completions]

def by_column(prompts, completions, answer, **columns):
    return [float(p + c == a) for p, c, a in zip(prompts, completions, answer)]

def one_short(prompts, completions, **columns):
    return [1.0] * (len(completions) - 1)

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

client = None

async def keeps_a_client(prompts, completions, **columns):
    """An object of asyncio that belongs to the loop of its first use, as a keep-alive client."""
    global client
    import asyncio
    if client is None:
        client = asyncio.Queue()
        client.loop = asyncio.get_running_loop()
    assert client.loop is asyncio.get_running_loop() and not client.loop.is_closed()
    return [1.0] * len(completions)

def as_dict(prompts, completions, **columns):
    return dict.fromkeys(completions, 1.0)

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


def make_pool(
    function="user_rewards:by_text", num_workers=1, timeout_s=TIMEOUT_S, logs=None, row=None
):
    workers = start_workers(function, num_workers, logs)
    return RewardPool(function, timeout_s=timeout_s, row=row, workers=workers)


@pytest.fixture(scope="module")
def pool(folder):
    pool = make_pool(num_workers=2)
    yield pool
    pool.close()


def score(pool, texts):
    return pool.score([""] * len(texts), texts, {})


def test_the_trial_of_a_function_that_hangs_ends_before_its_deadline(monkeypatch):
    monkeypatch.setattr(pool_module, "TRIAL_S", 0.5)
    pool = make_pool(timeout_s=600.0, row=("", {"answer": "hang"}))
    try:
        began = time.monotonic()
        pool.check()
        assert time.monotonic() - began < 120  # the import may take START_TIMEOUT_S
        assert score(pool, ["1"]).reasons == [None]
    finally:
        pool.close()


def test_items_keep_their_order_and_columns():
    pool = make_pool("user_rewards:by_column")
    n = 100
    completions = [str(i) for i in range(n)]
    answer = [f"p{i}{i}" if i % 3 else "wrong" for i in range(n)]
    result = pool.score([f"p{i}" for i in range(n)], completions, {"answer": answer})
    assert result.rewards == [float(i % 3 != 0) for i in range(n)]
    assert result.reasons == [None] * n
    assert result.first_traceback == ""
    assert pool.score([], [], {"answer": []}) == ([], [], "", {})
    with pytest.raises(ValueError, match="answer holds 1 values for 2 completions"):
        pool.score(["", ""], ["", ""], {"answer": ["1"]})
    pool.close()


def test_a_call_has_whole_groups():
    pool = make_pool("user_rewards:sizes", num_workers=2)
    prompts = [*"a" * 24, *"b" * 8, *"c" * 8, *"d" * 4]
    got = pool.score(prompts, ["x"] * len(prompts), {}).rewards
    assert got == [24.0] * 24 + [8.0] * 16 + [4.0] * 4
    # Responses that are alone share calls.
    assert pool.score("abcde", ["x"] * 5, {}).rewards == [5.0] * 5
    pool.close()


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        ("hang", "reward_timeout", "took longer than 1.0 s"),
        ("raise", "reward_error", "broken on purpose"),
        ("_exit", "reward_crash", "died"),
        ("nan", "reward_nan", "returned nan"),
        ("memory", "reward_error", "MemoryError"),
        ("message", "reward_error", "(cut)"),
        ("none", "reward_none", "returned None"),
    ],
)
def test_each_failure_has_its_reason_and_no_other_item_fails(pool, text, reason, message):
    texts = ["a" * i for i in range(20)]
    texts[17] = text
    start = time.monotonic()
    result = score(pool, texts)
    wall_s = time.monotonic() - start
    assert result.rewards == [None if i == 17 else float(i) for i in range(20)]
    assert result.reasons == [reason if i == 17 else None for i in range(20)]
    assert message in result.first_traceback
    assert repr(text) in result.first_traceback
    # Two deadlines of 1 s (the call, then the item alone) and two starts of a process, on a busy
    # machine; a hanging item sleeps for 600 s.
    assert wall_s < 60


def test_a_slow_group_is_not_blamed_on_its_items():
    pool = make_pool(timeout_s=0.4)
    # 8 items of 0.06 s overrun the deadline as a call, but none of them does alone.
    assert score(pool, ["sleep 0.06"] * 8).reasons == [None] * 8
    pool.close()


def test_a_function_that_compares_responses_gives_equal_rewards_when_it_is_slow_at_first():
    found = []
    for _ in range(2):
        pool = make_pool("user_rewards:ranks", num_workers=2)
        texts = ["b", "d", "a", "c"]
        found += [pool.score(["p"] * 4, texts, {}) for _ in range(2)]
        raised = pool.score(["p"] * 4, ["b", "raise", "a", "c"], {})
        assert raised.reasons == [None, "reward_error", None, None]
        assert raised.rewards == [2.5, None, 1.5, 3.5]  # ranks among the others
        pool.close()
    assert all(result.rewards == [3.0, 5.0, 2.0, 4.0] for result in found)
    assert all(result.reasons == [None] * 4 for result in found)


def test_coroutines_of_a_worker_share_one_event_loop():
    pool = make_pool("user_rewards:keeps_a_client")
    for _ in range(3):
        assert score(pool, ["a"]).rewards == [1.0]
    pool.close()


def test_processes_import_neither_jax_nor_transformers():
    pool = make_pool("tba_jax.rewards.numeric:gsm8k_reward")
    assert pool.score([""], ["so 7"], {"answer": ["#### 7"]}).rewards == [1.0]
    pool.close()
    pool = make_pool()
    heavy = ["jax", "jaxlib", "flax", "transformers", "torch", "grain", "matplotlib"]
    texts = [f"imported {name}" for name in [*heavy, "user_rewards", "tba_jax.workers"]]
    assert score(pool, texts).rewards == [0.0] * len(heavy) + [1.0, 1.0]
    pool.close()


def test_a_process_killed_while_idle_loses_nothing():
    pool = make_pool()
    pid = int(score(pool, ["pid"]).rewards[0])
    os.kill(pid, signal.SIGKILL)
    result = score(pool, ["abc"] * 2)
    assert (result.rewards, result.reasons) == ([3.0] * 2, [None] * 2)
    pool.close()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("user_rewards:one_short", "user_rewards:one_short returned 7 rewards for 8 completions"),
        ("user_rewards:words", "words returned 'good', a str, as a reward .*not a number.; want"),
        ("user_rewards:as_dict", "as_dict returned a dict; want a list with one float or None"),
    ],
)
def test_a_function_that_can_never_work_is_an_error_not_a_reward(function, message):
    pool = make_pool(function)
    with pytest.raises(ValueError, match=message):
        score(pool, ["a", "b", "c", "d"] * 2)
    pool.close()


def test_imports_that_hang_or_end_the_process_are_named(monkeypatch):
    pool = make_pool("ends_at_import:f")
    with pytest.raises(RewardFailure, match="ends_at_import:f: its process ended .at its start"):
        pool.check()
    pool.close()
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 1.0)
    pool = make_pool("slow_to_import:f")
    with pytest.raises(RewardFailure, match="its module was not imported within 1 s"):
        pool.check()
    pool.close()


def test_closing_ends_a_score_under_way():
    pool = make_pool()
    pool.check()
    closer = threading.Timer(0.3, pool.close)
    closer.start()
    with pytest.raises(RuntimeError, match="was closed"):
        score(pool, ["sleep 0.5"] * 8)
    closer.join(10)
    with pytest.raises(RuntimeError, match="was closed"):
        score(pool, ["a"])
    pool.close()


@pytest.mark.parametrize("text", ["child hang.pid", "child idle.pid"])
def test_processes_die_with_a_killed_parent(folder, text):
    """Those that hang in user code, and those that wait for work and find their pipe closed."""
    script = textwrap.dedent("""
        import time
        from tba_jax.rewards.pool import RewardPool
        if __name__ == "__main__":
            pool = RewardPool("user_rewards:by_text", timeout_s=600.0)
            print(int(pool.score([""], ["pid"], {}).rewards[0]), flush=True)
            pool.score([""], ["TEXT"], {})
            time.sleep(600)
    """).replace("TEXT", text)
    (folder / "parent.py").write_text(script)
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "parent.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    orphan = _pid_in(folder / text.split()[1])
    assert _runs(pid) and _runs(orphan)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    _wait_for_end(pid, orphan)


@pytest.mark.parametrize("how", ["hang", "die"])
def test_what_a_killed_process_started_is_killed_too(folder, how):
    pool = make_pool()
    name = f"{how}_late.pid"
    reason = {"hang": "reward_timeout", "die": "reward_crash"}[how]
    assert score(pool, [f"child {name}"]).reasons == [reason]
    _wait_for_end(int((folder / name).read_text()))
    pool.close()


def test_a_reward_that_always_hangs_costs_a_deadline_for_each_process():
    pool = make_pool(num_workers=2)
    start = time.monotonic()
    with pytest.raises(RewardFailure, match="is too slow: each of the first 2 items took"):
        score(pool, ["hang"] * 64)
    # 2 s: a call on each process, then an item on each. A deadline for each item would be 32 s.
    assert time.monotonic() - start < 64 * TIMEOUT_S / 2
    pool.close()


def test_each_process_has_a_log_file(tmp_path):
    pool = make_pool(logs=tmp_path / "logs")
    score(pool, ["print me", "kill"])
    score(pool, ["print again"])
    pool.close()
    (file,) = (tmp_path / "logs").iterdir()
    assert file.name.startswith("reward-") and file.name.endswith("-0.log")
    # The call with "kill", each item alone, the items without a failure.
    assert file.read_text() == "print me\nof a child\n" * 3 + "print again\nof a child\n"


def _wait_for_end(*pids):
    deadline = time.monotonic() + 20
    while any(map(_runs, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _pid_in(file):
    """What a process writes there about another one."""
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(file.read_text())


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
