# SPDX-License-Identifier: Apache-2.0
"""Tasks of a taskset of verifiers, in the interpreter that TBA_JAX_VERIFIERS names.

    python verifiers_bridge.py ID > train.jsonl    rows of the taskset: prompt and index of a task
    python verifiers_bridge.py ID SOCKET           plays episodes that clients of a socket request

ID is a taskset, whose harness runs on this machine, or a .toml file with verifiers' settings of an
environment. A client of the Unix socket (an abstract name) sends the base URL of the policy and the
index of a task as a JSON list on one line, and receives {"reward": ...} or {"error": ...}.
"""

import asyncio
import importlib.util
import json
import os
import sys
import tomllib
from pathlib import Path


async def main(taskset: str, socket: str = "") -> None:
    """Print the rows, or print the number of tasks and play episodes until the process ends."""
    verifiers = importlib.import_module("verifiers.v1")
    clients = importlib.import_module("verifiers.v1.clients")
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    config = {"taskset": {"id": taskset}, "agent": {"runtime": {"type": "subprocess"}}}
    if taskset.endswith(".toml"):
        config = tomllib.loads(Path(taskset).read_text())
    env = loaders.load_environment(loaders.resolve_env_config(config))
    tasks = list(env.taskset)
    if not socket:
        rows = ({"prompt": task.data.prompt, "task": i} for i, task in enumerate(tasks))
        print(*map(json.dumps, rows), sep="\n")
        return

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        base_url, index = json.loads(await reader.readline())
        client = verifiers.EvalClientConfig(base_url=base_url, api_key_var="TBA_JAX_NO_KEY")
        context = clients.ModelContext("policy", client, verifiers.SamplingConfig())
        episode = await env.run_slot(env.slots(tasks[index])[0], context)
        answer = {"reward": sum(trace.reward for trace in episode.traces)}
        if not episode.ok:
            errors = [*episode.errors, *(x for trace in episode.traces for x in trace.errors)]
            answer = {"error": f"verifiers: {errors!s:.1000}"}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    async with env.serving():
        server = await asyncio.start_unix_server(play, f"\0{socket}", backlog=1024)
        print(len(tasks), flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    if importlib.util.find_spec("verifiers") is None:
        if not (python := os.environ.pop("TBA_JAX_VERIFIERS", "")):
            sys.exit("no package verifiers: set TBA_JAX_VERIFIERS to a Python that has it")
        os.execv(python, [python, "-P", __file__, *sys.argv[1:]])
    asyncio.run(main(*sys.argv[1:]))
