# SPDX-License-Identifier: Apache-2.0
"""The embedded start model behind the HTTP routes, in this process."""

import asyncio
import contextlib
import copy
import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import jax.numpy as jnp
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from tba_jax.decoding.engine import Decoder
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.hf import adapter_files
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.remote.http_server import HttpServer, bind
from tba_jax.run.model_parts import START_MODEL
from tba_jax.serving.chat import make_chat_format
from tba_jax.serving.protocol import ApiError, Served
from tba_jax.serving.server import RequestQueue, make_application

MAX_LENGTH, NUM_SLOTS = 256, 8
PROMPT = [1, 28, 16, 26, 18, 24, 34]  # "7+5-3="
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ '=' if m.role != 'assistant' else ':' }}{% endfor %}"
    "{{ ending }}"
)
# Parameters that a faulty server takes in place of those of a request.
CHANGES = {
    "no token ids": {"return_token_ids": False},
    "no log-probs": {"logprobs": False},
    "another version": {"model": "start"},
    "early end": {"max_tokens": 1},
}


class ServedModel:
    """Decoder, sessions, queues and server, with the routes for adapters that vLLM has.

    A request names its adapter in `model`. It takes the first of `faults`, or else `always`.
    """

    def __init__(self, folder=START_MODEL):
        self.config, self.params, _ = models.load(str(START_MODEL), param_dtype=jnp.float32)
        self.folder, self.tokenizer = folder, Tokenizer.load(folder)
        ids = {"eos_ids": self.tokenizer.eos_ids, "pad_id": self.tokenizer.pad_id}
        limits = {"prompt_tokens": MAX_LENGTH, "max_length": MAX_LENGTH}
        self.decoder = Decoder(self.config, compute_dtype=jnp.float32, **ids, **limits)
        chat = make_chat_format(self.tokenizer, "")
        self.served = Served("start", self.tokenizer, chat, ids["eos_ids"], MAX_LENGTH)
        self.faults, self.always, self.is_paused = [], "", False
        self.loaded, self.entries = {}, []  # queues by adapter; all queues with their sessions
        self.queue, self.session = self.open(self.params, "start")

    def open(self, params, name):
        queue = RequestQueue(self.served._replace(model=name))
        self.entries.append((queue, self.decoder.session(params, num_slots=NUM_SLOTS)))
        return self.entries[-1]

    def application(self, token):
        own = {"load_lora_adapter": self.load, "unload_lora_adapter": self.unload}
        routes = [Route(f"/v1/{name}", own[name], methods=["POST"]) for name in own]
        app = make_application(lambda episode: self.begin, self.served, token=token)
        return Starlette(routes=[*routes, Mount("/", app)])

    async def load(self, request):
        if self.always == "no adapters":
            return JSONResponse({"error": {"message": "LoRA is not enabled"}}, 500)
        body = await request.json()
        config, adapters = adapter_files.read(Path(body["lora_path"]), self.config)
        merged = lora.merge(self.params, adapters, config=config)
        params = self.params if self.always == "no effect" else merged
        self.loaded[body["lora_name"]], _ = self.open(params, body["lora_name"])
        return JSONResponse({})

    async def unload(self, request):
        name = (await request.json())["lora_name"]
        return JSONResponse({}, 200 if self.loaded.pop(name, None) else 404)

    async def begin(self, kind, body):
        """Begin a request, as a `Scope` does, in the queue of its model."""
        fault = self.faults.pop(0) if self.faults else self.always
        if isinstance(fault, int):
            raise ApiError("spoiled", status=fault)
        await asyncio.sleep(2.0 if fault == "late" else 0)
        if fault == "forgotten":
            self.loaded.clear()
        body = {**body, **CHANGES.get(fault, {})}
        call, updates = await self.loaded.get(body.get("model"), self.queue)(kind, body)
        return call, shifted(updates) if fault == "shifted" else updates

    def step(self):
        if self.is_paused:  # requests wait in their slots
            return any(queue._take_in(session) for queue, session in self.entries)
        return any([queue.step(session) for queue, session in self.entries])

    @contextlib.contextmanager
    def listening(self, token="", port=0):
        """This model at an address of its own, for requests with a token."""
        found, app = copy.copy(self), self.application(token)
        server = HttpServer(app, "http-server", bind("127.0.0.1", port))
        found.port, found.url = server.port, f"http://127.0.0.1:{server.port}"
        with contextlib.closing(server):
            yield found

    @contextlib.contextmanager
    def running(self):
        stop = StopFlag()
        worker = Worker("decoder", self.step, stop, idle_s=0.002).start()
        try:
            with self.listening() as found:
                self.port, self.url = found.port, found.url
                yield self
        finally:
            stop.set()
            worker.join(10.0)

    def ask(self, path, body=None, headers=None):
        """Status and JSON object, or the text of a stream; POST with a body."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            response = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            text = response.read().decode()
        return response.status, text if text.startswith("data:") else json.loads(text)


async def shifted(updates):
    async for i, update in updates:
        yield i, update._replace(token_logprobs=update.token_logprobs + 0.05)


def folder_with_template(folder, template=TEMPLATE):
    """A copy of the start model with a chat template."""
    shutil.copytree(START_MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder
