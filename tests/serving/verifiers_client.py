# SPDX-License-Identifier: Apache-2.0
"""The training client of verifiers; run by the interpreter of a venv that has `verifiers`.

python verifiers_client.py BASE_URL MODEL_FOLDER
"""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from renderers import DefaultRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.dialects.chat import ChatDialect

URL, FOLDER = sys.argv[1:]
os.environ["API_KEY"] = "unused"


async def main():
    client = TrainClient(
        vf.TrainClientConfig(
            base_url=URL,
            api_key_var="API_KEY",
            renderer=DefaultRendererConfig(),
            renderer_model_name=FOLDER,
        )
    )
    found = []
    for text in ("7+5-3", "1-1+6", "9+9-8"):
        messages = [{"role": "user", "content": text}]
        for _ in range(2):
            body = {"model": "start", "messages": messages}
            sampling = vf.SamplingConfig(temperature=1.0, max_tokens=8)
            answer = await client.get_response(ChatDialect(), body, sampling, session_id=text)
            tokens = answer.tokens
            found.append(
                {
                    "ids": tokens.prompt_ids + tokens.completion_ids,
                    "is_sampled": [0] * len(tokens.prompt_ids) + [1] * len(tokens.completion_ids),
                    "logprobs": [0.0] * len(tokens.prompt_ids) + tokens.completion_logprobs,
                }
            )
            said = {"role": "assistant", "content": answer.message.content or ""}
            messages = [*messages, said, {"role": "user", "content": "1+1"}]
    await client.close()
    print(json.dumps(found))


asyncio.run(main())
