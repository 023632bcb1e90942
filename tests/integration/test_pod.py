# SPDX-License-Identifier: Apache-2.0
"""Several hosts: real processes on loopback with the CPU's gloo collectives."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from commands import (
    POD,
    ROOT,
    SYNC,
    arguments,
    child,
    environment,
    lines,
    losses,
    run,
    run_pod,
    start_pod,
    wait_for,
)

from tba_jax.run.checkpoint import load_host_state
from tba_jax.storage import sealed
from tba_jax.tasks.arithmetic import Arithmetic

# A run whose batches do not depend on how many hosts draw them: all slots are fresh, all responses
# of a prompt are in its group, and at this temperature hardly any comes twice.
SAME = (
    *SYNC,
    "replay.recency_prob=1.0",
    "num_searchers=2",
    "mesh.data=2",
    "search.prompts_per_round=2",
    "objective.group_size=2",
    "search.samples_per_prompt=2",
    "search.sampling_temperature=2.0",
    "task.reward=my_rewards:length",
)


def report(workdir):
    return json.loads((workdir / "report.json").read_text())


def balance(ledger):
    evicted = sum(v for k, v in ledger.items() if k.startswith("evicted"))
    rejected = sum(ledger["rejected"].values())
    return ledger["outbox"] + ledger["stored"] + evicted + ledger["duplicate"] + rejected


@pytest.fixture
def folder(tmp_path):
    """A user's folder with a reward that tells responses apart."""
    (tmp_path / "my_rewards.py").write_text(
        textwrap.dedent("""
        def length(prompts, completions, **columns):
            return [len(text) / 20 for text in completions]
        """)
    )
    return tmp_path


@pytest.mark.slow
def test_two_processes_make_the_losses_of_one(cache, folder):
    code, _, err = run_pod(2, folder / "two", *SAME, "num_cpu_devices=2", cache=cache, cwd=folder)
    assert code == 0, err
    done = run(
        folder / "one", *SAME, "num_cpu_devices=4", "placement=split", cache=cache, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    one, two = losses(folder / "one"), losses(folder / "two")
    assert len(one) == 8
    # The gradient is summed over devices in another order: float32 rounding (6e-8) of each of a few
    # thousand summands, and what Adam makes of it over 8 steps.
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=2e-4)
    # Every prompt was searched by the same searcher, of whichever process.
    names = ("schedule.jsonl", "schedule.1.jsonl")
    rounds = [
        {
            (e["searcher"], e["round"]): e["prompt_ids"]
            for name in names
            for e in lines(workdir / name)
            if e["event"] == "round"
        }
        for workdir in (folder / "one", folder / "two")
    ]
    assert rounds[0] == rounds[1] and len(rounds[0]) == 16
    assert report(folder / "two")["ledger"] == report(folder / "one")["ledger"]
    # Each process evaluated two of the four parts; one did it whole.
    assert report(folder / "two")["eval"] == report(folder / "one")["eval"]
    figures = [
        [
            {k: v for k, v in r.items() if k.startswith("eval/")}
            for r in lines(folder / name / "metrics.jsonl")
            if "eval/n" in r
        ]
        for name in ("one", "two")
    ]
    assert figures[0] == figures[1] and [r["eval/version"] for r in figures[0]] == [0, 4, 8]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_pods_of_two_and_four_make_the_losses_of_one_and_four_resume_on_fewer(cache, folder):
    fields = (
        *SAME,
        "num_searchers=4",
        "mesh.data=4",
        "search.prompts_per_round=1",
        "eval.period=0",
        "num_steps=20",
        "checkpoint.period=10",
    )
    found = {}
    for number in (1, 2, 4):
        workdir, devices = folder / f"of{number}", f"num_cpu_devices={8 // number}"
        code, _, err = run_pod(number, workdir, *fields, devices, cache=cache, cwd=folder)
        assert code == 0, err
        found[number] = losses(workdir)
    assert len(found[1]) == 20
    for number in (2, 4):
        np.testing.assert_allclose([*found[number].values()], [*found[1].values()], rtol=1e-6)
    for number in (1, 2):
        workdir = folder / f"resumed{number}"
        shutil.copytree(folder / "of4", workdir)
        edit_config(workdir, num_steps=24)
        more = ("num_steps=24", f"num_cpu_devices={8 // number}")
        code, out, err = run_pod(number, workdir, *fields, *more, cache=cache, cwd=folder)
        assert code == 0, err
        assert "at step 20 of 24" in out and len(losses(workdir)) == 24
        assert balance(report(workdir)["ledger"]) == report(workdir)["ledger"]["generated"]
        found[f"resumed{number}"] = losses(workdir)
    np.testing.assert_allclose(
        [*found["resumed1"].values()], [*found["resumed2"].values()], rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_asynchronous_job_and_its_checkpoint_on_other_host_counts(cache, tmp_path):
    workdir = tmp_path / "run"
    code, out, err = run_pod(2, workdir, "num_cpu_devices=4", "num_searchers=2", cache=cache)
    assert code == 0, err
    assert out.count("Report: ") == 1 and sorted(losses(workdir)) == list(range(1, 9))
    final = report(workdir)
    assert final["processes"] == 2 and len(final["idle_s"]["searchers"]) == 2
    assert balance(final["ledger"]) == final["ledger"]["generated"] > 0
    # The searchers of both processes feed one buffer: prompts = searcher mod 2.
    step, state = load_host_state(str(workdir))
    assert step == 8 and {"outbox_0", "outbox_1"} <= set(state.parts)
    assert set(state.parts["buffer"].arrays["prompt_ids"] % 2) == {0, 1}

    # 2 -> 1 -> 2 processes: nothing lost, nothing double, and training goes on.
    stored = len(state.parts["buffer"].arrays["row_reward"])
    for number, num_steps in ((1, 12), (2, 16)):
        # The horizon is part of the config; what is tested is the state.
        edit_config(workdir, num_steps=num_steps)
        code, out, err = run_pod(
            number,
            workdir,
            f"num_steps={num_steps}",
            "num_cpu_devices=4",
            "num_searchers=2",
            cache=cache,
        )
        assert code == 0, err
        assert f"at step {num_steps - 4} of {num_steps}" in out
        final = report(workdir)
        assert final["processes"] == number
        assert balance(final["ledger"]) == final["ledger"]["generated"]
        assert final["ledger"]["stored"] >= stored
        stored = final["ledger"]["stored"]
        assert sorted(losses(workdir)) == list(range(1, num_steps + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_slow_evaluation_on_one_host_delays_no_process(cache, folder):
    slow, _ = Arithmetic().eval_problem(8)  # the first problem of the second part: host 1's
    (folder / "my_rewards.py").write_text(
        textwrap.dedent(f"""
        import os
        import time

        def held_up(prompts, completions, **columns):
            while {slow!r} in prompts and len(set(prompts)) > 1 and not os.path.exists("go"):
                time.sleep(0.02)
            return [len(text) / 20 for text in completions]
        """)
    )
    workdir = folder / "run"
    overrides = (
        "num_cpu_devices=4",
        "num_searchers=2",
        "num_steps=100000",
        "eval.period=4",
        "checkpoint.period=0",
        "task.reward=my_rewards:held_up",
        "reward.timeout_s=600",
        "reward.num_workers=2",
        "replay.pace=off",
        "replay.max_staleness=0",
    )
    pod = start_pod(2, workdir, *overrides, cache=cache, cwd=folder)
    try:
        wait_for(lambda: len(losses(workdir)) >= 12, process=pod, timeout=400)
        assert not evaluated(workdir)  # host 0 has done its share of three, host 1 of none
        (folder / "go").touch()
        wait_for(lambda: len(evaluated(workdir)) >= 3, process=pod, timeout=400)
    finally:
        pod.send_signal(signal.SIGINT)
        _, err = pod.communicate(timeout=60)
    assert pod.returncode == 0, err
    steps = evaluated(workdir)
    assert steps == list(range(0, 4 * len(steps), 4))


def evaluated(workdir):
    """Steps of the evaluations in metrics.jsonl."""
    return [r["step"] for r in lines(workdir / "metrics.jsonl") if "eval/n" in r]


@pytest.mark.slow
def test_an_interleaved_pod_takes_turns_on_its_devices(cache, tmp_path):
    # The trainer has every device; searchers of two devices each lie on those of their host.
    workdir = tmp_path / "run"
    overrides = ("num_cpu_devices=2", "mesh.fsdp=4", "search.num_devices=2", "num_searchers=2")
    code, out, err = run_pod(2, workdir, *overrides, "log.watchdog_s=180", cache=cache)
    assert code == 0, err
    assert out.count("Report: ") == 1 and sorted(losses(workdir)) == list(range(1, 9))
    final = report(workdir)
    assert balance(final["ledger"]) == final["ledger"]["generated"] > 0
    waits = [r["sync/turn_wait_s"] for r in lines(workdir / "metrics.jsonl") if "train/loss" in r]
    assert waits == sorted(waits) and waits[-1] > 0


WHOLE = ("placement=whole_hosts", "mesh.data=2", "num_cpu_devices=1")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hosts_train_and_two_search_as_one_process_does_and_hand_over_to_one(cache, folder):
    code, out, err = run_pod(4, folder / "four", *SAME, *WHOLE, cache=cache, cwd=folder)
    assert code == 0, err
    one = (*SAME, "num_cpu_devices=4", "placement=split")
    done = run(folder / "one", *one, cache=cache, cwd=folder)
    assert done.returncode == 0, done.stderr
    expected = losses(folder / "one")
    # The gradient is summed over devices of two processes, and Adam over 8 steps.
    found = list(losses(folder / "four").values())
    np.testing.assert_allclose(found, list(expected.values()), rtol=2e-4)
    for name in ("ledger", "eval"):
        assert report(folder / "four")[name] == report(folder / "one")[name]
    assert report(folder / "four")["processes"] == 4
    rounds = [
        {
            (e["searcher"], e["round"]): e["prompt_ids"]
            for e in lines(folder / name / "schedule.jsonl")
            if e["event"] == "round"
        }
        for name in ("one", "four")
    ]
    assert rounds[0] == rounds[1] and len(rounds[0]) == 16
    # Its checkpoint is that of a run of one process: four -> one -> four.
    shapes = ((1, one), (4, (*SAME, *WHOLE)))
    for number, (num_processes, overrides) in enumerate(shapes, 1):
        num_steps = 8 + 4 * number
        steps = (f"num_steps={num_steps}",)
        edit_config(folder / "four", num_steps=num_steps)
        if num_processes == 1:
            done = run(folder / "four", *overrides, *steps, cache=cache, cwd=folder)
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            code, out, err = run_pod(
                4, folder / "four", *overrides, *steps, cache=cache, cwd=folder
            )
        assert code == 0, err
        assert f"at step {num_steps - 4} of {num_steps}" in out
        final = report(folder / "four")
        assert balance(final["ledger"]) == final["ledger"]["generated"]
        assert sorted(losses(folder / "four")) == list(range(1, num_steps + 1))
        step, state = load_host_state(str(folder / "four"))
        assert step == num_steps
        assert {"outbox_0", "outbox_1", "searcher_1"} <= set(state.parts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_host_trains_and_two_search_beside_it(cache, folder):
    workdir = folder / "run"
    overrides = (
        *WHOLE,
        "num_cpu_devices=2",
        "num_searchers=4",
        "log.watchdog_s=240",
        "num_steps=100000",
    )
    pod = start_pod(3, workdir, *overrides, cache=cache, cwd=folder)
    try:
        wait_for(lambda: len(evaluated(workdir)) >= 2, process=pod, timeout=400)
        wait_for(lambda: searched(workdir) == {0, 1, 2, 3}, process=pod, timeout=400)
        # A host that searches is told to end: all save together and leave.
        subprocess.run(["kill", "-TERM", str(child(pod, 2))], check=True)
        out, err = pod.communicate(timeout=120)
    finally:
        pod.kill()
    assert pod.returncode == 0, err
    stopped_at = int(re.search(r"Stopped by .* at step (\d+) of", out)[1])
    step, state = load_host_state(str(workdir))
    assert step == stopped_at > 4
    outboxes = state.named("outbox_")
    assert sorted(outboxes) == [f"outbox_{i}" for i in range(4)]
    committed = sum(o.meta["position"]["num_generated"] for o in outboxes.values())
    assert committed > 0
    # Every searcher of both hosts brought something, and each round is in the log once.
    events = [e for e in lines(workdir / "schedule.jsonl") if e["event"] == "round"]
    keys = [(e["searcher"], e["round"]) for e in events]
    assert len(keys) == len(set(keys))
    events = lines(workdir / "schedule.jsonl")
    assert {e["searcher"] for e in events if e["event"] == "chunk"} == {*range(4)}
    pod = start_pod(3, workdir, *overrides, cache=cache, cwd=folder)
    try:
        wait_for(lambda: max(losses(workdir)) > stopped_at, process=pod, timeout=400)
    finally:
        pod.send_signal(signal.SIGINT)
        _, err = pod.communicate(timeout=120)
    assert pod.returncode == 0, err


def searched(workdir):
    """Searchers that have rounds in the schedule log."""
    events = lines(workdir / "schedule.jsonl")
    return {event["searcher"] for event in events if event["event"] == "round"}


def edit_config(workdir, **fields):
    path = workdir / "config.json"
    content = sealed.read(path)
    content["config"].update(fields)
    sealed.write(path, content)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["one process", "the launcher"])
def test_an_interrupted_pod_saves_together_exits_0_and_resumes(who, cache, tmp_path):
    workdir = tmp_path / "run"
    overrides = ("num_steps=100000", "checkpoint.period=0", "eval.period=0", "num_cpu_devices=2")
    pod = start_pod(2, workdir, *overrides, cache=cache)
    wait_for(lambda: len(losses(workdir)) >= 3, process=pod)
    if who == "the launcher":
        pod.send_signal(signal.SIGINT)
    else:
        subprocess.run(["kill", "-TERM", str(child(pod, 1))], check=True)
    out, err = pod.communicate(timeout=60)
    assert pod.returncode == 0, err
    stopped_at = int(re.search(r"Stopped by .* at step (\d+) of", out)[1])
    assert stopped_at >= 3 and load_host_state(str(workdir))[0] == stopped_at
    pod = start_pod(2, workdir, *overrides, cache=cache)
    wait_for(lambda: max(losses(workdir), default=0) > stopped_at, process=pod)
    pod.send_signal(signal.SIGINT)
    out, err = pod.communicate(timeout=60)
    assert pod.returncode == 0 and f"at step {stopped_at} of 100000" in out, err


@pytest.mark.slow
def test_another_command_on_one_host_is_refused_on_all(cache, tmp_path):
    common = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tba_jax.main"),
                *arguments(tmp_path / "run", f"checkpoint.period={4 + i}"),
                *common,
                f"--process_id={i}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(cache),
            cwd=ROOT,
        )
        for i in range(2)
    ]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "process 1 was started with another command than process 0" in err
        assert "checkpoint.period: 4 there, 5 here" in err


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_clear_line(cache, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run_pod(2, tmp_path / "run", f"remote.port={port}", cache=cache)
    assert code != 0
    assert f"error: remote.port={port}: cannot listen on 127.0.0.1:{port}" in err
    assert "Set --config.remote.port to a free port" in err and "bug report" not in err


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_pod_of_unknown_address_says_how_to_start_it(cache, tmp_path):
    done = run(tmp_path / "run", *POD, cache=cache, flags=("--coordinator=127.0.0.1:1",))
    assert done.returncode == 2
    assert "missing: --num_processes (or JAX_NUM_PROCESSES), --process_id" in done.stderr
