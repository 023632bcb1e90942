# SPDX-License-Identifier: Apache-2.0
"""Problems whose every response is known: what is exact about them, and who ends at the target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.config.methods import METHODS
from tba_jax.studies import exact
from tba_jax.studies.enumerated import STRINGS, Look, Problem, few_modes, look, sums, token_logprobs
from tba_jax.train.objectives.registry import objective_names


def test_token_logprobs_are_those_of_a_table_walked_by_hand():
    table = np.random.default_rng(0).normal(size=(1, 85, 4)).astype(np.float32)
    got = token_logprobs({"table": jnp.asarray(table)}, jnp.arange(1))
    string = (2, 0, 3, 1)
    index = [tuple(x) for x in STRINGS].index(string)
    # Prefixes by length: 1, 4, 16, 64 of them; of one length in the order of their digits.
    places = [0, 1 + 2, 5 + 4 * 2 + 0, 21 + 16 * 2 + 4 * 0 + 3]
    expected = [
        table[0, place, token] - np.log(np.exp(table[0, place]).sum())
        for place, token in zip(places, string, strict=True)
    ]
    np.testing.assert_allclose(got[0, index], expected, rtol=1e-5)
    np.testing.assert_allclose(np.exp(got.sum(-1)).sum(), 1.0, rtol=1e-5)


def test_a_look_at_the_target_says_zero():
    problem = Problem(np.zeros((1, 256), np.float32))
    start = {"table": jnp.zeros((1, 85, 4)), "z": jnp.zeros(1)}
    found = look(start, start, problem, 0.1)
    np.testing.assert_allclose(found.target_kl, 0, atol=1e-6)
    np.testing.assert_allclose(found.entropy, np.log(256), rtol=1e-6)
    assert few_modes().reward.shape == (1, 256) and (sums().reward.sum(1) == 8).all()


def test_every_objective_of_the_studies_is_one():
    for name in exact.OBJECTIVES:
        assert name.split(",")[0] in {*METHODS, *objective_names()}
        exact.objective_of(name, 0.1)
    assert exact.objective_of("rloo, beta 0", 0.1)[1] == 0.0
    assert exact.objective_of("oapl", 0.1)[0].anchor == "behavior"


def test_tables_choose_the_rate_on_other_seeds_and_count_collapses():
    def row(lag, ends):
        success = np.array(ends, float)[..., None] * np.array([0.5, 1.0])
        success[1, 3] = [0.9, 0.1]  # it fell
        return exact.Row("tb", lag, Look(success, success, success, success), 1.0)

    ends = [[0.2, 0.2, 0.2, 0.2], [0.8, 0.8, 0.6, 0.4], [0.1] * 4, [0.1] * 4]
    text = exact.staleness_table([row(lag, ends) for lag in ("0", "8", "32")])
    assert "| 0.350 ± " in text and "(0.003)" in text and "| +0.000 ± 0.000 | 6% |" in text


@pytest.mark.slow
def test_trajectory_balance_ends_at_the_target_from_uniform_data_and_a_policy_gradient_does_not():
    found = {
        row.objective: row
        for row in exact.rows("optimum", ["tb", "dr_grpo"], [0])
        if row.data == "uniform"
    }
    ends = {name: row.looks.target_kl[:, 0, -1].min() for name, row in found.items()}
    assert ends["tb"] < 1e-3 and ends["dr_grpo"] > 0.1
    assert found["tb"].looks.target_kl[0, 0, 0] > 0.1
    assert jax.config.jax_enable_x64 is False
