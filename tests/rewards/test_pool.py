# SPDX-License-Identifier: Apache-2.0
"""The reward pool against rewards that hang, raise, crash and return nonsense."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tba_jax.rewards import output
from tba_jax.rewards import pool as pool_module
from tba_jax.rewards.pool import RewardFailure, RewardPool

TIMEOUT_S = 1.0

# A user's module in the working directory: what the reward does is written in the completion.
REWARDS = '''
import ctypes, os, signal, subprocess, sys, time

def daemon(name):
    """Of another session, another parent and without a variable of its starter."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    code = "import os, time; open(NAME, 'w').write(str(os.getpid())); time.sleep(600)"
    os.execve(sys.executable, [sys.executable, "-Sc", code.replace("NAME", repr(name))], {})

def printing(how, stream, size):
    """Write that many bytes, a marker first."""
    descriptor, size = {"stdout": 1, "stderr": 2}[stream], int(size)
    text = f"begin-{how}-{stream} " + "x" * size
    if how == "python":
        print(text, file=getattr(sys, stream), flush=True)
    elif how == "c":  # while it holds the interpreter lock
        library = ctypes.PyDLL(None)
        while text:
            text = text[library.write(descriptor, text.encode(), len(text)):]
    else:
        code = f"import os; os.write({descriptor}, {text[:50]!r}.encode()); "
        code += f"[os.write({descriptor}, b'x' * 2**16) for _ in range({size} // 2**16)]"
        nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
        subprocess.run([sys.executable, "-c", nested])

def score_one(text):
    if text == "hang":
        time.sleep(600)
    if text == "raise":
        raise Unpicklable("broken on purpose", 1)
    if text == "exit":
        sys.exit(3)
    if text == "_exit":
        os._exit(3)
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "nan":
        return float("nan")
    if text == "inf":
        return float("inf")
    if text == "none":
        return None
    if text == "huge":
        return 1e39
    if text == "memory":
        return float(len(bytearray(2**31)))
    if text == "message":
        raise ValueError("x" * 10**7)
    if text.startswith("child "):  # a shell, and what it starts, outlive a killed Python
        name = text.split()[1]
        os.system(f"sleep 600 & echo $! > {name}; sleep 600")
    if text.startswith(("daemon ", "start ")):
        daemon(text.split()[1])
        while not (os.path.exists(text.split()[1]) and open(text.split()[1]).read()):
            time.sleep(0.01)
        if text.startswith("daemon "):
            time.sleep(600)
    if text == "pid":
        return os.getpid()
    if text.startswith("clear"):
        sys.modules.clear()
        if text == "clear and raise":
            raise KeyError("cleared")
    if text.startswith("print "):
        printing(*text.split()[1:])
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
    if completions[0] == "slow":
        time.sleep(0.03 * len(completions))
    return [float(len(completions))] * len(completions)

class Odd(float):
    def __float__(self):
        raise KeyError("no number today")

def odd(prompts, completions, **columns):
    return [Odd(1.0) for _ in completions]

def wide(prompts, completions, **columns):
    import numpy
    return [numpy.zeros(3) for _ in completions]

def words(prompts, completions, **columns):
    return ["good"] * len(completions)

number = 3
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
    function="user_rewards:by_text", *, num_workers=1, timeout_s=TIMEOUT_S, max_failure_rate=1.0
):
    return RewardPool(
        function,
        num_workers=num_workers,
        timeout_s=timeout_s,
        max_failure_rate=max_failure_rate,
        max_memory_bytes=2**30,
    )


@pytest.fixture(scope="module")
def pool(folder):
    pool = make_pool(num_workers=2)
    yield pool
    pool.close()


def score(pool, texts):
    return pool.score([""] * len(texts), texts, {})


def test_the_trial_of_a_function_that_hangs_ends_before_its_deadline(monkeypatch):
    monkeypatch.setattr(pool_module, "TRIAL_S", 0.5)
    pool = RewardPool(
        "user_rewards:by_text",
        num_workers=1,
        timeout_s=600.0,
        max_failure_rate=1.0,
        max_memory_bytes=2**30,
        row=("", {"answer": "hang"}),
    )
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
    pool.close()


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        ("hang", "reward_timeout", "took longer than 1.0 s"),
        ("raise", "reward_error", "broken on purpose"),
        ("exit", "reward_error", "SystemExit: 3"),
        ("_exit", "reward_crash", "died"),
        ("kill", "reward_crash", "died"),
        ("nan", "reward_nan", "returned nan"),
        ("inf", "reward_nan", "returned inf"),
        ("huge", "reward_nan", "returned 1e+39"),
        ("memory", "reward_error", "MemoryError"),
        ("message", "reward_error", "(cut)"),
        ("none", "reward_none", "returned None"),
    ],
)
def test_each_failure_has_its_reason_and_no_other_item_fails(pool, text, reason, message):
    texts = ["a" * i for i in range(40)]
    texts[17] = text
    start = time.monotonic()
    result = score(pool, texts)
    wall_s = time.monotonic() - start
    assert result.rewards == [None if i == 17 else float(i) for i in range(40)]
    assert result.reasons == [reason if i == 17 else None for i in range(40)]
    assert message in result.first_traceback
    assert repr(text) in result.first_traceback
    # Two deadlines of 1 s (the chunk, then the item alone) and two starts of a process, on a busy
    # machine; a hanging item sleeps for 600 s.
    assert wall_s < 60


def test_all_failures_at_once(pool):
    bad = {
        "hang": "reward_timeout",
        "raise": "reward_error",
        "_exit": "reward_crash",
        "nan": "reward_nan",
        "none": "reward_none",
    }
    texts = [text for kind in bad for text in (kind, "fine", kind, "good!")]
    result = score(pool, texts)
    assert result.reasons == [bad.get(text) for text in texts]
    fine = {"fine": 4.0, "good!": 5.0}
    assert result.rewards == [fine.get(text) for text in texts]


@pytest.mark.slow
def test_long_chunk_is_not_blamed_on_its_items():
    pool = make_pool(timeout_s=0.4)
    # 8 items of 0.06 s overrun the deadline as a chunk, but none of them does alone.
    result = score(pool, ["sleep 0.06"] * 16)
    assert result.reasons == [None] * 16
    pid = score(pool, ["pid"]).rewards
    assert score(pool, ["sleep 0.06"] * 16).reasons == [None] * 16
    # The speed is known now: no chunk ran into its deadline, so the process was not replaced.
    assert score(pool, ["pid"]).rewards == pid
    pool.close()


def test_processes_import_neither_jax_nor_transformers():
    pool = make_pool("tba_jax.rewards.numeric:gsm8k_reward")
    assert pool.score([""], ["so 7"], {"answer": ["#### 7"]}).rewards == [1.0]
    pool.close()
    pool = make_pool()
    heavy = ["jax", "jaxlib", "flax", "transformers", "torch", "grain", "matplotlib"]
    texts = [f"imported {name}" for name in [*heavy, "user_rewards", "tba_jax.rewards.pool"]]
    assert score(pool, texts).rewards == [0.0] * len(heavy) + [1.0, 1.0]
    pool.close()


@pytest.mark.parametrize("wait_s", [0.0, 0.3])  # 0.3: its death is known before the next call
def test_a_process_killed_while_idle_loses_nothing(wait_s):
    pool = make_pool()
    for n in (1, 20):
        pid = int(score(pool, ["pid"]).rewards[0])
        os.kill(pid, signal.SIGKILL)
        time.sleep(wait_s)
        result = score(pool, ["abc"] * n)
        assert (result.rewards, result.reasons) == ([3.0] * n, [None] * n)
    pool.close()


@pytest.mark.slow
def test_a_pool_that_stands_still_is_replaced(monkeypatch):
    pool = make_pool(timeout_s=0.5)
    pid = int(score(pool, ["pid"]).rewards[0])
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 1.0)
    os.kill(pid, signal.SIGSTOP)  # idle and frozen: it takes no task, so no deadline runs
    result = score(pool, ["abc", "abcd"])
    assert (result.rewards, result.reasons) == ([3.0, 4.0], [None, None])
    assert not _runs(pid)
    pool.close()


def test_a_process_killed_at_work_loses_nothing():
    pool = make_pool()
    pid = int(score(pool, ["pid"]).rewards[0])
    killer = threading.Timer(0.25, os.kill, (pid, signal.SIGKILL))
    killer.start()
    result = score(pool, ["sleep 0.02"] * 40)
    killer.join(10)
    assert (result.rewards, result.reasons) == ([10.0] * 40, [None] * 40)
    assert int(score(pool, ["pid"]).rewards[0]) != pid
    pool.close()


def test_threads_share_a_pool_through_crashes(pool):
    def texts(thread):
        bad = ("hang", "_exit", "raise", "nan")[thread]
        return ["a" * (thread + 1), bad] + ["a" * i for i in range(30)]

    results = {}
    threads = [
        threading.Thread(target=lambda t=t: results.update({t: score(pool, texts(t))}))
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    reasons = ("reward_timeout", "reward_crash", "reward_error", "reward_nan")
    for t in range(4):
        assert results[t].reasons == [None, reasons[t]] + [None] * 30
        assert results[t].rewards == [t + 1.0, None] + [float(i) for i in range(30)]


def test_too_many_failures_stop_the_run_with_the_first_traceback():
    pool = make_pool(max_failure_rate=0.25)
    assert score(pool, ["raise"] + ["a"] * 3).reasons.count("reward_error") == 1
    with pytest.raises(RewardFailure) as error:
        score(pool, ["raise", "nan"] + ["a"] * 2)
    assert "2 of 4 items {'reward_error': 1, 'reward_nan': 1}" in str(error.value)
    assert "max_failure_rate = 0.25" in str(error.value)
    pool.close()


def test_too_many_failures_are_reported_before_every_item_was_tried():
    pool = make_pool(timeout_s=0.3, max_failure_rate=0.1)
    with pytest.raises(RewardFailure, match="on 1 of 6 items {'reward_timeout': 1}"):
        score(pool, ["hang"] * 6)
    assert score(pool, ["abc"]).rewards == [3.0]  # the pool is still good
    pool.close()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("user_rewards:one_short", "user_rewards:one_short returned 3 rewards for 4 completions"),
        ("user_rewards:words", "words returned 'good', a str, as a reward .*not a number.; want"),
        ("user_rewards:odd", "odd returned 1.0, a Odd, as a reward .KeyError: 'no number today'"),
        (
            "user_rewards:wide",
            "wide returned array.*, a ndarray, as a reward .ValueError: can only",
        ),
    ],
)
def test_malformed_result_is_an_error_not_a_reward(function, message):
    pool = make_pool(function)
    with pytest.raises(ValueError, match=message):
        score(pool, ["a", "b", "c", "d"] * 2)
    pool.close()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("user_rewards:no_such_function", "there is no 'no_such_function' in user_rewards"),
        ("user_rewards:number", "user_rewards:number is a int, not a function"),
    ],
)
def test_function_that_cannot_be_loaded(function, message):
    pool = make_pool(function)
    with pytest.raises(ValueError, match=message):
        pool.check()
    pool.close()


def test_function_that_is_not_named():
    with pytest.raises(ValueError, match=r"'length': want package\.module:function"):
        make_pool("length")


def test_import_that_never_ends_has_a_deadline():
    start = time.monotonic()
    pool = make_pool("slow_to_import:f")
    with pytest.raises(RewardFailure, match="its module was not imported within 1 s"):
        pool.check(timeout_s=1.0)
    pool.close()
    assert time.monotonic() - start < 60  # the import sleeps for 600 s


def test_import_that_ends_its_process_is_a_failure_that_a_user_can_mend():
    pool = make_pool("ends_at_import:f")
    with pytest.raises(RewardFailure, match="ends_at_import:f died while it was starting"):
        pool.check()
    pool.close()


def test_columns_of_other_lengths(pool):
    with pytest.raises(ValueError, match="answer holds 1 values for 2 completions"):
        pool.score(["", ""], ["", ""], {"answer": ["1"]})


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


@pytest.mark.parametrize("text", ["daemon busy.pid", "start idle.pid"])
def test_processes_die_with_a_killed_parent(folder, text):
    """Those that hang in user code, and those that wait for work and find their pipe closed."""
    file = folder / text.split()[1]
    script = textwrap.dedent("""
        import time
        from tba_jax.rewards.pool import RewardPool
        if __name__ == "__main__":
            pool = RewardPool(
                "user_rewards:by_text", num_workers=1, timeout_s=600.0, max_failure_rate=1.0
            )
            print(int(pool.score([""], ["pid"], {}).rewards[0]), pool._groups.folder, flush=True)
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
    pid, records = parent.stdout.readline().split()
    pid = int(pid)
    orphan = _pid_in(file)
    assert _runs(pid) and _runs(orphan)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (_runs(pid) or _runs(orphan)):
        time.sleep(0.1)
    assert not _runs(pid) and not _runs(orphan)
    if text.startswith("daemon"):  # who finds its pipe closed may not know yet why
        assert not os.path.exists(records)


@pytest.mark.parametrize("kind", ["child", "daemon"])
def test_what_a_killed_process_started_is_killed_too(folder, kind):
    pool = make_pool()
    assert score(pool, ["a", f"{kind} {kind}.pid"]).reasons == [None, "reward_timeout"]
    pid = int((folder / f"{kind}.pid").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(pid):
        score(pool, ["a"])
    assert not _runs(pid)
    records = Path(pool._groups.folder)
    pool.close()
    assert not records.exists()


def test_what_a_process_started_goes_with_it_when_the_pool_is_closed(folder):
    pool = make_pool(timeout_s=600.0)
    thread = threading.Thread(
        target=lambda: pytest.raises(RuntimeError, score, pool, ["daemon late.pid"]), daemon=True
    )
    thread.start()
    pid = _pid_in(folder / "late.pid")
    assert _runs(pid)
    pool.close()
    thread.join(10)
    assert not _runs(pid)


def test_a_reward_that_always_hangs_costs_a_deadline_for_each_process():
    pool = make_pool(num_workers=2)
    start = time.monotonic()
    with pytest.raises(RewardFailure, match="is too slow: each of the first 2 items took"):
        score(pool, ["hang"] * 64)
    # 2 s: a chunk on each process, then an item on each. A deadline for each item would be 32 s.
    assert time.monotonic() - start < 64 * TIMEOUT_S / 2
    pool.close()


@pytest.mark.parametrize("how", ["python", "c", "grandchild"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_printed_output_is_limited_and_what_was_dropped_is_counted(how, stream, capfd):
    size = 2**23
    pool = make_pool(timeout_s=60.0)
    assert score(pool, [f"print {how} {stream} {size}", "print python stdout 3"]).rewards[0] > 0
    pool.close()
    printed = capfd.readouterr()._asdict()[{"stdout": "out", "stderr": "err"}[stream]]
    assert printed.startswith(f"begin-{how}-{stream} ")
    # A window may end meanwhile.
    assert output.WINDOW_BYTES <= len(printed) <= 3 * output.WINDOW_BYTES
    reports = re.findall(r"reward functions: ([\d,]+) bytes of their output were dropped", printed)
    num_dropped = sum(int(n.replace(",", "")) for n in reports)
    assert size <= num_dropped + printed.count("x") <= size + 100


def test_a_reward_that_clears_the_imported_modules_is_scored_and_prints_nothing(capfd):
    pool = make_pool()
    result = score(pool, ["clear", "clear and raise"])
    pool.close()
    assert (result.rewards, result.reasons) == ([5.0, None], [None, "reward_error"])
    assert "cleared" in result.first_traceback
    assert capfd.readouterr() == ("", "")


def test_what_a_process_prints_before_it_dies_is_shown(capfd):
    pool = make_pool()
    score(pool, ["print python stderr 3", "kill"])
    pool.close()
    assert "begin-python-stderr xxx\n" in capfd.readouterr().err


def test_output_is_limited_in_rate_and_in_all():
    limiter = output.Limiter()
    block, shown = b"x" * output.WINDOW_BYTES, 0
    for window in range(600):
        for i in range(3):
            shown += limiter.pass_on(block, window * output.WINDOW_S + i).count(b"x")
        assert shown == min((window + 1) * output.WINDOW_BYTES, output.TOTAL_BYTES)
    assert limiter.num_dropped == 1800 * output.WINDOW_BYTES - shown


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


def test_a_group_of_fast_items_is_one_message_and_one_of_slow_items_is_divided():
    """Processes share a pipe, so a message must be worth it: 16 items are not cut into 16."""
    pool = make_pool("user_rewards:sizes", num_workers=8, timeout_s=100.0)
    try:
        assert score(pool, ["fast"] * 16).rewards == [1.0] * 16  # how fast is not known yet
        # A busy machine can suspend a process that scores, so one call may look slow.
        assert any(score(pool, ["fast"] * 16).rewards == [16.0] * 16 for _ in range(100))
        for _ in range(8):  # the speed is a mean over the last calls
            got = score(pool, ["slow"] * 16).rewards
        assert got == [1.0] * 16  # 30 ms each, and more on a busy machine
    finally:
        pool.close()
