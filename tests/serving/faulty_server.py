# SPDX-License-Identifier: Apache-2.0
"""A served model whose responses a test spoils, one way a response."""

import asyncio
import json

from tests.serving.served_model import ServedAdapters, reply


class FaultyServer(ServedAdapters):
    """Takes the first of `faults` for each completion, and `always` for every one."""

    def __init__(self, folder, **options):
        self.faults, self.always = [], ""
        super().__init__(folder, **options)
        self.server._server.config.app = self._spoiled

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
