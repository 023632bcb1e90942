# SPDX-License-Identifier: Apache-2.0
"""Agents that processes of tests import; the prompt of a row says what an agent does."""

import json
import os
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

MEETING = threading.Barrier(2)  # of two episodes in one process


def complete(base_url, prompt, **body):
    """The choice of a completion."""
    body = {"prompt": prompt, "return_token_ids": True, "logprobs": 1, **body}
    url, kind = f"{base_url}/completions", {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request, timeout=60) as response:
        (choice,) = json.load(response)["choices"]
    return choice


def refused(base_url, prompt):
    """Name of the refusal of a request; "" for none."""
    try:
        complete(base_url, prompt)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)["error"]["code"]
    return ""


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
    choice = complete(base_url, row["prompt"])
    return float(choice["text"].endswith(f"={row['answer']}"))


def misbehave(base_url, row):
    """Fail in the way that the row names."""
    kind, prompt = row["kind"], row["prompt"]
    if kind == "no turn":
        return 1.0
    if kind == "idle":
        time.sleep(1000)
    if kind == "meet":
        MEETING.wait(30)
    if kind == "error":
        complete(base_url, prompt, temperature="hot")
    if kind == "three at once":  # answered one after another
        threads = [threading.Thread(target=complete, args=(base_url, prompt)) for _ in range(3)]
        for act in (threading.Thread.start, threading.Thread.join):
            list(map(act, threads))
        return 1.0
    tokens = {"nonsense": [1, 10**6], "first token": [28, 16]}
    choice = complete(base_url, tokens.get(kind, prompt), max_tokens=1)
    if kind == "hang":
        Path(row["file"]).write_text(base_url)
        time.sleep(1000)
    if kind == "crash":
        os._exit(3)
    if kind == "turns":
        for _ in range(2):
            text = [*choice["prompt_token_ids"], *choice["token_ids"]]
            choice = complete(base_url, text, max_tokens=1)
        assert refused(base_url, text) == "episode_ended"
    return "much" if kind == "type" else 1.0
