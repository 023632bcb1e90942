# SPDX-License-Identifier: Apache-2.0
"""Bad inputs and bad storage: each command ends with one line and no traceback.

run/test_preflight.py and config/ have the mistakes that no file system is needed for.
"""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from red_team_models import write_llama
from safetensors.numpy import load_file, save_file

from tests.integration import commands

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
DEADLINE_S = 300  # a command that takes longer waits for ever, also on a busy machine


def command(module, *arguments, folder, cache, before=(), **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [*before, sys.executable, "-m", f"tba_jax.{module}", *arguments],
        text=True, timeout=DEADLINE_S, env=commands.environment(cache), cwd=folder, **options,
    )  # fmt: skip


def check_one_line(done, text):
    """Check that a command failed with one line, which has this text and wants no bug report."""
    assert done.returncode in (1, 2), (done.returncode, done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and text in line, line
    assert "bug report" not in line and len(line) < 2000, line


def cast_weights_to_int32(folder):
    path = folder / "model" / "model.safetensors"
    save_file({name: x.astype(np.int32) for name, x in load_file(path).items()}, path)


def replace_data_by_a_pipe(folder):
    (folder / "rows.jsonl").unlink()
    os.mkfifo(folder / "rows.jsonl")  # no process writes to it


def end_the_process(folder):
    (folder / "score.py").write_text("import os\nos._exit(1)")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (replace_data_by_a_pipe, "rows.jsonl cannot be read (not a regular"),
        (cast_weights_to_int32, "(I32)"),
        (end_the_process, "its process ended (at its start"),
    ],
)
def test_an_unusable_file_of_the_user_is_one_line(spoil, text, tmp_path, cache):
    write_llama(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "a{i % 10}"}}\n' for i in range(40)))
    reward = "def score(prompts, completions, **columns):\n    return [1.0] * len(completions)\n"
    (tmp_path / "score.py").write_text(reward)
    arguments = [
        f"--workdir={tmp_path}/run",
        "--config=custom",
        f"--config.model.path={tmp_path}/model",
        f"--config.task.data_path={tmp_path}/rows.jsonl",
        f"--config.task.reward={tmp_path}/score.py:score",
        "--config.num_steps=2",
    ]
    spoil(tmp_path)
    check_one_line(command("main", *arguments, folder=tmp_path, cache=cache), text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """The work directory of a run that ended."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    done = commands.run(workdir, "driver=sync", cache=cache)
    assert done.returncode == 0, done.stderr
    return workdir


def test_a_report_on_a_disk_that_is_full_is_one_line(finished, cache):
    page = (finished / "report.html").read_bytes()
    limited = ["prlimit", "--fsize=10000"]
    done = command("report", ".", folder=finished, cache=cache, before=limited)
    check_one_line(done, "cannot be used: File too large. Make room")
    assert (finished / "report.html").read_bytes() == page
    with open("/dev/full", "w") as output:
        done = command("report", ".", folder=finished, cache=cache, stdout=output)
    check_one_line(done, "standard output or a file cannot be used: No space left on device")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
@pytest.mark.parametrize("module", ["report", "main"])
def test_a_read_only_run_is_one_line(module, finished, cache):
    unfinished = finished.with_name(f"unfinished-{module}")
    shutil.copytree(finished, unfinished)
    shutil.rmtree(unfinished / "checkpoints" / "8")
    (unfinished / "report.json").unlink()
    mount = f"mount --bind {unfinished} {unfinished} && "
    mount += f"mount -o remount,bind,ro {unfinished} && exec "
    before = ["unshare", "-m", "sh", "-c", mount + '"$@"', "sh"]
    arguments = [str(unfinished)]
    if module == "main":
        arguments = commands.arguments(unfinished, "driver=sync")
    done = command(module, *arguments, folder=finished, cache=cache, before=before)
    check_one_line(done, "Read-only file system")
