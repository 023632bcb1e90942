# SPDX-License-Identifier: Apache-2.0
"""Problems whose every response is known: what is exact about them, and who ends at the target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.studies import exact, exact_report, sweeps
from tba_jax.studies.problems import STRINGS, Measures, token_logprobs, token_logprobs_of
from tba_jax.studies.sweeps import STUDIES
from tba_jax.studies.training import Settings, draw


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


def test_strings_are_drawn_as_likely_as_they_are():
    table = np.random.default_rng(0).normal(size=(1, 85, 4)).astype(np.float32)
    mu = {"table": jnp.asarray(table)}
    expected = np.exp(np.asarray(token_logprobs(mu, jnp.arange(1)).sum(-1)))[0]
    reference = jnp.full((1, 256, 4), -jnp.log(4.0))
    settings = Settings(prompts=2, group=20_000)

    found = draw(mu, reference, settings, 0, jnp.int32(7), jax.random.key(1))
    shares = np.bincount(np.asarray(found.strings).ravel(), minlength=256) / 40_000
    # Four deviations of a share of 40,000, and the least of those of none.
    assert (np.abs(shares - expected) < 4 * np.sqrt(expected / 40_000) + 1e-4).all()
    np.testing.assert_allclose(np.exp(found.behavior.sum(-1)), expected[found.strings], rtol=1e-4)
    assert found.prompts.tolist() == [0, 0] and (found.version == 7).all()
    some = token_logprobs_of(mu, jnp.arange(1), jnp.zeros(2, int), found.strings[:, :5])
    np.testing.assert_allclose(some, found.behavior[:, :5], rtol=1e-5)


def test_a_study_has_a_table_and_a_figure(tmp_path, monkeypatch):
    def rows(study, name, num_seeds):
        for label in study.cases:
            ends = np.random.default_rng(0).uniform(size=(len(study.rates), num_seeds, 1))
            measures = Measures(*(ends * np.array([0.5, 1.0]) for _ in Measures._fields))
            measures.entropy[0, 0, 0] = np.nan
            yield exact_report.Row(name, label, measures, 2.0)

    monkeypatch.setattr(exact, "rows", rows)
    study, first = STUDIES["optimum"], STUDIES["optimum"].names[0]
    assert exact.main(["optimum", "--seeds=4", f"--out={tmp_path}", f"--only={first}"]) == 0
    text = (tmp_path / "optimum.md").read_text()
    assert all(f"| {first} | {label} | " in text for label in study.cases)
    assert (tmp_path / "optimum.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_trajectory_balance_ends_at_the_target_from_uniform_data_and_a_policy_gradient_does_not():
    study = STUDIES["optimum"]
    found = {name: next(exact.rows(study, name, 1)) for name in ("tb", "dr_grpo")}
    assert found["tb"].case == "uniform"
    ends = {name: row.measures.target_kl[:, 0, -1].min() for name, row in found.items()}
    assert ends["tb"] < 1e-3 and ends["dr_grpo"] > 0.1
    assert found["tb"].measures.target_kl[0, 0, 0] > 0.1
    assert jax.config.jax_enable_x64 is False


def test_every_name_is_settings_of_an_objective_and_valid_arguments_of_the_main_command():
    for name, fields in sweeps.OBJECTIVES.items():
        settings = sweeps.settings_of(name, 0.1)
        given = [f"--config.objective.{field}={value}" for field, value in fields.items()]
        config = override(None, ["--config=math", *given])
        validate(config)
        assert config.objective.name == settings.name and config.objective.own == settings.own
    for study in STUDIES.values():
        assert set(study.names) <= set(sweeps.OBJECTIVES)
        for label in study.cases:
            assert study.settings(study.names[0], label).num_steps == study.num_steps
