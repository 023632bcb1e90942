# SPDX-License-Identifier: Apache-2.0
"""Drives launch/tpu.sh and launch/gpu.sh against the fake cloud of tests/fake_gcloud.

Nothing here reaches a network: `gcloud`, `ssh` and `scp` on the scripts' PATH are fakes.
"""

import contextlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
FAKE = ROOT / "tests" / "fake_gcloud"
SETTINGS = {
    "NAME": "test",
    "PROJECT": "p",
    "ZONE": "z",
    "ACCELERATOR": "v5litepod-16",
    "PROVISIONING": "spot",
    "POLL_S": "0.1",
}


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
