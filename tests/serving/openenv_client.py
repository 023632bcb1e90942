# SPDX-License-Identifier: Apache-2.0
"""OpenEnv's capture of an agent's calls; run by the interpreter of a venv that has `openenv`.

python openenv_client.py BASE_URL MODEL_FOLDER
"""

import json
import socket
import sys
import urllib.request

from openenv.core.harness.capture import CaptureServer, to_turn_records, validate_llm
from openenv.core.harness.capture.export import export_session

URL = sys.argv[1]
report = validate_llm(URL, "start", api_key="secret", check_tools=False)
assert report.ok and report.trainable, (report.summary(), report.findings)

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = CaptureServer(llm_url=URL, model="start", port=port, api_key="secret")
server.start()
session = server.registry.create("episode")
messages = [{"role": "user", "content": "7+5-3"}]
for _ in range(2):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps({"model": "start", "messages": messages, "max_tokens": 8}).encode(),
        {"content-type": "application/json", "authorization": "Bearer episode"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        message = json.load(response)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": "1+1"}]
turns = to_turn_records(session.graph, export_session(session))
assert len(turns) == 2
print(
    json.dumps(
        [
            {
                "ids": prompt + sampled,
                "is_sampled": [0] * len(prompt) + [1] * len(sampled),
                "logprobs": [0.0] * len(prompt) + logprobs,
            }
            for prompt, sampled, logprobs in turns
        ]
    )
)
server.stop()
