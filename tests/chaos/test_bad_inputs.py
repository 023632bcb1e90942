# SPDX-License-Identifier: Apache-2.0
"""Bad storage: each command ends with one line and no traceback.

Bad inputs: run/test_preflight.py, config/, tasks/test_rows.py, models/test_hf_weights.py.
"""

import os
import shutil
import subprocess
import sys

import pytest

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
