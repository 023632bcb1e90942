# SPDX-License-Identifier: Apache-2.0
"""Programs of users, each run by the interpreter of a venv that has the client.

python real_clients.py openenv|trl BASE_URL MODEL_FOLDER

They print the tokens, marks of sampled tokens, and log-probs of what they received.
To verifiers this file is a taskset with its harness.
"""

import importlib.util
import json
import multiprocessing
import queue
import socket
import sys
import threading

ASK = {"model": "start", "messages": [{"role": "user", "content": "7+5-3"}], "max_tokens": 8}


def with_openenv(url, folder):
    """OpenEnv's capture of an agent's calls."""
    import openai
    from openenv.core.harness.capture import CaptureServer, to_turn_records, validate_llm
    from openenv.core.harness.capture.export import export_session

    report = validate_llm(url, "start", api_key="secret", check_tools=False)
    assert report.ok and report.trainable, (report.summary(), report.findings)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = CaptureServer(llm_url=url, model="start", port=port, api_key="secret")
    server.start()
    session, messages = server.registry.create("episode"), [*ASK["messages"]]
    agent = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="episode")
    for _ in range(2):
        answer = agent.chat.completions.create(**{**ASK, "messages": messages}).choices[0].message
        messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "1+1"}]
    turns = to_turn_records(session.graph, export_session(session))
    server.stop()
    return [
        (prompt + sampled, [0] * len(prompt) + [1] * len(sampled), [0.0] * len(prompt) + logprobs)
        for prompt, sampled, logprobs in turns
    ]


def with_trl(url, folder):
    """TRL's asynchronous rollout loop."""
    from accelerate.state import PartialState
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import async_rollout_worker as trl

    PartialState()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # TRL itself knows the templates of released models only.
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "=",
        "fields": {"content": {"close_pattern": "<eos>", "content": "text"}},
    }
    prompts = [[{"role": "user", "content": text}] for text in ("7+5-3", "1-1+6")]
    samples, failed = queue.Queue(), threading.Event()
    shared = {"rollout_buffer": samples, "failed_event": failed}
    shared |= {"exception_info_queue": queue.Queue(), "metrics_queue": queue.Queue()}
    shared |= {x: multiprocessing.Value("d", 0) for x in ("heartbeat_value", "model_version_value")}
    loop = trl._AsyncRolloutLoop(
        model_name="start",
        dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=[lambda completion_ids, **columns: [float(len(x)) for x in completion_ids]],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=4,
        max_tokens=8,
        vllm_server_url=url,
        **shared,
    )
    threading.Thread(target=loop.run, daemon=True).start()
    found = [samples.get(timeout=100) for _ in range(8)]
    loop._loop.call_soon_threadsafe(loop._stop_event.set)
    assert not failed.is_set()
    return [
        (x.input_ids.tolist(), x.completion_mask.tolist(), x.old_log_probs.tolist()) for x in found
    ]


if importlib.util.find_spec("verifiers"):
    import verifiers.v1 as vf
    from verifiers.v1.runtimes import ProgramResult

    __all__ = ["Loop", "Sums"]

    class Sum(vf.Task[vf.TaskData]):
        @vf.reward
        async def words(self, trace) -> float:
            return 0.5 + len(trace.branches)

    class Sums(vf.Taskset[Sum]):
        def load(self):
            return [Sum(vf.TaskData(prompt=prompt)) for prompt in ("7+5", "2+9")]

    class Loop(vf.Harness[vf.HarnessConfig]):
        """Drops its history after a turn, so that an episode has two paths."""

        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            import openai

            client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
            for text in (data.prompt, "1+1"):
                ask = {**ASK, "model": ctx.model, "messages": [{"role": "user", "content": text}]}
                await client.chat.completions.create(**ask)
            return ProgramResult(0, "", "")


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps(globals()[f"with_{name}"](*arguments)))
