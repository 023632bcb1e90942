# SPDX-License-Identifier: Apache-2.0
"""Problems whose every response is known: what is exact about them, and who ends at the target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.settings import Schedule
from tba_jax.studies import exact, exact_report, exact_runs_report, named
from tba_jax.studies.enumerated import (
    STRINGS,
    Measures,
    measure,
    sparse,
    stops,
    token_logprobs,
    token_logprobs_of,
    token_mask,
)
from tba_jax.studies.enumerated_data import (
    Condition,
    Drawn,
    Settings,
    draw,
    is_repeat,
    nothing_kept,
    replayed_groups,
    replayed_responses,
    stored,
)
from tba_jax.studies.enumerated_runs import Batches
from tba_jax.studies.sweeps import STUDIES

# ml_collections loads config files through a deprecated function of importlib.


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


def test_every_name_is_settings_of_an_objective_and_valid_arguments_of_the_main_command():
    for name in named.OBJECTIVES:
        settings = named.settings_of(name, 0.1)
        assert settings.beta.shape == "constant"
        fields = named.OBJECTIVES[name].items()
        given = [f"--config.objective.{field}={value}" for field, value in fields]
        config = override(None, ["--config=math", *given])
        validate(config)
        assert config.objective.name == settings.name and config.objective.own == settings.own
    assert named.settings_of("rloo, beta 0", 0.1).beta == Schedule(0.0)
    assert named.settings_of("rloo", 0.1).beta == Schedule(0.1)
    assert named.settings_of("topr", 0.1).built.value("anchor") == "none"
    assert named.settings_of("grpo", 0.1).beta == Schedule(0.04)
    for study in STUDIES.values():
        assert set(study.names) <= set(named.OBJECTIVES)
        for label in study.cases:
            assert study.condition(label).beta >= 0
            assert study.settings(study.names[0], label).num_steps == study.num_steps


def test_strings_are_drawn_as_likely_as_they_are():
    table = np.random.default_rng(0).normal(size=(1, 85, 4)).astype(np.float32)
    mu = {"table": jnp.asarray(table)}
    expected = np.exp(np.asarray(token_logprobs(mu, jnp.arange(1)).sum(-1)))[0]
    reference = jnp.full((1, 256, 4), -jnp.log(4.0))
    settings = Settings(prompts=2, group=20_000)

    def drawn(sampler):
        condition = Condition(0.1, 0.1, sampler)
        version = jnp.int32(7)
        return draw(mu, reference, settings, condition, version, jax.random.key(1))

    found = drawn(0)
    shares = np.bincount(np.asarray(found.strings).ravel(), minlength=256) / 40_000
    # Four deviations of a share of 40,000, and the least of those of none.
    assert (np.abs(shares - expected) < 4 * np.sqrt(expected / 40_000) + 1e-4).all()
    np.testing.assert_allclose(np.exp(found.behavior.sum(-1)), expected[found.strings], rtol=1e-4)
    assert (
        found.prompts.tolist() == [0, 0]
        and (found.version == 7).all()
        and found.version.shape == (2, 20_000)
    )
    uniform = np.bincount(np.asarray(drawn(1).strings).ravel(), minlength=256) / 40_000
    assert np.abs(uniform - 1 / 256).max() < 4 * np.sqrt(1 / 256 / 40_000)
    some = token_logprobs_of(mu, jnp.arange(1), jnp.zeros(2, int), found.strings[:, :5])
    np.testing.assert_allclose(some, found.behavior[:, :5], rtol=1e-5)


def test_replayed_groups_come_whole_from_the_steps_before():
    def groups(first, shape):
        prompts = first + np.arange(np.prod(shape)).reshape(shape)
        strings = prompts[..., None] * 10 + np.arange(3)
        behavior = np.repeat(strings[..., None], 4, -1).astype(np.float32)
        return Drawn(*map(jnp.asarray, (prompts, strings, behavior, strings // 40)))

    history, new = groups(0, (5, 4)), groups(100, (4,))
    found = replayed_groups(new, history, 0.0, jnp.int32(3), jax.random.key(0))
    assert all(0 <= p < 12 for p in found.prompts.tolist())  # of the three steps before
    expected = np.asarray(found.prompts)[:, None] * 10 + np.arange(3)
    np.testing.assert_array_equal(found.strings, expected)
    np.testing.assert_array_equal(found.behavior[..., 0], found.strings)
    np.testing.assert_array_equal(found.version, found.strings // 40)
    for recency, step in ((1.0, 3), (0.0, 0)):  # all new, and nothing to replay yet
        same = replayed_groups(new, history, recency, jnp.int32(step), jax.random.key(0))
        np.testing.assert_array_equal(same.prompts, new.prompts)


def test_strings_that_differ_are_taken_first():
    assert is_repeat(jnp.array([[3, 1, 3, 1, 2]])).tolist() == [[False, False, True, True, False]]
    mu = {"table": jnp.zeros((1, 85, 4)).at[:, :, 0].set(3.0)}  # .87 a token, one string in two
    reference = jnp.zeros((1, 256, 4))

    def share(samples):
        settings = Settings(prompts=200, group=8, samples=samples)
        found = draw(mu, reference, settings, Condition(0.1, 0.1), jnp.int32(0), jax.random.key(2))
        assert found.strings.shape == (200, 8)
        expected = token_logprobs(mu, jnp.arange(1))[0][found.strings]
        np.testing.assert_allclose(found.behavior, expected, rtol=1e-6)
        return float(1 - is_repeat(found.strings).mean())

    assert share(0) == share(8) < share(16) < share(64) == 1.0


def test_stored_responses_are_replayed_by_reward_and_the_oldest_are_lost():
    settings = Settings(prompts=1, group=4, replay="responses")
    reward = jnp.zeros((1, 256)).at[0, 5].set(1.0)

    def group(strings, i):
        strings = jnp.array([strings])
        behavior = jnp.broadcast_to(strings[..., None] + 1000.0 * i, (1, 4, 4))
        return Drawn(jnp.zeros(1, int), strings, behavior, jnp.full((1, 4), 10 * i))

    store = nothing_kept(settings, 1)
    for i, strings in enumerate([[5, 6, 7, 8], [9, 9, 9, 6], [20, 21, 22, 23]]):
        store = stored(store, group(strings, i), jnp.int32(i))
    new = group([1, 2, 3, 4], 3)

    def replayed(seed, **fields):
        condition = Condition(0.1, 0.1)._replace(recency=0.0, **fields)
        return replayed_responses(new, store, reward, condition, jax.random.key(seed))

    found = replayed(0)
    of = dict(zip(found.strings[0].tolist(), found.version[0].tolist(), strict=True))
    versions = {5: 0, 6: 10, 7: 0, 8: 0, 9: 10, 20: 20, 21: 20, 22: 20, 23: 20}
    assert len(of) == 4 and of.items() <= versions.items()
    steps = found.version[0] // 10
    np.testing.assert_array_equal(found.behavior[0, :, 0], found.strings[0] + 1000 * steps)
    # The newest six lack what step 0 alone drew; of two all are taken, and again in turn.
    kept = [set(replayed(seed, capacity=6).strings[0].tolist()) for seed in range(8)]
    assert set().union(*kept) == {6, 9, 20, 21, 22, 23}
    two = sorted(replayed(0, capacity=2).strings[0].tolist())
    assert two[0] == two[1] < two[2] == two[3] and set(two) < {20, 21, 22, 23}
    # One in nine by chance at the first place of four; nearly always by its reward.
    assert all(5 in replayed(s, inverse_temperature=9.0).strings[0] for s in range(8))
    assert not all(5 in replayed(s).strings[0] for s in range(8))
    # New where it is wanted, and where nothing is stored.
    empty = nothing_kept(settings, 1)
    for kept, recency in ((store, 1.0), (empty, 0.0)):
        condition = Condition(0.1, 0.1)._replace(recency=recency)
        same = replayed_responses(new, kept, reward, condition, jax.random.key(0))
        np.testing.assert_array_equal(same.strings, new.strings)


def test_a_response_ends_at_its_end():
    problem = stops()
    assert (problem.reward.sum(1) == 3).all() and not (
        problem.reward[:, (STRINGS > 0).all(1)]
    ).any()
    problem = problem._replace(reward=problem.reward[:1], width=0)
    start = {"table": jnp.zeros((1, 85, 4)), "z": jnp.zeros(1), "end": jnp.zeros(())}
    of = {tuple(x): i for i, x in enumerate(STRINGS.tolist())}
    logprobs = token_logprobs(start, jnp.arange(1))[0]
    np.testing.assert_allclose(logprobs[of[2, 0, 0, 0]], np.log([0.25, 0.25, 1, 1]), rtol=1e-6)
    assert logprobs[of[2, 0, 1, 0]].sum() < -1e8  # what comes after an end cannot be
    np.testing.assert_allclose(np.exp(logprobs.sum(-1)).sum(), 1.0, rtol=1e-5)
    strings = jnp.array([[of[2, 0, 0, 0], of[1, 2, 3, 1], of[1, 2, 3, 0], of[0, 0, 0, 0]]])
    np.testing.assert_array_equal(
        token_logprobs_of(start, jnp.arange(1), jnp.zeros(1, int), strings)[0],
        logprobs[strings[0]],
    )
    for mask_eos, lengths in ((False, [2, 4, 4, 1]), (True, [1, 4, 3, 0])):
        mask = token_mask(problem, strings, mask_eos=mask_eos)
        assert mask.sum(-1).tolist() == [lengths]
    found = measure(start, start, problem, 0.05)
    np.testing.assert_allclose(found.success, 1 / 16 + 1 / 64 + 1 / 256, rtol=1e-5)
    # 1/4 of one token, 3/16 of two, and 9/16 of three and more, 9/64 of three.
    np.testing.assert_allclose(
        found.length, 0.25 + 2 * 3 / 16 + 3 * 9 / 64 + 4 * 27 / 64, rtol=1e-5
    )
    np.testing.assert_allclose(found.unended, (3 / 4) ** 4, rtol=1e-5)
    assert np.isnan(measure({"table": start["table"], "z": 0}, start, sparse(), 0.1).length)


def test_runs_are_compared_where_they_are_as_often_right():
    success = np.array([[0.2, 0.4, 0.8, 0.6], [0.6, 0.7, 0.8, 0.9], [0.1, 0.2, 0.3, 0.4]])
    values = np.array([[8.0, 6.0, 2.0, 1.0], [5.0, 4.0, 3.0, 2.0], [7.0, 7.0, 7.0, 7.0]])
    found = exact_runs_report.at_success(values, success, 0.5)
    # A quarter of the way from .4 to .8; reached at the first evaluation; never.
    np.testing.assert_allclose(found, [5.0, 5.0, np.nan])
    assert exact_runs_report.first_at(success, 0.5).tolist() == [2, 0, np.inf]


def test_the_table_of_data_is_at_the_rate_that_is_right_soonest():
    study = STUDIES["searchers"]
    curve = np.array([[0.0, 0.1, 0.2, 0.2], [0.0, 0.2, 0.6, 0.6], [0.0, 0.0, 0.0, 1.0]])
    success = np.repeat(curve[:, None], 4, axis=1)
    one = row("1", np.zeros((3, 4)), success=success, found=10 * success)
    assert exact_runs_report.soonest(one) == 1  # and not the one that ends best
    text = exact_runs_report.table("searchers", study, [one])
    # Evaluations are 50 steps apart: 10 % and the first string at the second, 50 % at the third.
    assert "| 0.600 ± 0.000 | 0.350 ± 0.000 | 100 | 150 | 100 |" in text and "| 0.1 | 1 |" in text


def row(case, ends, **fields):
    success = np.array(ends, float)[..., None] * np.array([0.5, 1.0])
    measures = Measures(**{name: fields.get(name, success) for name in Measures._fields})
    batches = Batches(**{name: fields.get(name, success) for name in Batches._fields})
    return exact_report.Row("tb", case, measures, 1.0, batches)


ENDS = [[0.2, 0.2, 0.2, 0.2], [0.8, 0.8, 0.6, 0.4], [0.1] * 4, [0.1] * 4]


def test_tables_choose_the_rate_on_other_seeds_and_count_collapses():
    study = STUDIES["staleness"]
    rows = [row(lag, ENDS) for lag in study.cases]
    for one in rows:
        one.measures.success[1, 3] = [0.9, 0.1]  # it fell
    text = exact_report.table("staleness", study, rows)
    assert "| 0.350 ± " in text and "(0.003)" in text
    # Of the two seeds of the test at the chosen rate one fell, of all sixteen runs one.
    assert "| +0.000 ± 0.000 | 50% | 6% |" in text
    # At rate 0.003 the second half is 0.6 and 0.1: deviation 0.354.
    assert "| tb | 32 | 0.350 ± 1.578 | 0.354 |" in text


def test_every_study_has_a_table_and_a_figure_and_continues(tmp_path, monkeypatch, capsys):
    asked = []

    def rows(study, name, labels, num_seeds):
        for label in labels:
            asked.append((name, label))
            measures = row(
                label, np.random.default_rng(0).uniform(size=(len(study.rates), 4))
            ).measures
            measures.entropy[0, 0, 0] = np.nan
            yield exact_report.Row(name, label, measures, 2.0, Batches(*measures[:3]))

    monkeypatch.setattr(exact, "rows", rows)
    for name, study in STUDIES.items():
        first = study.names[0]
        command = [name, "--seeds=4", f"--out={tmp_path}", f"--only={first}"]
        for _ in range(2):
            assert exact.main(command) == 0
        assert asked == [(first, label) for label in study.cases], "the second time from the log"
        asked.clear()
        text = (tmp_path / f"{name}.md").read_text()
        assert first in text and (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert exact.main(["optimum", "--only=nope", f"--out={tmp_path}"]) == 2
    assert exact.main(["optimum", "--seeds=1", f"--out={tmp_path}"]) == 2
    assert "--seeds=1: need at least 2" in capsys.readouterr().err


@pytest.mark.slow
def test_trajectory_balance_ends_at_the_target_from_uniform_data_and_a_policy_gradient_does_not():
    study = STUDIES["optimum"]
    found = {name: next(exact.rows(study, name, ["uniform"], 1)) for name in ("tb", "dr_grpo")}
    ends = {name: row.measures.target_kl[:, 0, -1].min() for name, row in found.items()}
    assert ends["tb"] < 1e-3 and ends["dr_grpo"] > 0.1
    assert found["tb"].measures.target_kl[0, 0, 0] > 0.1
    assert jax.config.jax_enable_x64 is False
