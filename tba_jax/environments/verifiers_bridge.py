# SPDX-License-Identifier: Apache-2.0
"""Tasks of a taskset of verifiers, in the interpreter that TBA_JAX_VERIFIERS names.

    python verifiers_bridge.py ID [SOCKET]    prints rows of tasks, or plays episodes

ID is a taskset, whose harness runs on this machine, or a .toml file with verifiers' settings of an
environment; its table `eval` has settings of the taskset for held-out tasks. A client of SOCKET (an
abstract name) sends the base URL of the policy and the index of a task as a JSON list on one line,
and receives {"reward": ...} or {"error": ...}.
"""

import asyncio
import importlib
import json
import os
import sys
import tomllib
from pathlib import Path


async def main(taskset: str, socket: str = "") -> None:
    """Print the rows, or print the number of tasks and play episodes until the process ends."""
    names = ("verifiers.v1", "verifiers.v1.clients", "verifiers.v1.utils.loaders")
    verifiers, clients, loaders = map(importlib.import_module, names)
    config = {"taskset": {"id": taskset}, "agent": {"runtime": {"type": "subprocess"}}}
    if taskset.endswith(".toml"):
        config = tomllib.loads(Path(taskset).read_text())
    own, tasks, rows = config["taskset"], [], []
    held_out = own | config.pop("eval", {})
    for split, settings in [("test", held_out)] * (held_out != own) + [("train", own)]:
        env = loaders.load_environment(loaders.resolve_env_config(config | {"taskset": settings}))
        for task in env.taskset if env.taskset.bounded else env.taskset.take(10_000):
            chat = [{"role": "user", "content": f"{task.data.prompt}"}]
            rows.append(json.dumps({"prompt": chat, "task": len(tasks), "split": split}))
            tasks.append(task)
    if not socket:
        print(*rows, sep="\n")
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
    if python := os.environ.pop("TBA_JAX_VERIFIERS", ""):
        os.execv(python, [python, "-P", __file__, *sys.argv[1:]])
    asyncio.run(main(*sys.argv[1:]))
