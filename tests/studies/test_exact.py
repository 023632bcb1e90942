# SPDX-License-Identifier: Apache-2.0
"""Problems whose every response is known: what is exact about them, and who ends at the target."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.studies import exact, exact_report, named, objectives
from tba_jax.studies.enumerated import (
    STRINGS,
    Look,
    Problem,
    few_modes,
    look,
    sums,
    token_logprobs,
    token_logprobs_of,
)
from tba_jax.studies.enumerated_runs import Condition, Drawn, Settings, _draw, _replayed
from tba_jax.studies.sweeps import STUDIES

# ml_collections loads config files through a deprecated function of importlib.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


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


def test_every_name_is_settings_of_an_objective_and_valid_arguments_of_the_main_command():
    for name in named.OBJECTIVES:
        settings = named.settings_of(name, 0.1)
        assert settings.beta == settings.beta_final
        given = [f"--config.{override}" for override in named.overrides_of(name)]
        config = override(None, ["--config=math", *given])
        validate(config)
        assert config.objective.name == settings.name and config.objective.anchor == settings.anchor
    assert named.settings_of("rloo, beta 0", 0.1).beta == 0.0
    assert named.settings_of("rloo", 0.1).beta == 0.1
    assert named.settings_of("oapl", 0.1).anchor == "behavior"
    assert named.settings_of("flowrl", 0.1).beta == 1 / 15
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
        return _draw(mu, reference, settings, condition, version, jax.random.key(1))

    found = drawn(0)
    shares = np.bincount(np.asarray(found.strings).ravel(), minlength=256) / 40_000
    # Four deviations of a share of 40,000, and the least of those of none.
    assert (np.abs(shares - expected) < 4 * np.sqrt(expected / 40_000) + 1e-4).all()
    np.testing.assert_allclose(np.exp(found.behavior.sum(-1)), expected[found.strings], rtol=1e-4)
    assert found.prompts.tolist() == [0, 0] and found.version.tolist() == [7, 7]
    uniform = np.bincount(np.asarray(drawn(1).strings).ravel(), minlength=256) / 40_000
    assert np.abs(uniform - 1 / 256).max() < 4 * np.sqrt(1 / 256 / 40_000)
    some = token_logprobs_of(mu, jnp.arange(1), jnp.zeros(2, int), found.strings[:, :5])
    np.testing.assert_allclose(some, found.behavior[:, :5], rtol=1e-5)


def test_replayed_groups_come_whole_from_the_steps_before():
    def groups(first, shape):
        prompts = first + np.arange(np.prod(shape)).reshape(shape)
        strings = prompts[..., None] * 10 + np.arange(3)
        behavior = np.repeat(strings[..., None], 4, -1).astype(np.float32)
        return Drawn(*map(jnp.asarray, (prompts, strings, behavior, prompts // 4)))

    history, new = groups(0, (5, 4)), groups(100, (4,))
    found = _replayed(new, history, 0.0, jnp.int32(3), jax.random.key(0))
    assert all(0 <= p < 12 for p in found.prompts.tolist())  # of the three steps before
    expected = np.asarray(found.prompts)[:, None] * 10 + np.arange(3)
    np.testing.assert_array_equal(found.strings, expected)
    np.testing.assert_array_equal(found.behavior[..., 0], found.strings)
    np.testing.assert_array_equal(found.version, found.prompts // 4)
    for recency, step in ((1.0, 3), (0.0, 0)):  # all new, and nothing to replay yet
        same = _replayed(new, history, recency, jnp.int32(step), jax.random.key(0))
        np.testing.assert_array_equal(same.prompts, new.prompts)


def row(case, ends, **fields):
    success = np.array(ends, float)[..., None] * np.array([0.5, 1.0])
    looks = Look(**{name: fields.get(name, success) for name in Look._fields})
    return exact_report.Row("tb", case, looks, 1.0)


ENDS = [[0.2, 0.2, 0.2, 0.2], [0.8, 0.8, 0.6, 0.4], [0.1] * 4, [0.1] * 4]


def test_tables_choose_the_rate_on_other_seeds_and_count_collapses():
    study = STUDIES["staleness"]
    rows = [row(lag, ENDS) for lag in study.cases]
    for one in rows:
        one.looks.success[1, 3] = [0.9, 0.1]  # it fell
    text = exact_report.table("staleness", study, rows)
    assert "| 0.350 ± " in text and "(0.003)" in text
    # Of the two seeds of the test at the chosen rate one fell, of all sixteen runs one.
    assert "| +0.000 ± 0.000 | 50% | 6% |" in text
    # At rate 0.003 the second half is 0.6 and 0.1: deviation 0.354.
    assert "| tb | 32 | 0.350 ± 1.578 | 0.354 |" in text


def test_the_rate_of_a_distance_is_that_of_the_least():
    study = STUDIES["optimum"]
    distance = np.array([[0.4, 0.4, 0.5, 0.7], [0.3, 0.3, 0.001, 0.002]])[..., None]
    ends = exact_report.end_of(
        row("uniform", ENDS[:2], target_kl=distance), study.rates, "target_kl"
    )
    assert ends.rate == 0.1 and ends.target_kl.tolist() == [0.001, 0.002]


def test_slopes_are_of_each_seed():
    study = STUDIES["staleness"]
    # Of the seeds of the test one falls by 0.1 in eight steps and 0.3 in 24, the other stays.
    ends = [
        exact_report.end_of(row(lag, [[0.9, 0.9, a, 0.8]]), (1.0,))
        for lag, a in zip(study.cases, (0.6, 0.5, 0.2), strict=True)
    ]
    np.testing.assert_allclose(exact_report.slopes(ends, (0, 8, 32)), [-0.125, 0.0], atol=1e-12)


def test_every_study_has_a_table_and_a_figure_and_continues(tmp_path, monkeypatch, capsys):
    asked = []

    def rows(study, name, labels, num_seeds):
        for label in labels:
            asked.append((name, label))
            looks = row(label, np.random.default_rng(0).uniform(size=(len(study.rates), 4))).looks
            looks.entropy[0, 0, 0] = np.nan
            yield exact_report.Row(name, label, looks, 2.0)

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
    assert "--seeds=1: want 2" in capsys.readouterr().err


METRICS = [
    {"step": 0, "time_s": 4.0, "eval/pass_at_1": 0.4},
    *(
        {
            "step": step,
            "buffer/staleness_histogram": [[0, 200], [1, 56]],
            "buffer/num_trajectories": 300 * step,
        }
        for step in (1, 2)
    ),
    {"step": 2, "time_s": 9.5, "eval/pass_at_1": 0.96},
    {"step": 3, "buffer/staleness_histogram": [[0, 256]], "buffer/num_trajectories": 800},
    {"step": 3, "time_s": 12.0, "eval/pass_at_1": 0.9},
]


def test_points_of_a_run_count_what_was_trained_and_drawn():
    points = list(objectives.points_of(METRICS))
    assert [tuple(p) for p in points] == [
        (0, 0.4, 4.0, 0, 0),
        (2, 0.96, 9.5, 512, 600),
        (3, 0.9, 12.0, 768, 800),
    ]
    assert objectives.reached(points) == points[1]
    assert objectives.reached(points[:1]) is None


def test_learning_curves_of_the_main_job_are_recorded_once(tmp_path, monkeypatch):
    asked = []

    def run_variant(folder, overrides, seed, config):
        asked.append((overrides, seed))
        if seed == 1 and "objective.name=ppo" in overrides:
            raise RuntimeError("exited with 1: it broke")
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in METRICS))
        return {"time_to_first_step_s": 5.0, "staleness": {"mean": 1.0}}

    monkeypatch.setattr(objectives, "run_variant", run_variant)
    command = ["--only=tb;ppo", "--seeds=2", f"--out={tmp_path}"]
    for _ in range(2):
        assert objectives.main(command) == 0
    assert [seed for _, seed in asked] == [0, 0, 1, 1]
    text = (tmp_path / "objectives.md").read_text()
    assert "| tb | 2 | 40.0 % | 90.0 % (90.0) | 2 of 2 | 2 | 10 | 512 | 600 | 5.0 |" in text
    # A failed run counts as later than all others: the median of one is beyond them.
    assert "| ppo | 2 (1 failed) | 40.0 % | 90.0 % (90.0) | 1 of 2 | – | – |" in text
    assert (tmp_path / "objectives.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "runs" / "tb-seed0").exists()


@pytest.mark.slow
def test_trajectory_balance_ends_at_the_target_from_uniform_data_and_a_policy_gradient_does_not():
    study = STUDIES["optimum"]
    found = {name: next(exact.rows(study, name, ["uniform"], 1)) for name in ("tb", "dr_grpo")}
    ends = {name: row.looks.target_kl[:, 0, -1].min() for name, row in found.items()}
    assert ends["tb"] < 1e-3 and ends["dr_grpo"] > 0.1
    assert found["tb"].looks.target_kl[0, 0, 0] > 0.1
    assert jax.config.jax_enable_x64 is False
