# SPDX-License-Identifier: Apache-2.0
"""The gold reward of the embedded summarisation task, in place of human judgement.

Training data has noisy comparisons based on it; evaluation uses it directly. Invariant: the best
digest of a post names once each letter that occurs at least twice.
"""

from tba_jax.rewards.numeric import each

# In a post of 24 letters, a letter that occurs once has the share 1/24, one that occurs twice 2/24.
# The cost lies between these shares.
CHARACTER_COST = 0.06


@each
def gold_reward(prompt: str, response: str) -> float:
    """Return the share of the post's letters in the digest, minus a cost per character.

    The prompt is a post and a colon; the response is a digest.
    """
    post, named = prompt.removesuffix(":"), set(response)
    share = sum(letter in named for letter in post) / len(post)
    return share - CHARACTER_COST * len(response)
