# SPDX-License-Identifier: Apache-2.0
"""Bad inputs and bad storage: each command ends with one line and no traceback."""

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
REWARD = "def score(prompts, completions, **columns):\n    return [1.0] * len(completions)\n"


def write_inputs(folder):
    """Write a model, data and a reward; return the arguments of a run on them."""
    write_llama(folder / "model")
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "a{i % 10}"}}\n' for i in range(40)))
    (folder / "score.py").write_text(REWARD)
    return [
        f"--workdir={folder}/run",
        "--config=custom",
        f"--config.model.path={folder}/model",
        f"--config.task.data_path={folder}/rows.jsonl",
        f"--config.task.reward={folder}/score.py:score",
        "--config.num_steps=2",
    ]


def cast_weights_to_int32(folder):
    path = folder / "model" / "model.safetensors"
    save_file({name: x.astype(np.int32) for name, x in load_file(path).items()}, path)


def replace_data_by_a_pipe(folder):
    (folder / "rows.jsonl").unlink()
    os.mkfifo(folder / "rows.jsonl")  # no process writes to it


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


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (replace_data_by_a_pipe, "rows.jsonl cannot be read (not a regular"),
        (cast_weights_to_int32, "(I32)"),
        (
            lambda f: (f / "score.py").write_text("import os\nos._exit(1)"),
            "its process ended (at its start",
        ),
    ],
)
def test_an_unusable_file_of_the_user_is_one_line(spoil, text, tmp_path, cache):
    arguments = write_inputs(tmp_path)
    spoil(tmp_path)
    check_one_line(command("main", *arguments, folder=tmp_path, cache=cache), text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--config.objective.beta=1e-300"], "objective.beta = 1e-300"),
        (["--config.reward.num_workers=100000"], "reward.num_workers = 100000"),
        (["--config.placement=fleet", "--config.fleet.max_searchers=100000"], "in [1, 4096]"),
        (["--config={pipe}"], "no config file"),
        (
            ["--config.task.start_path={pipe}", "--config.objective.importance=none"],
            "no such .jsonl or .parquet file",
        ),
        (["--config.model.path={pipe}"], "pipe.jsonl' is not a folder"),
        (["--workdir={pipe}"], "pipe.jsonl cannot be read (Not a directory)"),
    ],
)
def test_an_unusable_argument_is_one_line(arguments, text, tmp_path, cache):
    os.mkfifo(tmp_path / "pipe.jsonl")
    given = write_inputs(tmp_path)
    given += [each.format(pipe=tmp_path / "pipe.jsonl") for each in arguments]
    check_one_line(command("main", *given, folder=tmp_path, cache=cache), text)


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
