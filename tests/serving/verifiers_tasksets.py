# SPDX-License-Identifier: Apache-2.0
"""A taskset written with verifiers' classes, run through its `Env` and its training client.

    python verifiers_tasksets.py BASE_URL MODEL_FOLDER MODEL NUM_TASKS

Its harness drops the history after the first of two turns, so every trace has two branches. Prints
the rewards. Run by the interpreter of a venv that has `verifiers`.
"""

import asyncio
import json
import os
import sys
from types import ModuleType

import openai
import verifiers.v1 as vf
from renderers import DefaultRendererConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.envs.single_agent.env import SingleAgentEnv, SingleAgentEnvConfig
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig

URL, FOLDER, MODEL, NUM = sys.argv[1:]
os.environ["API_KEY"] = "unused"


class Problem(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Problem]):
    @vf.reward
    async def correct(self, trace) -> float:
        return float(self.data.answer in (trace.branches[-1].messages[-1].content or ""))


class Compacted(vf.Taskset[Sum]):
    def load(self):
        problems = ((7, 5), (2, 9))
        return [Sum(Problem(prompt=f"{a}+{b}", answer=str(a + b))) for a, b in problems]


class Loop(vf.Harness[vf.HarnessConfig]):
    """Asks in its own process, with OpenAI's client."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        for text in (data.prompt, "1+1"):
            messages = [{"role": "user", "content": text}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(0, "", "")


for name, own in {"compacted": Compacted, "loop": Loop}.items():
    module = ModuleType(f"tba_{name}")
    module.__all__ = [own.__name__]
    setattr(module, own.__name__, own)
    sys.modules[module.__name__] = module


async def main():
    config = vf.TrainClientConfig(
        base_url=URL,
        api_key_var="API_KEY",
        renderer=DefaultRendererConfig(),
        renderer_model_name=FOLDER,
    )
    ctx = ModelContext(MODEL, config, vf.SamplingConfig(temperature=1.0, max_tokens=8))
    agent = vf.AgentConfig(harness=vf.HarnessConfig(id="tba_loop"), runtime=SubprocessConfig())
    env = SingleAgentEnv(SingleAgentEnvConfig(taskset={"id": "tba_compacted"}, agent=agent))
    found = []
    async with env.serving():
        for task in list(env.taskset)[: int(NUM)]:
            episode = await env.run_slot(env.slots(task)[0], ctx)
            assert episode.ok, episode.errors or [trace.errors for trace in episode.traces]
            found += episode.traces
    print(json.dumps([trace.reward for trace in found]))


asyncio.run(main())
