# SPDX-License-Identifier: Apache-2.0
"""What one train step is given: Batch, padded, or PackedBatch, several sequences to a row.

Both are pytrees. Invariant: the group axis (the K responses of one prompt) is never folded into
another axis.
"""

from typing import Any, NamedTuple, TypeAlias

# A batch is packed as numpy and becomes jax arrays on its way into the train step.
HostOrDeviceArray: TypeAlias = Any


class Batch(NamedTuple):
    """A padded batch of p prompts with K responses each; host arrays, also a pytree.

    Rows are laid out as [prompt, left-padded to a bucket | response, right-padded to a bucket], so
    the response of every row begins at the same position s - t.

    Attributes:
        tokens: int32 [p k s].
        prompt_lengths: int32 [p k], tokens of the prompt without padding.
        response_lengths: int32 [p k], tokens of the response, end-of-sequence included.
        rewards: float32 [p k].
        reference_logprob: float32 [p k], summed; nan where the trainer scores it.
        behavior_token_logprobs: float32 [p k t], 0 at padding.
        versions: int32 [p k], `version_min` of each trajectory; -1 where it was drawn at another
            temperature than the policy's, so that no version's log-probs are its behaviour's.
        is_action: bool [p k t], as in `Trajectory`; None: every response token is an action.
    """

    tokens: HostOrDeviceArray
    prompt_lengths: HostOrDeviceArray
    response_lengths: HostOrDeviceArray
    rewards: HostOrDeviceArray
    reference_logprob: HostOrDeviceArray
    behavior_token_logprobs: HostOrDeviceArray
    versions: HostOrDeviceArray
    is_action: HostOrDeviceArray | None = None


class PackedBatch(NamedTuple):
    """The same p prompts with K responses each, in rows that hold several sequences.

    A sequence is a prompt and one of its responses. Sequence i * K + j + 1 is response j to prompt
    i; sequences lie side by side in a row, whole, and padding (sequence 0) is behind them.

    Attributes:
        tokens: int32 [n s].
        segments: int32 [n s], the sequence of each position.
        positions: int32 [n s], position in the sequence.
        behavior_token_logprobs: float32 [n s], 0 at prompts and padding.
        prompt_lengths: int32 [p k], tokens of the prompt.
        response_lengths: int32 [p k], tokens of the response, end-of-sequence included.
        rewards: float32 [p k].
        reference_logprob: float32 [p k], summed; nan where the trainer scores it.
        versions: int32 [p k], as in `Batch`.
        is_action: bool [n s], False at prompts and padding; None: every response token is one.
    """

    tokens: HostOrDeviceArray
    segments: HostOrDeviceArray
    positions: HostOrDeviceArray
    behavior_token_logprobs: HostOrDeviceArray
    prompt_lengths: HostOrDeviceArray
    response_lengths: HostOrDeviceArray
    rewards: HostOrDeviceArray
    reference_logprob: HostOrDeviceArray
    versions: HostOrDeviceArray
    is_action: HostOrDeviceArray | None = None
