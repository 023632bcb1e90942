# SPDX-License-Identifier: Apache-2.0
"""Input of a train step: Batch with padded rows, or PackedBatch with several sequences per row.

Both are pytrees. A distinct response is in one row, once, and its weight is its number of draws.
Invariant: the group axis (the K slots of one prompt) is never folded into another axis.
"""

from typing import Any, NamedTuple, TypeAlias

# A batch is packed as numpy and becomes jax arrays on its way into the train step.
HostOrDeviceArray: TypeAlias = Any


OF_GROUPS = (
    "prompt_lengths",
    "response_lengths",
    "rewards",
    "reference_logprob",
    "versions",
    "weights",
)
"""Fields of a batch with one entry per prompt or slot. The other fields have one per row."""


class Batch(NamedTuple):
    """Up to K distinct responses to each of p prompts, in padded rows of a prompt and c responses.

    Entry [i, j] of an array [p k] belongs to response j to prompt i, which has slot i * K + j + 1
    in the batch of all hosts. Entries after the distinct responses to a prompt are 0. The layout
    of a row is [prompt, left-padded to a bucket | c responses, each right-padded to a bucket], so
    the first response of every row begins at position s - c t. With c > 1, a row has one copy of
    its prompt and up to c responses to it. The order of rows has no meaning.

    Attributes:
        tokens: int32 [n s].
        slots: int32 [n c], the slot of each response; 0 for a missing response. A row without a
            first response is padding.
        behavior_token_logprobs: float32 [n c t], 0 at padding.
        prompt_lengths: int32 [p k], number of tokens of the prompt without padding.
        response_lengths: int32 [p k], number of tokens of the response with end-of-sequence.
        rewards: float32 [p k].
        reference_logprob: float32 [p k], log-prob of the response under the reference; nan where
            the trainer computes it.
        versions: int32 [p k], `version_min` of each trajectory; -1 where the sampling temperature
            is not the policy's, so that the behaviour log-probs are those of no policy version.
        weights: float32 [p k], number of draws of each response; their sum for a prompt is K.
        is_sampled: bool [n c t], as in `Trajectory`; None: every response token is sampled.
        prompts: int32 [q x], the prompts alone, left-padded to a bucket; then empty rows, so that
            the devices divide q. None unless a learned log Z reads the prompts.
        token_advantages: float32 [n c t], as in `Trajectory`, 0 at padding; None unless the
            objective reads advantages of tokens.
        path_lengths: int32 [n c], number of tokens of the path in each row; the paths of an episode
            share one batch slot. None: no episode forks, and `response_lengths` has these numbers.
        places: int32 [n c t], index of each token within its episode; 0 at padding. None: no
            episode forks.
    """

    tokens: HostOrDeviceArray
    slots: HostOrDeviceArray
    behavior_token_logprobs: HostOrDeviceArray
    prompt_lengths: HostOrDeviceArray
    response_lengths: HostOrDeviceArray
    rewards: HostOrDeviceArray
    reference_logprob: HostOrDeviceArray
    versions: HostOrDeviceArray
    weights: HostOrDeviceArray
    is_sampled: HostOrDeviceArray | None = None
    prompts: HostOrDeviceArray | None = None
    token_advantages: HostOrDeviceArray | None = None
    path_lengths: HostOrDeviceArray | None = None
    places: HostOrDeviceArray | None = None


class PackedBatch(NamedTuple):
    """The data of a `Batch` in rows of several sequences: a prompt, then one or more responses.

    A row has whole sequences one after the other, then padding (slot 0). A prompt begins at
    position 0, and the responses to it follow up to the next prompt.

    Attributes:
        tokens: int32 [n s].
        slots: int32 [n s], the slot of the response at each position; at a prompt, the slot of the
            response that follows it.
        positions: int32 [n s], position in the sequence; a response begins at the prompt's length.
        behavior_token_logprobs: float32 [n s], 0 at prompts and padding.
        prompt_lengths, response_lengths, rewards, reference_logprob, versions, weights: [p k], as
            in `Batch`.
        is_sampled: bool [n s], False at prompts and padding; None: every response token is sampled.
        token_advantages: float32 [n s], 0 at prompts and padding; None as in `Batch`.
        paths: int32 [n s], index of each token's path within its episode. A prompt has the index of
            the response that follows it. None: no episode forks.
        places: int32 [n s], as in `Batch`; 0 at prompts and padding.
        prompts: as in `Batch`.
        contexts: int32 [n s], for positions of a prompt and of the responses to it, the number of
            that prompt in the row, from 1; 0 at padding. None: every response has its own prompt.
    """

    tokens: HostOrDeviceArray
    slots: HostOrDeviceArray
    positions: HostOrDeviceArray
    behavior_token_logprobs: HostOrDeviceArray
    prompt_lengths: HostOrDeviceArray
    response_lengths: HostOrDeviceArray
    rewards: HostOrDeviceArray
    reference_logprob: HostOrDeviceArray
    versions: HostOrDeviceArray
    weights: HostOrDeviceArray
    is_sampled: HostOrDeviceArray | None = None
    prompts: HostOrDeviceArray | None = None
    token_advantages: HostOrDeviceArray | None = None
    contexts: HostOrDeviceArray | None = None
    paths: HostOrDeviceArray | None = None
    places: HostOrDeviceArray | None = None
