# SPDX-License-Identifier: Apache-2.0
"""A taskset written with verifiers' classes, for a venv that has `verifiers`.

Its harness drops the history after the first of two turns, so every episode has two paths.
"""

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class Sum(vf.Task[vf.TaskData]):
    @vf.reward
    async def words(self, trace) -> float:
        return 0.5 + len(trace.branches)


class Sums(vf.Taskset[Sum]):
    def load(self):
        return [Sum(vf.TaskData(prompt=prompt)) for prompt in ("7+5", "2+9")]


class Loop(vf.Harness[vf.HarnessConfig]):
    """Asks in its own process, with OpenAI's client."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        for text in (data.prompt, "1+1"):
            messages = [{"role": "user", "content": text}]
            await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=8)
        return ProgramResult(0, "", "")


__all__ = ["Loop", "Sums"]
