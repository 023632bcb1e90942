# SPDX-License-Identifier: Apache-2.0
"""verifiers' OpenEnv taskset over an OpenEnv server of this process, with the training client.

    python verifiers_openenv.py BASE_URL MODEL_FOLDER

Run by the interpreter of a venv that has `verifiers`, `openenv` and `uv`.
"""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
import verifiers.v1 as vf
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from renderers import DefaultRendererConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.tasksets.openenv import OpenEnvEnv, OpenEnvEnvConfig

URL, FOLDER = sys.argv[1:]
os.environ["API_KEY"] = "unused"
# The harness runs its program with uv.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


class Say(Action):
    text: Any

    @classmethod
    def model_json_schema(cls, *args, **options):
        return {"title": "Say", "required": ["text"]}  # short: a token of the model is a character


class Seen(Observation):
    text: str


class Sums(Environment):
    """Two questions; each answer has a reward of 0.5."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.num = 0
        return Seen(text="7+5-3")

    def step(self, action, timeout_s=None, **kwargs):
        self.num += 1
        return Seen(text="1-1+6", reward=0.5, done=self.num == 2)

    @property
    def state(self):
        return State(step_count=self.num)


def serve():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Sums, Say, Seen)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return f"http://127.0.0.1:{port}"


async def main():
    client = vf.TrainClientConfig(
        base_url=URL,
        api_key_var="API_KEY",
        renderer=DefaultRendererConfig(),
        renderer_model_name=FOLDER,
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=8)
    taskset = {"id": "openenv", "base_url": serve()}
    player = vf.AgentConfig(harness=vf.HarnessConfig(id="null"), runtime=SubprocessConfig())
    env = OpenEnvEnv(OpenEnvEnvConfig(taskset=taskset, player=player))
    async with env.serving():
        (task,) = env.taskset
        episode = await env.run_slot(env.slots(task)[0], ModelContext("start", client, sampling))
    assert episode.ok, episode.errors or [trace.errors for trace in episode.traces]
    (trace,) = episode.traces
    rows = [
        {
            "ids": list(branch.token_ids),
            "is_sampled": [int(x) for x in branch.sampled_mask],
            "logprobs": list(branch.logprobs),
        }
        for branch in trace.branches
    ]
    print(json.dumps({"branches": rows, "reward": trace.reward}))


asyncio.run(main())
