# SPDX-License-Identifier: Apache-2.0
"""Pages of real runs in a browser: live and finished, of the default, a custom and an agent run."""

import re
import signal
import subprocess
import sys

import pytest
from browser import in_browser
from red_team_models import write_llama

from tests.integration import commands
from tests.report.test_sample_browser import HANDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STATUS = re.compile(r'role="status">(in progress|finished): step (\d+)')
# Filters by reward, searches, opens the first response and reads it back.
LOOK = """
    set('from', 'train');
    const all = found(); set('text', first().trim().slice(0, 0)); set('order', '-step');
    click('summary');
    const words = document.querySelector('.response').innerText;
    const sampled = [...document.querySelectorAll('.response span')].length;
    set('reward_min', '1000'); const none = found(); set('reward_min', '');
    return [all, words, sampled, none, document.body.innerText];
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def status_of(address, folder):
    return STATUS.search(in_browser(address, folder))


def test_the_page_of_the_default_run_follows_it_from_step_10_to_the_end(tmp_path, cache):
    workdir, environment = tmp_path / "run", commands.environment(cache)
    run = commands.start(workdir, "num_steps=60", "num_searchers=1", cache=cache)
    commands.wait_for(lambda: (workdir / "metrics.jsonl").exists(), process=run)
    argv = [sys.executable, "-m", "tba_jax.report", str(workdir), "--live"]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as page:
        address = page.stdout.readline().strip().split()[-1]
        commands.wait_for(
            lambda: any(x["step"] >= 10 for x in commands.lines(workdir / "metrics.jsonl")),
            process=run,
        )
        run.send_signal(signal.SIGSTOP)  # so that the browser opens the page of a run in progress
        during = status_of(address, tmp_path)
        run.send_signal(signal.SIGCONT)
        _, said = run.communicate(timeout=300)
        assert run.returncode == 0, said
        after = status_of(address, tmp_path)
        page.send_signal(signal.SIGINT)
    assert during[1] == "in progress" and int(during[2]) >= 10
    assert after.groups() == ("finished", "60")


def test_the_responses_of_a_custom_run_can_be_looked_into(tmp_path, cache):
    write_llama(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "a{i}"}}\n' for i in range(40)))
    (tmp_path / "mine.py").write_text(
        "def score(completions, **columns):\n    return [len(x) / 9 for x in completions]\n"
    )
    arguments = [
        "--config=custom",
        f"--workdir={tmp_path}/run",
        f"--config.model.path={tmp_path}/model",
        f"--config.task.data_path={tmp_path}/rows.jsonl",
        f"--config.task.reward={tmp_path}/mine.py:score",
        "--config.num_steps=2",
    ]
    look_into(arguments, tmp_path, cache, "a")


def test_the_conversations_of_an_agent_run_can_be_looked_into(tmp_path, cache):
    arguments = ["--config=agent", f"--workdir={tmp_path}/run", "--config.num_steps=5"]
    look_into(arguments, tmp_path, cache, "")
    script = """
        const all = view.data.rows, episode = all.find(row => (row.is_sampled || []).includes(0));
        set('text', episode.text.slice(0, 12)); set('step_min', String(episode.step));
        for (const head of document.querySelectorAll('.rows summary')) head.click();
        return [...document.querySelectorAll('.response small + .environment')].map(
          turn => turn.textContent);
    """
    turns = in_browser(tmp_path / "run" / "report.html", tmp_path, script=HANDS + script)
    assert turns and all(turns)


def look_into(arguments, folder, cache, prompt):
    done = subprocess.run(
        [sys.executable, "-m", "tba_jax.main", *arguments],
        env=commands.environment(cache),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    page = folder / "run" / "report.html"
    every, words, sampled, none, text = in_browser(page, folder, script=HANDS + LOOK)
    assert int(every.split()[0]) > 0 and int(none.split()[0]) == 0
    assert prompt in words and sampled > 0
    return text
