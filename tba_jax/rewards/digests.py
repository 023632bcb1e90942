# SPDX-License-Identifier: Apache-2.0
"""The gold reward of the embedded summarisation task: coverage against length.

It plays the human of preference tuning: whoever trains sees noisy comparisons made with it, and
evaluation asks it directly. This module imports only the standard library, because reward processes
import it. Invariant: the best digest of a post names each letter that occurs at least twice, once.
"""

from typing import Any

# Between the shares of a post of 24 letters that one letter (1/24) and two letters (2/24) have.
CHARACTER_COST = 0.06


def gold_score(post: str, digest: str) -> float:
    """Share of the post's letters that the digest names, less a cost for every character."""
    named = set(digest)
    return sum(letter in named for letter in post) / len(post) - CHARACTER_COST * len(digest)


def gold_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """`gold_score` of every response.

    Args:
        prompts: the post and a colon.
        completions: the digests.
        columns: not looked at.
    """
    return [
        gold_score(prompt.removesuffix(":"), digest)
        for prompt, digest in zip(prompts, completions, strict=True)
    ]
