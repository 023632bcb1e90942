# SPDX-License-Identifier: Apache-2.0
"""`--push` against a server of our own that speaks what huggingface_hub asks of the hub."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tba_jax.commands import export
from tests.integration import commands

ROOT = Path(__file__).parents[2]


class FakeHub(BaseHTTPRequestHandler):
    """One repository: /api/repos/create, preupload, Git LFS' batch and upload, commit."""

    def log_message(self, *args):  # a test prints nothing
        del args

    def answer(self, value, status=200, **headers):
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        return self.rfile.read(int(self.headers["Content-Length"]))

    def do_PUT(self):
        self.server.large[self.path.rsplit("/", 1)[-1]] = self.body()
        self.answer({})

    def do_GET(self):
        self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    def do_POST(self):
        server, path, body = self.server, self.path.split("?")[0], self.body()
        address = f"http://127.0.0.1:{server.server_port}"
        if self.headers["Authorization"] != "Bearer hf_right":
            return self.answer({"error": "you may not write to me"}, 403)
        if path == "/api/repos/create":
            server.created.append(json.loads(body))
            return self.answer({"url": f"{address}/me/solver"})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/models/me/solver/preupload/main":
            return self.answer(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if "safetensors" in file["path"] else "regular",
                            "shouldIgnore": False,
                        }
                        for file in json.loads(body)["files"]
                    ]
                }
            )
        if path == "/me/solver.git/info/lfs/objects/batch":
            objects = [
                {**o, "actions": {"upload": {"href": f"{address}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        assert path == "/api/models/me/solver/commit/main", path
        if server.refusals:
            return self.answer({"error": server.refusals.pop()}, 409)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                server.commits.append(value["summary"])
            elif line["key"] == "file":
                server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                server.files[value["path"]] = server.large[value["oid"]]
        self.answer({"commitUrl": f"{address}/me/solver/commit/1", "commitOid": "1" * 40})


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.created, server.files, server.large = [], {}, {}
    server.commits, server.refusals = [], []
    thread = threading.Thread(target=server.serve_forever, name="fake-hub")
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def push(folder, repo="me/solver", options="", **environment):
    """What `push` returns or refuses with, in a process that begins with this environment."""
    code = (
        "import sys; from pathlib import Path; from tba_jax.commands.hub import push\n"
        f"try: print(push(Path(sys.argv[1]), sys.argv[2], {options}))\n"
        "except ValueError as error: sys.exit(str(error))"
    )
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment = {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / ".."), **environment}
    return subprocess.run(
        [sys.executable, "-c", code, str(folder), repo],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "README.md").write_text("---\ntags:\n- tba_jax\n---\n# solver\n")
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 9)
    return path


@pytest.mark.parametrize(("options", "private"), [("", True), ("is_public=True", False)])
def test_every_file_arrives_in_a_repository_that_is_private_unless_asked(
    hub, folder, options, private
):
    address = f"http://127.0.0.1:{hub.server_port}"
    done = push(folder, options=options, HF_ENDPOINT=address, HF_TOKEN="hf_right")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{address}/me/solver"
    (created,) = hub.created
    assert created["name"] == "solver" and created["organization"] == "me"
    seen = created.get("visibility", "private" if created.get("private") else "public")
    assert (seen == "private") == private
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = (folder / "model.safetensors").read_bytes()
    assert hub.large == {hashlib.sha256(weights).hexdigest(): weights}


@pytest.mark.parametrize(
    ("environment", "repo", "message"),
    [
        ({}, "me/solver", "there is no Hugging Face token. Run `hf auth login`, or set HF_TOKEN"),
        ({"HF_TOKEN": "hf_x"}, "a/b/c", "--push=a/b/c: must be OWNER/NAME of the hub"),
        ({"HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1"}, "me/m", "HF_HUB_OFFLINE is set. Unset it"),
        ({"HF_TOKEN": "hf_wrong"}, "me/m", "the hub refused (403: you may not write to me)"),
        (
            {"HF_TOKEN": "hf_right", "HF_ENDPOINT": "http://127.0.0.1:9"},
            "me/m",
            "http://127.0.0.1:9 is unreachable",
        ),
    ],
)
def test_what_cannot_be_pushed_is_one_line(hub, folder, environment, repo, message):
    endpoint = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}"}
    done = push(folder, repo, **{**endpoint, **environment})
    assert done.returncode == 1 and done.stdout == ""
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert hub.files == {}
    if "hf_wrong" in environment.values() or "HF_ENDPOINT" in environment:
        assert f"Upload it with `hf upload {repo} {folder}`" in done.stderr


FOLLOW = """
import sys
from tba_jax.commands import export
export._LOOK_S = export._RETRY_S = 0.2
sys.exit(export.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_is_followed_to_its_end_and_a_refused_push_is_tried_again(hub, tmp_path):
    hub.refusals = ["too many commits"]
    cache = tmp_path / "cache"
    address = f"http://127.0.0.1:{hub.server_port}"
    argv = [f"--workdir={tmp_path / 'run'}", "--push=me/solver", "--push_every=2"]
    train = commands.command(tmp_path / "run", "num_steps=12", "checkpoint.period=2")
    environment = {
        **commands.environment(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path),
    }
    with subprocess.Popen(train, env=environment, stdout=subprocess.DEVNULL) as run:
        while not (tmp_path / "run" / "config.json").exists():
            assert run.poll() is None
            time.sleep(0.1)
        done = subprocess.run(
            [sys.executable, "-c", FOLLOW, *argv],
            env={**environment, "HF_ENDPOINT": address, "HF_TOKEN": "hf_right"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.wait() == 0
    assert done.returncode == 0, done.stderr
    steps = [int(summary.split()[3]) for summary in hub.commits]
    assert steps == sorted(set(steps)) and steps[-1] == 12 and len(steps) >= 2, steps
    assert "the hub answered 409: too many commits. The next attempt" in done.stderr
    assert [f"pushed step {x} to {address}/me/solver" for x in steps] == done.stdout.splitlines()
    assert b"12" in hub.files["README.md"]


def test_following_needs_a_repository_and_no_folder(capsys):
    assert export.main(["--workdir=x", "--push_every=2"]) == 1
    assert "wanted steps >= 1, and --push=OWNER/NAME" in capsys.readouterr().err
    assert export.main(["--workdir=x"]) == 1
    assert "give either --out=DIR or --push_every=STEPS" in capsys.readouterr().err
