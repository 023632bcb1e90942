# SPDX-License-Identifier: Apache-2.0
"""TRL's asynchronous rollout loop; run by the interpreter of a venv that has `trl`.

python trl_client.py BASE_URL MODEL_FOLDER
"""

import json
import multiprocessing
import queue
import sys
import threading

from accelerate.state import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import async_rollout_worker as trl

URL, FOLDER = sys.argv[1:]


def reward(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


PartialState()
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
# TRL itself knows the templates of released models only.
tokenizer.response_template = {
    "defaults": {"role": "assistant"},
    "start_anchor": "=",
    "fields": {"content": {"close_pattern": "<eos>", "content": "text"}},
}
prompts = [[{"role": "user", "content": text}] for text in ("7+5-3", "1-1+6")]
samples, failed = queue.Queue(), threading.Event()
loop = trl._AsyncRolloutLoop(
    model_name="start",
    dataset=Dataset.from_dict({"prompt": prompts}),
    reward_funcs=[reward],
    processing_class=tokenizer,
    eos_token_ids=[tokenizer.eos_token_id],
    rollout_buffer=samples,
    model_version_value=multiprocessing.Value("i", 0),
    heartbeat_value=multiprocessing.Value("d", 0.0),
    failed_event=failed,
    exception_info_queue=queue.Queue(),
    metrics_queue=queue.Queue(),
    num_generations=4,
    max_inflight_tasks=8,
    max_tokens=8,
    vllm_server_url=URL,
)
threading.Thread(target=loop.run, daemon=True).start()
found = [samples.get(timeout=100) for _ in range(8)]
loop._loop.call_soon_threadsafe(loop._stop_event.set)
assert not failed.is_set()
print(
    json.dumps(
        [
            {
                "ids": x.input_ids.tolist(),
                "is_sampled": x.completion_mask.tolist(),
                "logprobs": x.old_log_probs.tolist(),
            }
            for x in found
        ]
    )
)
