# SPDX-License-Identifier: Apache-2.0
"""Agents that processes of tests import; the prompt of a row says what an agent does."""

import threading
import time
from pathlib import Path

import urllib3

MEETING = threading.Barrier(2)  # of two episodes in one process


def complete(base_url, prompt, route="completions", **body):
    """The choice of a completion, or the code of its refusal."""
    body = {"prompt": prompt, "return_token_ids": True, "logprobs": 1, **body}
    response = urllib3.request("POST", f"{base_url}/{route}", json=body, timeout=60)
    found = response.json()
    return found["choices"][0] if response.status == 200 else found["error"]["code"]


def talk(base_url, row):
    """Three turns of each conversation; the reward is the number of tokens sampled / 10."""
    texts, num = [row["prompt"], "1+1="][: 1 + (row["kind"] == "fork")], 0
    for turn in range(3):
        for i, text in enumerate(texts):
            choice = complete(base_url, text, max_tokens=4, stop=[":", ","])
            num += len(choice["token_ids"])
            if row["kind"] == "text":
                cut = choice["logprobs"]["tokens"][-1]
                texts[i] += choice["text"] + (cut if cut in ":," else "") + f"{turn}+"
            else:
                texts[i] = [*choice["prompt_token_ids"], *choice["token_ids"], 20 + turn]
    return num / 10


def arithmetic(base_url, row):
    """One turn; the reward is 1 for the right answer."""
    return float(complete(base_url, row["prompt"])["text"].endswith(f"={row['answer']}"))


def misbehave(base_url, row):
    """Fail in the way that the row names."""
    kind, prompt = row["kind"], row["prompt"]
    tokens = {"nonsense": [1, 10**6], "first token": [28, 16]}
    chats = {"unread": {}, "unwritten": {"tools": [{}]}}
    if kind == "meet":
        MEETING.wait(30)
    if kind == "idle":
        time.sleep(1000)
    elif kind in chats:
        messages = [{"role": "user", "content": f"<bos>{prompt}"}]
        complete(base_url, None, "chat/completions", messages=messages, **chats[kind])
    elif kind == "three at once":  # answered one after another
        threads = [threading.Thread(target=complete, args=(base_url, prompt)) for _ in "123"]
        for act in (threading.Thread.start, threading.Thread.join):
            list(map(act, threads))
    elif kind == "four turns":
        found = [complete(base_url, prompt, max_tokens=1) for _ in range(4)]
        assert found[3] == "episode_ended"
    elif kind != "no turn":
        complete(base_url, tokens.get(kind, prompt), max_tokens=1)
    if kind == "hang":
        Path(row["file"]).write_text(base_url)
        time.sleep(1000)
    return 1.0
