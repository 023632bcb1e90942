# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import re
import threading
import urllib.error
import urllib.request

import pytest
from browser import in_browser
from fake_workdir import fake_workdir

from tba_jax.commands.report import main
from tba_jax.report.files import load_run
from tba_jax.report.live import LivePage, LiveServer, SampledLog
from tba_jax.report.page import render


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@contextlib.contextmanager
def serving(page):
    server = LiveServer(page)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.address
    finally:
        server.stop()
        thread.join(60)


def lines(first, last, **values):
    return "".join(
        json.dumps({"step": i, "time_s": i, **values}) + "\n" for i in range(first, last)
    )


def test_a_growing_log_is_sampled_and_a_log_that_was_cut_back_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = SampledLog(path, most=10)
    assert not log.update()
    path.write_text(lines(0, 1, **{"eval/pass_at_1": 0.25}) + lines(1, 1001) + '{"step": 10')
    assert log.update() and not log.update()
    steps, _ = log.metrics().column("step", "time_s")
    assert 10 < len(steps) < 23 and steps[0] == 0 and steps[-1] > 900
    path.write_text(lines(0, 5))
    assert log.update()
    assert log.metrics().column("step", "time_s")[0].tolist() == [0, 1, 2, 3, 4]


def test_evaluations_are_bounded_with_the_first_and_the_last_among_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(0, 1000, **{"eval/pass_at_1": 0.5}))
    log = SampledLog(path, most=10)
    log.update()
    found = [record["step"] for record in log.metrics().evaluations]
    assert len(found) <= 20 and (found[0], found[-1]) == (0, 999)


def test_an_update_reads_a_bounded_part_of_the_log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(0, 300_000))
    log = SampledLog(path)
    assert log.update(2**20) and log.is_behind
    while log.is_behind:
        assert log.update(2**20)
    assert log.metrics().last_step > 299_000


def test_the_page_follows_the_run_and_rests_after_an_update(tmp_path):
    fake_workdir(tmp_path, num_steps=40, made_steps=10, report=False)
    clock, work = Clock(), Clock()
    page = LivePage(tmp_path, clock=clock, work_clock=work)
    page.update()
    assert page.version == 1 and "in progress: step 10 of 40" in page.body
    assert "Run the same command" not in page.body
    assert re.search(r"step 10 of 40, \d\d s left", page.body)
    tiles = re.findall(r"<b>(.*?)</b>", page.body)
    assert {"10 s", "8.1k/s", "1.9 steps"} <= {*tiles}, tiles
    clock.now = 100.0
    page.update()
    assert page.version == 1  # no file has changed
    fake_workdir(tmp_path, num_steps=40)
    page.update()
    assert page.version == 1  # 5 seconds have not passed
    clock.now = 105.0
    page.update()
    assert page.version == 2 and "finished: step 40 of 40" in page.body


def test_pictures_are_drawn_on_request_and_rest_in_proportion_to_their_work(tmp_path):
    fake_workdir(tmp_path, num_steps=40, made_steps=10, report=False)
    clock, work = Clock(), Clock()
    page = LivePage(tmp_path, clock=clock, work_clock=work, num_cores=4)

    def grow(made_steps):
        fake_workdir(tmp_path, num_steps=40, made_steps=made_steps, report=False)
        page.update()
        return re.findall(r'src="(\d+)/light/reward"', page.body)

    assert grow(10) == ["1"]
    work_s = iter((0.0, 2.0))  # the first picture takes 2 s of processor time
    page._work_clock = lambda: next(work_s)
    first = page.picture("light", "reward")
    assert first.startswith(b"\x89PNG") and page.picture("light", "reward") is first
    page._work_clock = work
    assert page.picture("light", "nothing") == page.picture("grey", "reward") == b""
    clock.now = 50.0  # 1 % of four cores: 2 s of work need 50 s
    assert grow(20) == ["1"] and "step 20 of 40" in page.body
    clock.now = 56.0
    assert grow(30) == ["2"] and page.picture("light", "reward") != first


def test_figures_of_the_user_are_drawn_on_request_and_their_errors_shown(tmp_path):
    fake_workdir(tmp_path, num_steps=40)
    file = tmp_path / "mine.py"
    file.write_text(
        "import matplotlib.figure\n"
        "def good(run, theme): return matplotlib.figure.Figure()\n"
        "def bad(run, theme): return run.no_such_thing\n"
    )
    clock = Clock()
    page = LivePage(tmp_path, f"{file}:good,{file}:bad", clock=clock)
    page.update()
    assert 'src="1/light/own0"' in page.body and 'src="1/light/own1"' in page.body
    assert page.picture("dark", "own0").startswith(b"\x89PNG")
    assert page.picture("light", "own1") == b""
    clock.now = 100.0
    page.update()
    assert page.version == 2 and "no_such_thing" in page.body
    assert 'light/own0"' in page.body and 'light/own1"' not in page.body
    page._next_s = 0.0
    page.update()
    assert page.version == 2


def test_a_damaged_line_is_said_above_the_page(tmp_path):
    fake_workdir(tmp_path, num_steps=10)
    clock = Clock()
    page = LivePage(tmp_path, clock=clock)
    page.update()
    with open(tmp_path / "metrics.jsonl", "a") as log:
        log.write('{"step": <b>}\n')
    clock.now = 1000.0
    page.update()
    assert page.version == 2 and "not JSON" in page.body and "<b>}" not in page.body
    assert "<h1>" in page.body


def test_the_address_is_needed_and_scripts_in_texts_do_not_run(tmp_path):
    run = tmp_path / "run"
    fake_workdir(run, num_steps=40)
    with serving(LivePage(run)) as address:
        text = urllib.request.urlopen(address, timeout=120).read().decode()
        assert text.count("<script") == 1 and "default-src 'none'" in text
        assert urllib.request.urlopen(address + "body?1", timeout=60).status == 204
        told = json.loads(urllib.request.urlopen(address + "body?0", timeout=60).read())
        assert told["version"] == 1 and "<script" not in told["body"]
        drawn = urllib.request.urlopen(address + "1/dark/reward", timeout=120)
        assert drawn.headers["content-type"] == "image/png" and drawn.read().startswith(b"\x89PNG")
        for wrong in ("1/dark/nothing", "2"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(address + wrong, timeout=60)
        for wrong in ("", "x" * len(address.split("/")[3]) + "/"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(address.rsplit("/", 2)[0] + "/" + wrong, timeout=60)


def test_the_open_page_shows_the_next_version(tmp_path):
    run = tmp_path / "run"
    fake_workdir(run, num_steps=40, made_steps=10, report=False)
    page = LivePage(run)
    page.update()
    update, asked = page.update, []

    def update_later():
        """The browser receives the old page first and then asks for the next one."""
        asked.append(1)
        if len(asked) == 2:
            fake_workdir(run, num_steps=40)
            page._next_s = 0.0
            update()

    page.update = update_later
    with serving(page) as address:
        text = in_browser(address, tmp_path)
    assert "in progress: step 10" not in text
    assert 'role="status">finished: step 40 of 40' in text
    assert re.search(r'src="[2-9]/light/reward"', text)


def test_an_address_can_be_opened_before_the_server_runs(tmp_path):
    fake_workdir(tmp_path, num_steps=4)
    server = LiveServer(LivePage(tmp_path))
    thread = threading.Thread(target=server.run)
    threading.Timer(0.3, thread.start).start()
    try:
        assert urllib.request.urlopen(server.address, timeout=120).status == 200
    finally:
        server.stop()
        thread.join(60)


def test_a_port_that_cannot_be_used_is_one_line(tmp_path, capsys):
    fake_workdir(tmp_path, num_steps=4)
    assert main([str(tmp_path), "--live=99999"]) == 1
    assert "--live=99999: cannot listen" in capsys.readouterr().err


def test_a_report_in_a_file_has_one_script_that_may_fetch_nothing(tmp_path):
    fake_workdir(tmp_path, num_steps=4)
    text = render(load_run(tmp_path), {})
    assert text.count("<script") == 1 and "script-src 'sha256-" in text
    assert "connect-src" not in text
