# SPDX-License-Identifier: Apache-2.0
"""The embedded start model behind the HTTP routes, in this process."""

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from urllib.parse import urljoin

import jax
import pytest
import urllib3
from fake_models import start_model
from starlette.responses import JSONResponse
from starlette.routing import Route

from tba_jax.decoding.engine import Decoder
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.models import lora
from tba_jax.models.hf import adapter_files, hf_weights
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.remote.http_server import HttpServer, bind
from tba_jax.run.model_parts import START_MODEL
from tba_jax.serving.chat import ChatFormat, Served
from tba_jax.serving.server import RequestQueue, make_application

MAX_LENGTH, NUM_SLOTS, TOKEN = 256, 8, "secret"
GENERATE = "/inference/v1/generate"
PROMPT = [1, 28, 16, 26, 18, 24, 34]  # "7+5-3="
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ '=' if m.role != 'assistant' else ':' }}{% endfor %}"
    "{{ ending }}"
)
CONTROLS = "/v1/load_lora_adapter /v1/unload_lora_adapter /collective_rpc /update_weight_version "
CONTROLS += "/pause /resume /reset_prefix_cache"


class ServedModel:
    """Decoder, sessions, queues and servers, of which one has vLLM's routes.

    A request for token IDs there takes the first of `faults`, or else `always`.
    """

    def __init__(self, folder=START_MODEL):
        self.config, self.params, _ = start_model()
        self.folder, self.tokenizer = folder, Tokenizer.load(folder)
        ids = {"eos_ids": self.tokenizer.eos_ids, "pad_id": self.tokenizer.pad_id}
        limits = {"prompt_tokens": MAX_LENGTH, "max_length": MAX_LENGTH}
        self.decoder = Decoder(self.config, compute_dtype="float32", **ids, **limits)
        chat = ChatFormat(self.tokenizer)
        self.served = Served("start", self.tokenizer, chat, ids["eos_ids"], MAX_LENGTH)
        self.faults, self.always, self.calls = [], "", []  # calls of routes for weights
        self.sessions = []  # of queues
        self.queue, self.session = self.open(self.params)
        self.queues, self.version = {"start": self.queue}, "start"  # by the name of the model

    def open(self, params):
        entry = RequestQueue(self.served), self.decoder.session(params, num_slots=NUM_SLOTS)
        self.sessions.append(entry)
        return entry

    def decode(self, params, prompt, settings, seed, num=1):
        """The decoder's own responses to a request with this seed."""
        options = {"num_samples": num, "key": jax.random.key(seed), "num_slots": NUM_SLOTS}
        return self.decoder.decode(params, [prompt], settings=settings, **options)[0]

    @contextlib.contextmanager
    def running(self):
        """Serve at `url`, with vLLM's routes, and at `guarded_url` those who send the token."""
        apps = [make_application(lambda _: self.queue, self.served, token=x) for x in ("", TOKEN)]
        routes = [Route(path, self.control, methods=["POST"]) for path in CONTROLS.split()]
        apps[0].router.routes[:0] = [*routes, Route(GENERATE, self.generate, methods=["POST"])]
        servers = [HttpServer(app, "http-server", bind("127.0.0.1", 0)) for app in apps]
        self.url, self.guarded_url = (f"http://127.0.0.1:{server.port}" for server in servers)
        stop = StopFlag()
        step = lambda: any([queue.step(session) for queue, session in self.sessions])  # noqa: E731
        worker = Worker("decoder", step, stop, idle_s=0.002).start()
        try:
            yield self
        finally:
            stop.set()
            worker.join(10.0)
            for server in servers:
                server.close()

    async def control(self, request):
        """Answer on a route for weights."""
        path, body, params = request.url.path, await request.json(), self.params
        self.calls.append(path)
        if self.always == "no loading":
            return JSONResponse({"error": {"message": "LoRA is not enabled"}}, 500)
        if path == "/v1/load_lora_adapter":
            config, adapters = adapter_files.read(Path(body["lora_path"]), self.config)
            if self.always not in ("no effect", "old norm"):
                params = lora.merge(params, adapters, config=config)
            self.queues[body["lora_name"]], _ = self.open(params)
        elif path == "/v1/unload_lora_adapter" and not self.queues.pop(body["lora_name"], None):
            return JSONResponse({}, 404)
        elif path == "/collective_rpc" and self.always != "no effect":
            folder = body["kwargs"]["weights_path"]
            if folder != "start":
                params = hf_weights.load(Path(folder), self.config, "float32")
            if self.always == "old norm":  # as a server that does not load every matrix
                params = {**params, "final_norm": self.params["final_norm"]}
            self.queues["start"], _ = self.open(params)
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return JSONResponse({})

    async def generate(self, request):
        """Answer with the weights that the request names."""
        body, fault = await request.json(), self.faults.pop(0) if self.faults else self.always
        if fault == "forgotten":  # as a server that was restarted
            self.queues, self.version = {"start": self.queue}, "start"
        name, most = body.pop("model", "start"), {"max_tokens": 1} if fault == "early end" else {}
        if isinstance(fault, int) or name not in self.queues:
            return JSONResponse({}, fault if isinstance(fault, int) else 404)
        await asyncio.sleep(2.0 if fault == "late" else 0)
        updates = self.queues[name]("generate", body | most)
        *_, (call, _, update) = [each async for each in updates]
        update = update._replace(token_logprobs=update.token_logprobs + 0.05 * (fault == "shifted"))
        choice = call.choice(0, update)
        span = {"version": self.version, "start": 0, "end": len(update.tokens)}
        choice.pop(fault, None)  # a part that the server does not return
        return JSONResponse({"model": name, "choices": [choice | {"weight_versions": [span]}]})

    def ask(self, url, body=None, headers=None):
        """Status and JSON object that are returned at a path or URL; POST with a body."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        method, url = "GET" if body is None else "POST", urljoin(self.url, url)
        response = urllib3.request(method, url, body=data, headers=headers, timeout=60)
        return response.status, response.json()


def folder_with_template(folder, template=TEMPLATE):
    """A copy of the start model with a chat template."""
    shutil.copytree(START_MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The one served model of the tests of a folder, whose conftest.py imports this."""
    folder = folder_with_template(tmp_path_factory.mktemp("model"))
    with ServedModel(folder).running() as found:
        yield found
