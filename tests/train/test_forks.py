# SPDX-License-Identifier: Apache-2.0
"""An episode that forks is one response: each sampled token counts once, over all of its paths."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from fake_batches import CONFIG, SCORING, lay_out, make_draws
from fake_models import random_params

from tba_jax.flow.padding import Padding
from tba_jax.flow.records import Packer
from tba_jax.flow.trajectory import spans_of
from tba_jax.search.reference import Reference, make_reference_program
from tba_jax.train.rows import make_rows
from tba_jax.train.step_metrics import measured

BETA = 0.5
# Of each episode: its paths, and the tokens that the policy sampled. The second path of (2, 5)
# begins with three tokens that repeat the first path.
FORKS = {
    (0, 1): ((2, 5), (1, 1, 0, 0, 0, 1, 1)),
    (1, 0): ((3, 1, 2), (0, 1, 1, 1, 0, 1)),
    (1, 2): ((), (1, 0, 1, 1)),
}
LAYOUTS = [
    {},
    {"shares_prompts": True},
    {"row_length": 16},
    {"row_length": 16, "shares_prompts": True},
    {"micro_batch_rows": 2},
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
            is_sampled=is_sampled,
            path_lengths=lengths,
            version_max=4,
            version_spans=((1, 3), (4, len(marks) - 3)),
        )
        draws[i] = draws[i]._replace(trajectories=tuple(rows))
    return draws


def path_scores(params, prompt, y):
    """log pi of the sampled tokens of each path, each path alone in a row."""
    reference, found = Reference(make_reference_program(CONFIG, SCORING), params), []
    for path in y.paths:
        tokens = y.response_tokens[path]
        marks = np.ones(len(tokens), bool) if y.is_sampled is None else y.is_sampled[path]
        for place in range(len(tokens)):
            rows = Padding((4,), (7,), 0).rows(
                [prompt.tokens],
                np.pad(tokens, (0, 7 - len(tokens)))[None, None],
                np.array([[len(tokens)]], np.int32),
            )
            one = np.zeros((1, 1, 7), bool)
            one[0, 0, place] = marks[place]
            found.append(float(reference(*rows, one)[0, 0]))
    return np.array(found)


@pytest.fixture(scope="module")
def alone():
    """(draws, parameters, log-probs of each token of each response)."""
    draws, params = forked_draws(), random_params(CONFIG)
    scores = [[path_scores(params, d.prompt, y) for y in d.trajectories] for d in draws]
    return draws, params, scores


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_episode_has_the_sum_of_its_paths_in_every_layout(alone, layout):
    draws, params, scores = alone
    batch = jax.tree.map(np.asarray, lay_out(draws, **layout))
    rows = make_rows(batch, np.int32(0), CONFIG, SCORING, "none", None, None)
    policy = rows.score(params, rows.inputs)
    data = rows.group_data(policy, None, rows.tokens, rows.totals())
    residual = np.zeros((2, 3))
    for i, draw in enumerate(draws):
        for j, y in enumerate(draw.trajectories):
            own, n = scores[i][j], len(y.response_tokens)
            # Float32, in rows of other lengths.
            np.testing.assert_allclose(data.policy_logprob[i, j], own.sum(), atol=1e-5)
            np.testing.assert_allclose(data.policy_token_logprobs[i, j, :n], own, atol=1e-5)
            np.testing.assert_array_equal(
                data.mask[i, j, :n], True if y.is_sampled is None else y.is_sampled
            )
            np.testing.assert_array_equal(
                data.behavior_token_logprobs[i, j, :n], y.behavior_token_logprobs
            )
            assert not np.any(data.mask[i, j, n:])
            residual[i, j] = own.sum() - y.reference_logprob - y.reward / BETA
    found = measured(rows, policy, np.float32(BETA)).residual
    np.testing.assert_allclose(found, residual - residual.mean(axis=1, keepdims=True), atol=1e-4)


def test_a_forked_episode_comes_back_from_its_bytes():
    packer = Packer()
    trajectories = [y for draw in forked_draws() for y in draw.trajectories]
    packed = [packer.pack(y) for y in trajectories]
    again = [Packer(packer.table).unpack(x) for x in packed]
    for y, z in zip(trajectories, again, strict=True):
        assert (y.path_lengths, y.paths) == (z.path_lengths, z.paths)
        assert y.version_spans == z.version_spans == spans_of(z.token_versions, z.version_max)
        np.testing.assert_array_equal(y.response_tokens, z.response_tokens)
        if y.is_sampled is not None:
            np.testing.assert_array_equal(y.is_sampled, z.is_sampled)
    one, other = trajectories[1], replace(trajectories[1], path_lengths=(3, 4))
    assert packer.pack(one) != packer.pack(other)
