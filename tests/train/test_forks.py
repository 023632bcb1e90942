# SPDX-License-Identifier: Apache-2.0
"""An episode that forks is one response: each sampled token counts once, over all of its paths."""

from dataclasses import replace

import numpy as np
import pytest
from fake_batches import CONFIG, SCORING, gradient_of, lay_out, make_draws
from fake_models import random_params, scored_tokens

from tba_jax.replay.records import Packer

# Of each episode: its paths, and the tokens that the policy sampled. The second path of (2, 5)
# begins with three tokens that repeat the first path.
FORKS = {
    (0, 1): ((2, 5), (1, 1, 0, 0, 0, 1, 1)),
    (1, 0): ((3, 1, 2), (0, 1, 1, 1, 0, 1)),
    (1, 2): ((), (1, 0, 1, 1)),
}
LAYOUTS = [
    {"micro_batch_rows": 2},
    {"shares_prompts": True},
    {"row_length": 16, "shares_prompts": True},
]


def forked_draws():
    """Two prompts with three responses each, of which two fork."""
    draws, rng = make_draws(p=2, k=3, t=7), np.random.default_rng(3)
    for (i, j), (lengths, marks) in FORKS.items():
        is_sampled = np.array(marks, bool)
        rows = list(draws[i].trajectories)
        rows[j] = replace(
            rows[j],
            response_tokens=rng.integers(3, CONFIG.vocab_size, len(marks)).astype(np.int32),
            behavior_token_logprobs=np.where(is_sampled, -2, 0).astype(np.float32),
            reference_token_logprobs=np.full(len(marks), -2, np.float32),
            is_sampled=is_sampled,
            path_lengths=lengths,
        )
        draws[i] = draws[i]._replace(trajectories=tuple(rows))
    return draws


def alone(params, prompt, y):
    """log pi of the sampled tokens of the paths, each path alone in a row; their sum."""
    total = 0.0
    for path in y.paths:
        tokens = y.response_tokens[path]
        found = scored_tokens(CONFIG, params, prompt.tokens, tokens, SCORING, multiple=16)
        is_sampled = np.ones(len(tokens)) if y.is_sampled is None else y.is_sampled[path]
        total += found @ is_sampled
    return total


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_episode_has_the_sum_of_its_paths_in_every_layout(layout):
    draws, params = forked_draws(), random_params(CONFIG)
    batch = lay_out(draws, **layout)
    _, outputs = gradient_of(batch)
    wanted = [[alone(params, d.prompt, y) for y in d.trajectories] for d in draws]
    # Float32, in rows of other lengths.
    np.testing.assert_allclose(outputs["sums"]["policy"], wanted, atol=1e-5)


def test_a_forked_episode_comes_back_from_its_bytes():
    packer = Packer()
    trajectories = [y for draw in forked_draws() for y in draw.trajectories]
    packed = [packer.pack(y) for y in trajectories]
    again = [Packer(packer.table).unpack(x) for x in packed]
    for y, z in zip(trajectories, again, strict=True):
        assert (y.path_lengths, y.paths) == (z.path_lengths, z.paths)
        np.testing.assert_array_equal(y.response_tokens, z.response_tokens)
        if y.is_sampled is not None:
            np.testing.assert_array_equal(y.is_sampled, z.is_sampled)
    one, other = trajectories[1], replace(trajectories[1], path_lengths=(3, 4))
    assert packer.pack(one) != packer.pack(other)
