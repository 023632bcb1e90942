# SPDX-License-Identifier: Apache-2.0
"""The launch scripts against a cloud in a folder (tests/fake_gcloud) and jobs of a few lines.

Nothing here reaches a network: `gcloud`, `ssh` and `scp` on the scripts' PATH are fakes.
"""

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "fake_gcloud"
SETTINGS = {
    "NAME": "test",
    "PROJECT": "p",
    "ZONE": "z",
    "ACCELERATOR": "v5litepod-16",
    "PROVISIONING": "spot",
    "POLL_S": "0.1",
}

COUNTING = "for i in 1 2; do echo $i >>$BUCKET/count-$JAX_PROCESS_ID; echo counted $i; done"
# Notes that it was asked to end, and takes a moment for it, as a run that saves does.
WAITING = """
trap 'sleep 0.3; echo saved >>$BUCKET/saved-$JAX_PROCESS_ID; exit 143' TERM
echo began >>$BUCKET/began-$JAX_PROCESS_ID
for i in $(seq 300); do sleep 0.1; done
"""
BEGAN = ("began-0", "began-1")


def _lines(path):
    """Lines of a file; [] if it is not there."""
    return path.read_text().splitlines() if path.exists() else []


class Cloud:
    """A fake cloud, a GPU box, and a working tree with the launch scripts.

    Args:
        folder: empty; everything lives below it.
        tree: holds `launch/`; becomes a git checkout.
    """

    def __init__(self, folder, tree):
        self.folder, self.tree = folder, tree
        self.settings_file = tree / "launch" / "settings.env"
        self.bucket, self.box = folder / "bucket", folder / "box"
        for path in (self.bucket, self.box, folder / "bin", folder / "cloud"):
            path.mkdir()
        subprocess.run(["git", "init", "-q", tree], check=True)
        of_workers = {"REAL_PYTHON": sys.executable, "BUCKET": str(self.bucket)}
        (folder / "cloud/worker_env.json").write_text(json.dumps(of_workers))
        (folder / "bin/gcloud").symlink_to(FAKE / "gcloud")
        # A machine behind ssh: the last argument is the command, the box's home its folder.
        for name, line in (
            ("ssh", f'cd {self.box} && exec bash -c "${{!#}}"'),
            ("scp", f'cp "${{@:2:$#-2}}" "{self.box}/${{!##*:}}"'),
        ):
            (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
            (folder / "bin" / name).chmod(0o755)
        self._environment = {
            "PATH": f"{folder / 'bin'}:{FAKE / 'worker_bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.box),
            "LANG": "C.UTF-8",
            "FAKE_CLOUD": str(folder / "cloud"),
            "FAKE_HOSTNAME": "box",
            **of_workers,
        }
        self._outputs = {}  # of each started process

    def settings(self, **changes):
        """Write the settings file; None leaves a setting out."""
        values = {**SETTINGS, **changes}
        lines = [f"{k}={shlex.quote(v)}\n" for k, v in values.items() if v is not None]
        self.settings_file.write_text("".join(lines))

    def start(self, *arguments, script="tpu.sh"):
        """A script of launch/ without waiting; `output` reads what it has printed."""
        path = self.folder / f"output-{len(self._outputs)}"
        with open(path, "w") as file:
            process = subprocess.Popen(
                ["bash", str(self.tree / "launch" / script), *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._outputs[process] = path
        return process

    def tpu(self, *arguments, code=0, script="tpu.sh"):
        """What a script of launch/ prints until its end."""
        process = self.start(*arguments, script=script)
        assert process.wait(120) == code, self.output(process)
        return self.output(process)

    def gpu(self, *arguments):
        """What launch/gpu.sh prints until its end."""
        return self.tpu(*arguments, script="gpu.sh")

    def output(self, process):
        """What a started script has printed so far."""
        return self._outputs[process].read_text()

    def calls(self, *words):
        """Argument lists of the gcloud calls that have these words among their first."""
        found = map(json.loads, _lines(self.folder / "cloud/calls.jsonl"))
        return [call for call in found if set(words) <= set(call[:4])]

    def preempt(self):
        """Take the slice away."""
        gcloud = [str(FAKE / "gcloud"), "fake-preempt", "test"]
        subprocess.run(gcloud, env=self._environment, check=True, timeout=60)

    def homes(self):
        """Home directories of the workers that exist."""
        return sorted((self.folder / "cloud/disks").glob("*-w-*"))

    def bucket_lines(self, name):
        """Lines of a file in the share that all workers see."""
        return _lines(self.bucket / name)

    def wait_for(self, condition, process=None):
        """Poll until `condition()`; fails when the process ends before or the time is over."""
        end = time.monotonic() + 60
        while not condition():
            assert process is None or process.poll() is None, self.output(process)
            assert time.monotonic() < end, "timed out"
            time.sleep(0.02)

    def close(self):
        """End whatever still runs here."""
        for process in self._outputs:
            process.kill()
            process.wait()
        homes = [str(home) for home in [*self.homes(), self.box]]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HOME") in homes:
                    process.kill()


@pytest.fixture
def cloud(tmp_path):
    """A cloud, and a working tree of a few files with the launch scripts in it."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "launch", tree / "launch")
    (tree / "job.py").write_text("print('job')\n")
    (tree / ".gitignore").write_text("/launch/*.env\n/runs/\n")
    made = Cloud(tmp_path, tree)
    yield made
    made.close()


def waiting():
    return f'bash -c "{WAITING.strip()}"'.replace("$", "\\$")


def test_a_dry_run_prints_every_command_and_runs_none(cloud):
    cloud.settings(JOB="python job.py 'a b'")
    wanted = {
        "create": "queued-resources create test --node-id=test --accelerator-type=v5litepod-16 "
        "--runtime-version=v2-alpha-tpuv5-lite --spot --quiet --project=p --zone=z",
        "setup": "worker.sh\\ setup\\ tpu",
        "stop": "worker.sh\\ stop\\ 120",
        "delete": "queued-resources delete test --force --quiet --project=p --zone=z",
    }
    for verb, command in wanted.items():
        out = cloud.tpu(verb, "--dry-run")
        assert command in out, (verb, out)
        assert all(line.startswith(("+ ", "# ")) for line in out.splitlines()), (verb, out)
    # What is printed is what a shell runs: the job survives two shells.
    [line] = [x for x in cloud.tpu("run", "--dry-run").splitlines() if "start" in x]
    words = shlex.split(line.removeprefix("+ "))
    [start] = [x.removeprefix("--command=") for x in words if x.startswith("--command=")]
    found = shlex.split(start.split("; else")[0])[-4:]
    assert found == ["bash", "tba_jax-test/worker.sh", "start", "python job.py 'a b'"]
    assert cloud.calls() == []


def test_what_is_missing_wrong_or_unknown_is_one_error(cloud):
    for changes, message in (
        ({"PROJECT": None}, "PROJECT is not set; set it in"),
        ({"ACCELERATOR": "tpu7x-8"}, "set RUNTIME of tpu7x-8 in"),
    ):
        cloud.settings(**{"JOB": "true", **changes})
        error = cloud.tpu("run", "--dry-run", code=2)
        assert message in error and str(cloud.settings_file) in error
        assert error.count("error:") == 1
    assert "no verb 'start'" in cloud.tpu("start", code=2)
    cloud.settings_file.unlink()
    assert "no settings file" in cloud.tpu("run", code=2)


def test_a_job_from_create_to_delete(cloud):
    cloud.settings(JOB=f"bash -c '{COUNTING}'", EXTRAS="hub", SETUP_COMMAND="echo mounted >mounted")
    for _ in range(2):
        assert "test is ready" in cloud.tpu("create")
    assert len(cloud.calls("queued-resources", "create")) == 1
    out = cloud.tpu("setup")
    assert out.count("] Python 3.") == 2 and "[w-0] Python" in out and "[w-1] Python" in out
    for home in cloud.homes():
        root = home / "tba_jax-test"
        assert (root / "code/job.py").read_text() == "print('job')\n"
        assert not (root / "code/launch/settings.env").exists()
        assert (home / "uv.log").read_text().endswith("-e .[tpu,hub]\n")
        assert (root / "code/mounted").exists()

    out = cloud.tpu("run")
    assert "the job is done on every worker" in out
    assert [cloud.bucket_lines(f"count-{i}") for i in (0, 1)] == [["1", "2"]] * 2
    assert {"[w-0] counted 2", "[w-1] counted 2"} <= set(cloud.tpu("logs").splitlines())
    assert "w-1 exited-0 counted 2\n" in cloud.tpu("status")
    assert "there is no test in z any more" in cloud.tpu("delete") and cloud.homes() == []
    assert "test is not ready (ABSENT); launch/tpu.sh create" in cloud.tpu("run", code=2)


@pytest.mark.slow
def test_run_again_watches_and_a_stopped_job_has_saved_and_resumes(cloud):
    cloud.settings(JOB=waiting())
    cloud.tpu("create")
    cloud.tpu("setup")
    first = cloud.start("run")
    cloud.wait_for(lambda: all(map(cloud.bucket_lines, BEGAN)), process=first)
    second = cloud.start("run")  # on another terminal: it watches the same job
    cloud.wait_for(lambda: "running already" in cloud.output(second), process=second)
    assert "a job is running on test; stop it" in cloud.tpu("setup", code=2)
    assert cloud.bucket_lines("began-1") == ["began"]
    cloud.tpu("stop")
    assert [cloud.bucket_lines(f"saved-{i}") for i in (0, 1)] == [["saved"]] * 2
    for watching in (first, second):
        assert watching.wait(30) == 1 and "the same command resumes" in cloud.output(watching)
    assert cloud.tpu("status").count(" stopped ") == 2


@pytest.mark.slow
def test_a_failed_job_ends_the_run_and_a_preempted_one_is_made_anew(cloud):
    cloud.settings(JOB="bash -c 'echo the reason; exit $((3 * JAX_PROCESS_ID))'")
    done = cloud.tpu("run", "--restart-on-preemption", code=1)
    assert "w-1 exited-3" in done and "[w-1] the reason" in done
    assert len(cloud.calls("queued-resources", "create")) == 1  # not taken for a preemption
    cloud.tpu("delete")
    begin = "echo began >>$BUCKET/began-$JAX_PROCESS_ID"
    cloud.settings(JOB=f"bash -c '{begin}; test -e $BUCKET/preempted || sleep 300'")
    running = cloud.start("run", "--restart-on-preemption")
    cloud.wait_for(lambda: all(map(cloud.bucket_lines, BEGAN)), process=running)
    (cloud.bucket / "preempted").touch()
    cloud.preempt()
    assert running.wait(120) == 0, cloud.output(running)
    out = cloud.output(running)
    assert "test was taken away or failed" in out
    assert "the job is done on every worker" in out
    creates, deletes = (cloud.calls("queued-resources", x) for x in ("create", "delete"))
    assert (len(creates), len(deletes)) == (3, 2) and creates[1] == creates[2]
    assert cloud.bucket_lines("began-0") == ["began"] * 2


def test_a_gpu_box(cloud):
    assert "NVIDIA Fake" in cloud.gpu("me@box", "setup", "hub")
    assert (cloud.box / "uv.log").read_text().endswith("-e .[cuda,hub]\n")
    cloud.gpu("me@box", "start", "bash -c 'echo here $PWD'")
    cloud.wait_for(lambda: "exited-0" in cloud.gpu("me@box", "status"))
    assert f"here {cloud.box}/tba_jax-job/code" in cloud.gpu("me@box", "logs")
    cloud.gpu("me@box", "start", waiting())
    cloud.wait_for(lambda: cloud.bucket_lines("began-"))
    assert "stopped" in cloud.gpu("me@box", "stop")
    assert cloud.bucket_lines("saved-") == ["saved"]
