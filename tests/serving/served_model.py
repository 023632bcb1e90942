# SPDX-License-Identifier: Apache-2.0
"""The embedded start model behind the HTTP routes, in this process."""

import asyncio
import contextlib
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


class ServedModel:
    """Decoder, session, queue and server."""

    def __init__(self, folder, *, token="", port=0):
        self.config, self.params, _ = models.load(str(START_MODEL), param_dtype=jnp.float32)
        self.tokenizer = Tokenizer.load(folder)
        ids = {"eos_ids": self.tokenizer.eos_ids, "pad_id": self.tokenizer.pad_id}
        limits = {"prompt_tokens": MAX_LENGTH, "max_length": MAX_LENGTH}
        self.decoder = Decoder(self.config, compute_dtype=jnp.float32, **ids, **limits)
        self.session = self.open_session(self.params)
        chat = make_chat_format(self.tokenizer, "")
        self.served = Served("start", self.tokenizer, chat, ids["eos_ids"], MAX_LENGTH)
        self.queue = RequestQueue(self.served)
        self.server = HttpServer(self.application(token), "http-server", bind("127.0.0.1", port))
        self.url, self.stop = f"http://127.0.0.1:{self.server.port}", StopFlag()

    def application(self, token):
        return make_application(lambda episode: self.queue, self.served, token=token)

    def open_session(self, params):
        return self.decoder.session(params, num_slots=NUM_SLOTS)

    def step(self):
        return self.queue.step(self.session)

    @contextlib.contextmanager
    def running(self):
        worker = Worker("decoder", self.step, self.stop, idle_s=0.002).start()
        try:
            yield self
        finally:
            self.server.close()
            self.stop.set()
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


# What a response of the route `completions` may have wrong.
SPOILS = {
    "no token ids": lambda body, choice: choice.pop("token_ids"),
    "no log-probs": lambda body, choice: choice.update(logprobs=None),
    "another version": lambda body, choice: body.update(model="start"),
    "early end": lambda body, choice: choice.update(
        token_ids=[20], logprobs={"token_logprobs": choice["logprobs"]["token_logprobs"][:1]}
    ),
    "shifted": lambda body, choice: choice["logprobs"].update(
        token_logprobs=[x + 0.05 for x in choice["logprobs"]["token_logprobs"]]
    ),
}


class FaultyServer(ServedModel):
    """The routes for adapters that vLLM has; a request names its adapter in `model`.

    Takes the first of `faults` for each completion, and `always` for every one.
    """

    def __init__(self, folder, **options):
        self.faults, self.always, self.is_paused = [], "", False
        self.loaded, self.entries = {}, []  # queue by name; all queues with their sessions
        super().__init__(folder, **options)
        self.entries.append((self.queue, self.session))

    def application(self, token):
        own = {"load_lora_adapter": self.load, "unload_lora_adapter": self.unload}
        own["completions"] = self.complete
        routes = [Route(f"/v1/{name}", own[name], methods=["POST"]) for name in own]
        return Starlette(routes=[*routes, Mount("/", super().application(token))])

    def step(self):
        if self.is_paused:  # requests wait in their slots
            return any(queue._take_in(session) for queue, session in self.entries)
        return any([queue.step(session) for queue, session in self.entries])

    async def load(self, request):
        if self.always == "no adapters":
            return JSONResponse({"error": {"message": "LoRA is not enabled"}}, 500)
        body = await request.json()
        config, adapters = adapter_files.read(Path(body["lora_path"]), self.config)
        session = self.open_session(lora.merge(self.params, adapters, config=config))
        queue = RequestQueue(self.served._replace(model=body["lora_name"]))
        self.loaded[body["lora_name"]] = queue
        self.entries.append((queue, session))
        return JSONResponse({})

    async def unload(self, request):
        name = (await request.json())["lora_name"]
        return JSONResponse({}, 200 if self.loaded.pop(name, None) else 404)

    async def complete(self, request):
        fault = self.faults.pop(0) if self.faults else self.always
        if isinstance(fault, int):
            return JSONResponse({"error": {"message": "spoiled"}}, fault)
        await asyncio.sleep(2.0 if fault == "late" else 0)
        if fault == "forgotten":
            self.loaded.clear()
        body = await request.json()
        name = body["model"]
        queue = self.loaded.get(name, self.queue)
        if fault == "no effect":
            queue, body["model"] = self.queue, "start"
        try:
            call, updates = await queue("completions", body)
            found = call.response([update async for _, update in updates]) | {"model": name}
        except ApiError as error:
            return JSONResponse(error.body(), error.status)
        SPOILS.get(fault, lambda *_: None)(found, found["choices"][0])
        return JSONResponse(found)


def folder_with_template(folder, template=TEMPLATE):
    """A copy of the start model with a chat template."""
    shutil.copytree(START_MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder
