# SPDX-License-Identifier: Apache-2.0
"""The gold reward of the embedded summarisation task: coverage minus length.

It stands for the human in preference tuning: training data has noisy comparisons based on it, and
evaluation uses it directly. Reward processes import this module, so it imports only the standard
library. Invariant: the best digest of a post names each letter that occurs at least twice, once.
"""

from typing import Any

# Between the shares of a 24-letter post of a letter that occurs once (1/24) and twice (2/24).
CHARACTER_COST = 0.06


def gold_score(post: str, digest: str) -> float:
    """Return the share of the post's letters in the digest, minus a cost per character."""
    named = set(digest)
    return sum(letter in named for letter in post) / len(post) - CHARACTER_COST * len(digest)


def gold_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return `gold_score` of every response.

    Args:
        prompts: the post and a colon.
        completions: the digests.
        columns: not used.
    """
    return [
        gold_score(prompt.removesuffix(":"), digest)
        for prompt, digest in zip(prompts, completions, strict=True)
    ]
