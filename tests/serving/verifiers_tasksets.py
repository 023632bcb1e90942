# SPDX-License-Identifier: Apache-2.0
"""Two tasksets written with verifiers' classes, run through its `Env` and its training client.

    python verifiers_tasksets.py BASE_URL MODEL_FOLDER [turns|compacted]

Prints the branches of every trace with their tokens and log-probs, and the reward. Without a name
all tasksets run. Run by the interpreter of a venv that has `verifiers`.
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

URL, FOLDER, *NAMES = sys.argv[1:]
os.environ["API_KEY"] = "unused"


class Problem(vf.TaskData):
    """A sum, and what the harness does with it."""

    answer: str = ""
    num_turns: int = 1
    is_compacted: bool = False


class Sum(vf.Task[Problem]):
    @vf.reward
    async def correct(self, trace) -> float:
        return float(self.data.answer in (trace.branches[-1].messages[-1].content or ""))

    @vf.metric
    async def num_branches(self, trace) -> float:
        return float(len(trace.branches))


def load(**changes):
    return [
        Sum(Problem(prompt=f"{a}+{b}", answer=str(a + b), **changes)) for a, b in ((7, 5), (2, 9))
    ]


class Turns(vf.Taskset[Sum]):
    """Three turns of one conversation."""

    def load(self):
        return load(num_turns=3)


class Compacted(vf.Taskset[Sum]):
    """The harness drops the history after the first turn, so the trace has two branches."""

    def load(self):
        return load(num_turns=2, is_compacted=True)


class Loop(vf.Harness[vf.HarnessConfig]):
    """Asks in its own process, with OpenAI's client."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": data.prompt}]
        for turn in range(data.num_turns):
            found = await client.chat.completions.create(model=ctx.model, messages=messages)
            said = {"role": "assistant", "content": found.choices[0].message.content or ""}
            messages = [*messages, said, {"role": "user", "content": f"{turn}+1"}]
            if data.is_compacted:
                messages = [{"role": "user", "content": "1+1"}]
        return ProgramResult(0, "", "")


TASKSETS = {"turns": Turns, "compacted": Compacted}
for name, own in {**TASKSETS, "loop": Loop}.items():
    module = ModuleType(f"tba_{name}")
    module.__all__ = [own.__name__]
    setattr(module, own.__name__, own)
    sys.modules[module.__name__] = module


async def play(name, ctx):
    """Return the traces of a taskset's episodes."""
    harness = vf.HarnessConfig(id="tba_loop")
    agent = vf.AgentConfig(harness=harness, runtime=SubprocessConfig())
    env = SingleAgentEnv(SingleAgentEnvConfig(taskset={"id": f"tba_{name}"}, agent=agent))
    found = []
    async with env.serving():
        for task in list(env.taskset)[: None if len(NAMES) == 0 else 1]:
            episode = await env.run_slot(env.slots(task)[0], ctx)
            assert episode.ok, episode.errors or [trace.errors for trace in episode.traces]
            found += episode.traces
    return found


def row_of(branch):
    """Tokens, marks and log-probs of a branch."""
    return {
        "ids": list(branch.token_ids),
        "is_sampled": [int(x) for x in branch.sampled_mask],
        "logprobs": list(branch.logprobs),
    }


async def main():
    config = vf.TrainClientConfig(
        base_url=URL,
        api_key_var="API_KEY",
        renderer=DefaultRendererConfig(),
        renderer_model_name=FOLDER,
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=8)
    found = {}
    for name in NAMES or TASKSETS:
        traces = await play(name, ModelContext("policy" if NAMES else "start", config, sampling))
        found[name] = [
            {"branches": [row_of(x) for x in trace.branches], "reward": trace.reward}
            for trace in traces
        ]
    print(json.dumps(found))


asyncio.run(main())
