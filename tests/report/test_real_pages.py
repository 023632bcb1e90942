# SPDX-License-Identifier: Apache-2.0
"""The page of a real run in a browser."""

import subprocess
import sys

import pytest
from browser import in_browser

from tests.integration import commands
from tests.report.test_sample_browser import HANDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
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
