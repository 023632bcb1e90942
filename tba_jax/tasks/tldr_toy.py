# SPDX-License-Identifier: Apache-2.0
"""The embedded summarisation task: a post of 24 letters, and a digest of its frequent letters.

    prompt      gaccgaacgakgcacgaagacgha:
    response    agc

A post repeats a few letters, some more often than others. A good digest names each frequent letter
once. `rewards.graders.digest_reward` defines this exactly; training does not use it. Human digests
(`human_digest`) may be too long or too short, repeat letters, or have letters that the post lacks;
win rates compare with them. Posts are generated from their index, so there is no data file.

Invariant: `problem(index, split)` is the same text on every machine and in every release.
"""

import random

from tba_jax.tasks.task import Problem, Split, Task

LETTERS = "abcdefghijklmnop"
POST_CHARS = 24


def problem(index: int, split: Split) -> tuple[str, str]:
    """Return the post with this index in a split, and a human digest of it.

    Args:
        index: any integer >= 0, also beyond the task's sizes.
    """
    # Only the method `random` gives the same results in every version of Python.
    rng = random.Random(f"tldr_toy 0 {split} {index}")
    # Four to seven letters, each less frequent than the previous letter.
    letters = sorted(LETTERS, key=lambda _: rng.random())[: 4 + int(4 * rng.random())]
    weights = [0.65**i for i in range(len(letters))]
    post = "".join(_choose(letters, weights, rng) for _ in range(POST_CHARS))
    return post, _human_digest(post, rng)


def _human_digest(post: str, rng: random.Random) -> str:
    """Return a human digest: two to seven letters, mostly of the post and without repeats."""
    digest = ""
    for _ in range(2 + int(6 * rng.random())):
        kind = rng.random()
        fresh = [letter for letter in post if letter not in digest]
        pool = LETTERS if kind < 0.1 else post if kind < 0.25 or not fresh else fresh
        digest += pool[int(len(pool) * rng.random())]
    return digest


def _choose(letters: list[str], weights: list[float], rng: random.Random) -> str:
    left = sum(weights) * rng.random()
    for letter, weight in zip(letters, weights, strict=True):
        left -= weight
        if left < 0:
            return letter
    return letters[-1]


class TLDRToy(Task):
    """The `tldr_toy` task; the column `answer` is a human digest.

    The config names a reward model (`reward.model_path`). The metric is the share of held-out
    prompts whose response the gold reward prefers to the human digest.
    """

    name = "tldr_toy"
    metric = "win_rate"
    response_kinds = ("unrepeated", "repeated")
    makes_problems = True
    sizes = {"train": 2**16, "eval": 1024}

    def problem(self, split: Split, index: int) -> Problem:
        post, digest = problem(index, split)
        return f"{post}:", {"answer": digest}

    def response_kind(self, text: str) -> str:
        return "unrepeated" if len(set(text)) == len(text) else "repeated"
