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
from tba_jax.serving.protocol import ApiError, Call, Served
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
LOADS = ("/v1/load_lora_adapter", "/collective_rpc")
OTHERS = "/v1/unload_lora_adapter /pause /resume /reset_prefix_cache /update_weight_version".split()


class Versioned(Call):
    """A call whose response names the weights, as vLLM's does."""

    def choice(self, index, update, *before):
        span = {"version": self.served.model, "start": 0, "end": len(update.tokens)}
        return super().choice(index, update, *before) | {"weight_versions": [span]}


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
        self.sessions = []  # of queues
        self.queue, self.session = self.open(self.params)
        self.own, self.loaded = ("start", self.queue), {}  # the model itself; adapters by name

    def open(self, params):
        entry = RequestQueue(self.served), self.decoder.session(params, num_slots=NUM_SLOTS)
        self.sessions.append(entry)
        return entry

    def application(self, token):
        routes = [Route(path, self.control, methods=["POST"]) for path in (*LOADS, *OTHERS)]
        app = make_application(lambda episode: self.sample, self.served, token=token)
        return Starlette(routes=[*routes, Mount("/", app)])

    async def control(self, request):
        """Answer on a route that loads weights."""
        path, body = request.url.path, await request.json()
        self.calls.append(path)
        if self.always == "no loading" and path in LOADS:
            return JSONResponse({"error": {"message": "LoRA is not enabled"}}, 500)
        params = self.params
        if path == "/v1/load_lora_adapter":
            config, adapters = adapter_files.read(Path(body["lora_path"]), self.config)
            if self.always != "no effect":
                params = lora.merge(self.params, adapters, config=config)
            self.loaded[body["lora_name"]], _ = self.open(params)
        elif path == "/v1/unload_lora_adapter":
            found = self.loaded.pop(body["lora_name"], None)
            return JSONResponse({}, 200 if found else 404)
        elif path == "/collective_rpc" and self.always != "no effect":
            folder = body["kwargs"]["weights_path"]
            if folder != "start":
                params = hf_weights.load(Path(folder), self.config, jnp.float32)
            if self.always == "old norm":  # as a server that does not load every matrix
                params = {**params, "final_norm": self.params["final_norm"]}
            self.own = self.own[0], self.open(params)[0]
        elif path == "/update_weight_version":
            self.own = body["new_version"], self.own[1]
        return JSONResponse({})

    async def sample(self, kind, body):
        """Sample as a `Sample` does, with the weights that the request names."""
        fault = self.faults.pop(0) if self.faults else self.always
        if isinstance(fault, int):
            raise ApiError("spoiled", status=fault)
        await asyncio.sleep(2.0 if fault == "late" else 0)
        if fault == "forgotten":  # as a server that was restarted
            self.loaded.clear()
            self.own = "start", self.queue
        name, queue = self.own
        if (model := body.get("model")) in self.loaded:
            name, queue = model, self.loaded[model]
            body = {**body, "model": ""}
        async for call, i, update in queue(kind, {**body, **CHANGES.get(fault, {})}):
            call = Versioned(**{**vars(call), "served": call.served._replace(model=name)})
            shift = 0.05 * (fault == "shifted")
            yield call, i, update._replace(token_logprobs=update.token_logprobs + shift)

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
        def step():
            return any([queue.step(session) for queue, session in self.sessions])

        stop = StopFlag()
        worker = Worker("decoder", step, stop, idle_s=0.002).start()
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


def folder_with_template(folder, template=TEMPLATE):
    """A copy of the start model with a chat template."""
    shutil.copytree(START_MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder
