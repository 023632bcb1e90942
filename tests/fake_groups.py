# SPDX-License-Identifier: Apache-2.0
"""Groups as a searcher would return them, with made-up responses, and a buffer for them."""

import json

import numpy as np

from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Group, Prompt, Trajectory
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.records import from_snapshot


def make_buffer(seed=0, **changes):
    """A buffer of the default settings with these changes; it draws from the newest data never."""
    return ReplayBuffer(ReplaySettings(**{"recency_prob": 0.0, **changes}), seed)


def make_prompt(prompt_id):
    tokens = np.arange(1, 3 + prompt_id % 3, dtype=np.int32)
    return Prompt(prompt_id, f"prompt {prompt_id}", tokens, {"answer": str(prompt_id)})


def make_trajectory(prompt_id, tokens, *, reward=0.0, version=0, ticket=0, searcher=0, parts=None):
    tokens = np.array(tokens, np.int32)
    return Trajectory(
        prompt_id=prompt_id,
        response_tokens=tokens,
        reward=reward,
        reward_parts=parts or {},
        behavior_token_logprobs=-0.125 * tokens.astype(np.float32) - 0.1,
        version_min=version,
        version_max=version + 1,
        searcher=searcher,
        ticket=ticket,
        sampling_temperature=0.7,
        finish_reason="eos" if len(tokens) % 2 else "length",
    )


def make_groups(responses, *, ticket=0, version=0, searcher=0, rejected=None, rewards=None):
    """Groups of one merge.

    Args:
        responses: prompt id -> list of responses (token lists).
        rejected: prompt id -> {reason: count}.
        rewards: prompt id -> rewards in the order of the responses; default 0.
    """
    origin, found = {"version": version, "ticket": ticket, "searcher": searcher}, []
    for prompt_id, own in responses.items():
        values = (rewards or {}).get(prompt_id, [0.0] * len(own))
        trajectories = tuple(
            make_trajectory(prompt_id, tokens, reward=value, **origin)
            for tokens, value in zip(own, values, strict=True)
        )
        found.append(
            Group(make_prompt(prompt_id), trajectories, (rejected or {}).get(prompt_id, {}))
        )
    return found


def distinct_responses(count, start=0):
    """`count` different responses of two tokens."""
    return [[start + i, 7] for i in range(count)]


def assert_same_trajectory(a, b):
    for name in a.__slots__:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, name
            np.testing.assert_array_equal(left, right, err_msg=name)
        else:
            assert left == right and type(left) is type(right), name


def stored(buffer):
    """Sorted (prompt id, tokens) of everything stored, read from the snapshot."""
    prompts, packed, packer = from_snapshot(*buffer.state())
    return sorted(
        (prompt.prompt_id, tuple(packer.unpack(y).response_tokens.tolist()))
        for prompt, own in zip(prompts, packed, strict=True)
        for y in own
    )


def drawn(draws):
    """What identifies a batch; None if the buffer waits."""
    return draws and [(d.prompt.prompt_id, d.is_fresh, d.ids) for d in draws]


def prompts_of(draws):
    """Prompt ids of a batch."""
    return [d.prompt.prompt_id for d in draws]


def json_snapshot(buffer):
    """A snapshot, its description as a file gives it back."""
    arrays, meta = buffer.state()
    return PartState(arrays, json.loads(json.dumps(meta)))
