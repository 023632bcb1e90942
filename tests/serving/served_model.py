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

from tba_jax.decoding.engine import Decoder
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.hf import adapter_files
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.remote.http_server import HttpServer, bind
from tba_jax.run.model_parts import START_MODEL
from tba_jax.serving.chat import make_chat_format
from tba_jax.serving.protocol import Served
from tba_jax.serving.server import Application, RequestQueue

MAX_LENGTH = 256
NUM_SLOTS = 8
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ '=' if m.role != 'assistant' else ':' }}{% endfor %}"
    "{{ ending }}"
)


class ServedModel:
    """Decoder, session, queue and server."""

    def __init__(self, folder, *, token="", renderer="", port=0):
        config, params, _ = models.load(str(START_MODEL), param_dtype=jnp.float32)
        self.config, self.params = config, params
        self.tokenizer = Tokenizer.load(folder)
        self.decoder = Decoder(
            config,
            compute_dtype=jnp.float32,
            eos_ids=self.tokenizer.eos_ids,
            pad_id=self.tokenizer.pad_id,
            prompt_tokens=MAX_LENGTH,
            max_length=MAX_LENGTH,
        )
        self.session = self.open_session(params)
        chat = make_chat_format(self.tokenizer, renderer)
        self.served = Served("start", self.tokenizer, chat, self.tokenizer.eos_ids, MAX_LENGTH)
        self.queue = queue = RequestQueue(self.served)
        self.application = Application(
            lambda episode: queue,
            self.served,
            queue=queue,
            token=token,
        )
        self.server = HttpServer(self.application, "http-server", bind("127.0.0.1", port))
        self.stop = StopFlag()

    def open_session(self, params):
        return self.decoder.session(
            params,
            num_slots=NUM_SLOTS,
        )

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

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.port}"

    def post(self, path, body, headers=None):
        """Status and JSON object, or the text of a stream."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, headers)
        return self._opened(request)

    def get(self, path):
        return self._opened(urllib.request.Request(self.url + path))

    def _opened(self, request):
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        return status, text if text.startswith("data:") else json.loads(text)


class ServedAdapters(ServedModel):
    """The routes for adapters that vLLM has; a request names its adapter in `model`."""

    def __init__(self, folder, **options):
        super().__init__(folder, **options)
        self.loaded = {}  # name -> (application, queue, session); an unloaded one ends its requests
        self.entries = [(self.queue, self.session)]
        self.server._server.config.loaded_app = self.respond

    @property
    def names(self):
        return list(self.loaded)

    def load(self, name, path):
        config, adapters = adapter_files.read(Path(path), self.config)
        session = self.open_session(lora.merge(self.params, adapters, config=config))
        served = self.served._replace(model=name)
        queue = RequestQueue(served)
        self.loaded[name] = Application(lambda episode: queue, served, queue=queue)
        self.entries.append((queue, session))

    def unload(self, name):
        del self.loaded[name]

    def pause(self, is_paused):
        for queue, _ in self.entries:
            queue.is_paused = is_paused

    def step(self):
        return any([queue.step(session) for queue, session in self.entries])

    async def respond(self, scope, receive, send):
        if scope["method"] != "POST":
            await self.application(scope, receive, send)
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body")
        body, path = json.loads(raw), scope["path"]
        if path == "/v1/load_lora_adapter":
            self.load(body["lora_name"], body["lora_path"])
            await reply(send, 200, {})
        elif path == "/v1/unload_lora_adapter":
            status = 200 if body["lora_name"] in self.loaded else 404
            self.loaded.pop(body["lora_name"], None)
            await reply(send, status, {})
        else:
            application = self.loaded.get(body.get("model"), self.application)
            messages = [{"type": "http.request", "body": raw, "more_body": False}]

            async def again():
                return messages.pop() if messages else await receive()

            await application(scope, again, send)


class FaultyServer(ServedAdapters):
    """Takes the first of `faults` for each completion, and `always` for every one."""

    def __init__(self, folder, **options):
        self.faults, self.always = [], ""
        super().__init__(folder, **options)
        self.server._server.config.loaded_app = self._spoiled

    async def _spoiled(self, scope, receive, send):
        fault = self.always
        if scope["path"] == "/v1/completions" and self.faults:
            fault = self.faults.pop(0)
        if scope["path"] != "/v1/completions" or not fault:
            await self.respond(scope, receive, send)
        elif isinstance(fault, int):
            await reply(send, fault, {"error": {"message": "spoiled"}})
        elif fault == "late":
            await asyncio.sleep(2.0)
            await self.respond(scope, receive, send)
        else:
            if fault == "forgotten":
                self.loaded.clear()
            found = []

            async def keep(message):
                found.append(message)

            await self.respond(scope, receive, keep)
            status = found[0]["status"]
            body = json.loads(b"".join(x.get("body", b"") for x in found))
            if status == 200:
                body = spoil(fault, body)
            await reply(send, status, body)


def spoil(fault, body):
    """A response with one thing wrong."""
    choice = body["choices"][0]
    values = choice["logprobs"]["token_logprobs"]
    match fault:
        case "no token ids":
            del choice["token_ids"]
        case "no log-probs":
            choice["logprobs"] = None
        case "another version":
            body["model"] = "start"
        case "early end":
            choice["token_ids"], choice["logprobs"]["token_logprobs"] = [20], values[:1]
        case "shifted":
            choice["logprobs"]["token_logprobs"] = [x + 0.05 for x in values]
    return body


async def reply(send, status, body):
    data = json.dumps(body).replace("Infinity", "1e999").encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def folder_with_template(folder, template=TEMPLATE):
    """A copy of the start model with a chat template."""
    shutil.copytree(START_MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder
