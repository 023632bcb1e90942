# SPDX-License-Identifier: Apache-2.0
"""The embedded start model behind the HTTP routes, in this process."""

import asyncio
import contextlib
import copy
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import urllib3
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from tba_jax.decoding.engine import Decoder
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.hf import adapter_files, hf_weights
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
    "early end": {"max_tokens": 1},
}
ROUTES = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/resume", "/collective_rpc"),
    *("/reset_prefix_cache", "/update_weight_version"),
)


class ServedModel:
    """Decoder, sessions, queues and server, with the routes for weights that vLLM has.

    A request takes the first of `faults`, or else `always`.
    """

    def __init__(self, folder=START_MODEL):
        self.config, self.params, _ = models.load(str(START_MODEL), param_dtype=jnp.float32)
        self.folder, self.tokenizer = folder, Tokenizer.load(folder)
        ids = {"eos_ids": self.tokenizer.eos_ids, "pad_id": self.tokenizer.pad_id}
        limits = {"prompt_tokens": MAX_LENGTH, "max_length": MAX_LENGTH}
        self.decoder = Decoder(self.config, compute_dtype=jnp.float32, **ids, **limits)
        chat = make_chat_format(self.tokenizer, "", {})
        self.served = Served("start", self.tokenizer, chat, ids["eos_ids"], MAX_LENGTH)
        self.faults, self.always, self.calls = [], "", []  # calls of routes that load weights
        self.loaded, self.entries = {}, []  # queues of adapters; all queues with their sessions
        self.weights, self.names = self.params, ["default"]  # of the model itself, by version
        self.queue, self.session = self.open(self.params, "start")

    def open(self, params, name):
        queue = RequestQueue(self.served._replace(model=name))
        self.entries.append((queue, self.decoder.session(params, num_slots=NUM_SLOTS)))
        return self.entries[-1]

    def application(self, token):
        routes = [Route(path, self.control, methods=["POST"]) for path in ROUTES]
        app = make_application(lambda episode: self.begin, self.served, token=token)
        return Starlette(routes=[*routes, Mount("/", app)])

    async def control(self, request):
        """Answer on a route that loads weights."""
        path, body = request.url.path, await request.json()
        self.calls.append(path)
        if self.always == "no loading" and path in ("/v1/load_lora_adapter", "/collective_rpc"):
            return JSONResponse({"error": {"message": "LoRA is not enabled"}}, 500)
        has_effect = self.always != "no effect"
        if path == "/v1/load_lora_adapter":
            config, adapters = adapter_files.read(Path(body["lora_path"]), self.config)
            merged = lora.merge(self.params, adapters, config=config)
            params = merged if has_effect else self.params
            self.loaded[body["lora_name"]], _ = self.open(params, body["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            found = self.loaded.pop(body["lora_name"], None)
            return JSONResponse({}, 200 if found else 404)
        elif path == "/collective_rpc":
            folder = Path(body["kwargs"]["weights_path"])
            found = hf_weights.load(folder, self.config, jnp.float32)
            self.weights = found if has_effect else self.params
        elif path == "/update_weight_version":
            self.names.append(body["new_version"])
        return JSONResponse({})

    async def begin(self, kind, body):
        """Begin a request, as a `Scope` does, in the queue of its model."""
        fault = self.faults.pop(0) if self.faults else self.always
        if isinstance(fault, int):
            raise ApiError("spoiled", status=fault)
        await asyncio.sleep(2.0 if fault == "late" else 0)
        if fault == "forgotten":  # as a server that was restarted
            self.loaded.clear()
            self.weights, _ = self.params, self.names.append("default")
        while self.session.version < len(self.names) - 1:
            await asyncio.sleep(0.002)
        body = {**body, **CHANGES.get(fault, {})}
        call, updates = await self.loaded.get(body.get("model"), self.queue)(kind, body)
        plain, name = call.choice, self.names[-1]

        def choice(index, update, *before):
            span = {"version": name, "start": 0, "end": len(update.tokens)}
            return plain(index, update, *before) | {"weight_versions": [span]}

        object.__setattr__(call, "choice", choice)
        return call, shifted(updates) if fault == "shifted" else updates

    def step(self):
        if self.session.version < len(self.names) - 1:
            self.session.swap(self.weights, len(self.names) - 1)
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
        method = "GET" if body is None else "POST"
        response = urllib3.request(method, self.url + path, body=data, headers=headers, timeout=60)
        text = response.data.decode()
        return response.status, text if text.startswith("data:") else json.loads(text)


async def shifted(updates):
    async for i, update in updates:
        yield i, update._replace(token_logprobs=update.token_logprobs + 0.05)


def folder_with_template(folder, template=TEMPLATE):
    """A copy of the start model with a chat template."""
    shutil.copytree(START_MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder
