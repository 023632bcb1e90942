# SPDX-License-Identifier: Apache-2.0
"""The launch scripts against a cloud in a folder (tests/fake_gcloud) and jobs of a few lines."""

import shlex
import shutil

import pytest
from launch_cloud import ROOT, Cloud

COUNTING = "for i in 1 2; do echo $i >>$BUCKET/count-$JAX_PROCESS_ID; echo counted $i; done"
# Notes that it was asked to end, and takes a moment for it, as a run that saves does.
WAITING = """
trap 'sleep 0.3; echo saved >>$BUCKET/saved-$JAX_PROCESS_ID; exit 143' TERM
echo began >>$BUCKET/began-$JAX_PROCESS_ID
for i in $(seq 300); do sleep 0.1; done
"""
BEGAN = ("began-0", "began-1")


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
