# SPDX-License-Identifier: Apache-2.0
"""Logs of JSON lines, trace.json, trackers and progress lines."""

import io
import json
import math
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from tba_jax.report import jsonl, process, trace, writers
from tba_jax.report.files import load_run
from tba_jax.report.process import ReportProcess
from tba_jax.report.progress import ProgressDisplay


def test_a_log_has_whole_lines_with_null_for_what_is_not_finite(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')  # torn by a kill
    assert jsonl.read_jsonl(path) == [{"step": 1}]
    writer = jsonl.JsonlWriter(path)
    writer.write(3, {"a": np.float32(0.5), "b": math.nan, "c": [[1, np.int64(2)]], "d": math.inf})
    writer.close()
    last = {"step": 3, "a": 0.5, "b": None, "c": [[1, 2]], "d": None}
    assert jsonl.read_jsonl(path) == [{"step": 1}, last]


def test_read_jsonl_names_file_and_line_of_damage(tmp_path):
    path = tmp_path / "m.jsonl"
    assert jsonl.read_jsonl(path) == []
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: not JSON .*nonsense"):
        jsonl.read_jsonl(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: .*expected a JSON object"):
        jsonl.read_jsonl(path)


def test_keep_drops_records_and_a_line_without_the_field_leaves_the_log(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = jsonl.JsonlWriter(path)
    for step in range(4):
        writer.write(step, {})
    writer.keep(lambda record: record["step"] < 2)
    writer.append({"text": "no step"})
    before = path.read_bytes()
    with pytest.raises(jsonl.LogError, match=r"m\.jsonl, line 3: a field is missing"):
        writer.keep(lambda record: record["step"] < 1)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.jsonl"]
    writer.write(9, {})
    writer.close()
    assert jsonl.read_jsonl(path) == [{"step": 0}, {"step": 1}, {"text": "no step"}, {"step": 9}]


def test_parts_of_steps_and_counters(tmp_path):
    def step(number, time_s, *seconds):
        parts = dict(zip(("wait_batch_s", "draw_s", "step_s"), seconds, strict=True))
        parts |= {"loss": 1.0}
        return {"step": number, "time_s": time_s, **{f"train/{k}": x for k, x in parts.items()}}

    lines = [
        {"step": 0, "time_s": 4.0, "eval/pass_at_1": 0.25},
        step(1, 7.0, 1.5, 0.5, 1.0),
        step(2, 9.0, 0.0, 0.25, 1.5),
        {"step": 2, "time_s": 9.5, "eval/pass_at_1": 0.5, "search/tokens_per_s": 80.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    events = json.loads(trace.render_trace(load_run(tmp_path)))["traceEvents"]
    parts = [e for e in events if e["ph"] == "X"]
    assert [(e["args"]["step"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in parts] == [
        (1, "wait for a batch", 4.0, 1.5),
        (1, "draw", 5.5, 0.5),
        (1, "train", 6.0, 1.0),
        (2, "draw", 7.25, 0.25),
        (2, "train", 7.5, 1.5),
    ]
    counted = [(e["name"], e["ts"] / 1e6, e["args"]["value"]) for e in events if e["ph"] == "C"]
    assert counted[-1] == ("eval/pass_at_1", 9.5, 0.5)
    assert ("decoded tokens per second", 9.5, 80.0) in counted


def test_wandb_gets_finite_numbers_and_continues_its_run(monkeypatch, tmp_path):
    logged = []
    run = types.SimpleNamespace(log=logged.append, finish=lambda: logged.append("finished"))
    run.define_metric = lambda *names, **axis: logged.append((*names, axis))
    fake = types.SimpleNamespace(Table=lambda columns, data: [columns, *data])
    fake.init = lambda **settings: logged.append(settings) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = writers.make_tracker("wandb:p", tmp_path, {"seed": 1}, "r")
    tracker.write(7, {"a": np.float32(0.5), "b": math.nan, "c": [[1, 2]], "d": "text", "e": 3})
    sample = {"reward": 1.0, "prompt": "2+2", "tokens": ["fo", "ur"]}
    writers.MultiWriter([tracker]).write_samples(7, "eval", [sample])
    tracker.close()
    assert logged[0].items() >= {"project": "p", "id": "r", "resume": "allow"}.items()
    table = [["step", "prompt", "response", "reward"], [7, "2+2", "four", 1.0]]
    # With W&B's own steps it would drop an evaluation that ends after a later step.
    assert logged[1] == ("*", {"step_metric": "step"})
    lines = [{"a": 0.5, "e": 3.0, "step": 7}, {"samples/eval": table, "step": 7}]
    assert logged[2:] == [*lines, "finished"]


LOGGING = """
import os, sys, time
from pathlib import Path
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.report.writers import MultiWriter, make_tracker
folder, (first, last, is_killed) = Path("a"), map(int, sys.argv[2:])
folder.mkdir(exist_ok=True)
tracker, log = make_tracker(sys.argv[1], folder, {}, "run"), JsonlWriter(folder / "metrics.jsonl")
log.keep(lambda line: line["step"] < first)
writer = MultiWriter([log, tracker])
for step in range(first, last):
    writer.write_samples(step, "train", [{"reward": 1, "prompt": "<b>", "tokens": "4"}])
    writer.write(step, {"time_s": step, "train/loss": step + 0.5, "text": "x"})
writer.write(first, {"time_s": last, "eval/n": 8})
if is_killed:
    time.sleep(3)
    os._exit(9)
writer.close()
"""
READING = {
    "trackio:p": "from trackio.sqlite_storage import SQLiteStorage as s\n"
    "rows = [(name, row['step']) for row in s.get_logs('p', 'a-run') for name in row]",
    "tensorboard": "from tensorboard.backend.event_processing import event_accumulator as e\n"
    "found = e.EventAccumulator('a/tensorboard').Reload()\n"
    "rows = [(x, y.step) for x in found.Tags()['scalars'] for y in found.Scalars(x)]\n"
    # This reader forgets scalars only.
    "rows += {('samples/train', y.step) for y in found.Tensors('samples/train/text_summary')}",
}


@pytest.mark.parametrize("tracker", READING)
def test_a_killed_and_resumed_run_logs_each_step_once(tracker, tmp_path):
    pytest.importorskip(tracker.split(":")[0])
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    def python(*arguments):
        command, pipes = [sys.executable, "-c", *arguments], {"capture_output": True, "text": True}
        return subprocess.run(command, env=environment, cwd=tmp_path, timeout=120, **pipes)

    for code, arguments in ((9, ("0", "6", "1")), (0, ("3", "9", "0"))):
        done = python(LOGGING, tracker, *arguments)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
    rows = json.loads(python(f"import json\n{READING[tracker]}\nprint(json.dumps(rows))").stdout)
    for name, steps in (("train/loss", range(9)), ("samples/train", range(9)), ("eval/n", (0, 3))):
        assert sorted(step for each, step in rows if each == name) == list(steps), name


def test_plain_lines_come_at_intervals_and_what_is_new_at_once():
    now, stream = [0.0], io.StringIO()
    console = Console(file=stream, force_terminal=False, width=300)
    display = ProgressDisplay(100, kind="worked", console=console, clock=lambda: now[0])
    display.phase("compiling")
    display.phase("compiling")
    display.write(0, {"eval/pass_at_1": 0.41})
    for step in range(1, 24):
        now[0] = float(step)
        display.write(step, {"search/reward_mean": 0.5, "buffer/staleness_mean": 1.25})
    values = {"reward_mean": 0.5, "reward_part_right": 0.4, "kind_share": 0.4, "tokens_per_s": 8123}
    values |= {"response_length_mean": 9.0, "cut_share": 0.25, "equal_rewards_share": 0.75}
    values = {f"search/{name}": value for name, value in values.items()}
    values |= {"eval/num_failed": 2, "train/kl_reference": 0.0123}
    display.write(24, {"eval/pass_at_1": 0.523, **values})
    display.note("saved [bold]x[/bold]")
    display.close()
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["[0:00] compiling", "[0:00] step   0/100  held-out pass@1 41.0%"]
    assert [line[:15] for line in lines[2:5]] == [f"[0:{n:02}] step  {n:2}" for n in (1, 11, 21)]
    assert "1:29 left" in lines[3] and lines[-1] == "[0:23] saved [bold]x[/bold]"
    line = lines[5]
    assert "step  24/100" in line and "pass@1 41.0% -> 52.3% (2 responses without reward)  " in line
    assert "reward 0.500 (right 0.400)" in line and "worked answers 40%" in line
    assert "length 9.0 tokens (25% cut)  groups with equal rewards 75%  KL 0.0123" in line
    assert "decoded 8.1k tok/s" in line


def test_a_terminal_gets_one_line_and_is_given_back():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, _environ={})
    display = ProgressDisplay(4, kind="worked", console=console)
    display.write(0, {"eval/pass_at_1": 0.41})
    for step in range(1, 5):
        values = {"buffer/staleness_mean": 1.5, "buffer/staleness_max": 4}
        display.write(step, {"search/reward_mean": step / 8, **values})
        display.note(f"note {step}")
    display.write(4, {"eval/pass_at_1": 0.875, "search/tokens_per_s": 8123.0})
    display.close()
    raw = stream.getvalue()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw)
    final = text[text.rindex("[0:0") :]
    assert "step 4/4  held-out pass@1 41.0% -> 87.5%  reward 0.500" in final
    assert all(len(line) <= 80 for line in final.splitlines()) and "…" in final
    assert "note 1" in text and raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")


def test_a_report_is_rewritten_at_intervals(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_COMMAND", ("sh", "-c", 'echo "$1" >> "$0/times"'))
    now, told = [0.0], tmp_path / "times"
    writer = ReportProcess(tmp_path, clock=lambda: now[0])
    for now[0], wanted in ((0.0, 0), (299.0, 0), (300.0, 1), (310.0, 1), (900.0, 2)):
        writer.write(1, {})
        if writer._process is not None:
            writer._process.wait()
        assert (len(told.read_text().splitlines()) if told.exists() else 0) == wanted
    writer.close()
