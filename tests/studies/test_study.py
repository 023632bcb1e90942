# SPDX-License-Identifier: Apache-2.0
"""Studies: the statistics and the table; every study's overrides are valid configs."""

import numpy as np
import pytest
from fake_rounds import make_buffer, make_commit

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.evaluation.attacks import Finds
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.host_state import Facts, HostState
from tba_jax.studies import study
from tba_jax.studies.variants import STUDIES


def report(seed, before, after, wall=60.0):
    return {
        "seed": seed,
        "eval": {
            "before": {"metric": "pass_at_1", "pass_at_1": before},
            "after": {"metric": "pass_at_1", "pass_at_1": after, "n": 1024},
        },
        "wall_s": wall,
        "time_to_first_step_s": 8.0,
        "idle_s": {"trainer": 1.0, "searchers": [2.0, 3.0]},
        "staleness": {"mean": 1.5},
        "ledger": {"generated": 100},
    }


def test_paired_difference_is_students_interval():
    # differences 1, 2, 3: mean 2, sd 1; t(0.95, 2) = 2.919986 (table), half = t / sqrt(3)
    mean, half = study.paired_difference([11.0, 22.0, 33.0], [10.0, 20.0, 30.0])
    assert mean == pytest.approx(2.0)
    assert half == pytest.approx(2.919986 / np.sqrt(3), rel=1e-6)
    assert np.isnan(study.paired_difference([1.0], [0.0])[1])


def test_table_pairs_seeds_with_the_first_variant():
    results = {
        "sync": [report(0, 0.4, 0.8), report(1, 0.4, 0.9)],
        "async": [report(0, 0.4, 0.82), report(1, 0.4, 0.88)],
    }
    lines = study.table("drivers", results).splitlines()
    assert lines[2].startswith("| sync | 2 | 40.0 % | 85.0 % | +45.0 (+40.0) | – | 60.0 | 8.0 |")
    # per-seed differences +2 and -2: mean 0, sd 2 sqrt 2; t(0.95, 1) = 6.3138
    assert "+0.0 ± 12.6" in lines[3]
    assert "| 5.0 | 1.50 | 100 |" in lines[3]


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, v) for name, chosen in STUDIES.items() for v in chosen.variants],
)
def test_overrides_of_every_study_make_a_valid_config(name, variant):
    chosen = STUDIES[name]
    given = [f"--config.{each}" for each in chosen.variants[variant]]
    validate(override(None, [f"--config={chosen.config}", *given]))


def test_table_of_a_metric_that_is_no_share_has_no_percent():
    def reward(value):
        return {"metric": "reward_mean", "reward_mean": value, "n": 8}

    results = {
        "tb": [{**report(0, 0, 0), "eval": {"before": reward(-1.0), "after": reward(2.5)}}],
        "rloo": [{**report(0, 0, 0), "eval": {"before": reward(-1.0), "after": reward(2.25)}}],
    }
    lines = study.table("any", results).splitlines()
    assert "reward mean before" in lines[0]
    assert lines[2].startswith("| tb | 1 | -1.000 | 2.500 | +3.500 (+3.500) | –")
    assert "| -0.250 ± nan |" in lines[3]


def test_unknown_study_and_bad_seeds_are_refused(capsys):
    with pytest.raises(SystemExit):
        study.main(["nope"])
    assert "invalid choice: 'nope'" in capsys.readouterr().err
    assert study.main(["drivers", "--seeds=0"]) == 2
    assert study.main(["drivers", "--first_seed=-1"]) == 2
    assert "--first_seed=-1: want at least 0" in capsys.readouterr().err


def test_seeds_count_from_the_first_one(monkeypatch, tmp_path):
    seen = []

    def run_variant(folder, overrides, seed, config):
        seen.append((folder.name, seed))
        return report(seed, 0.4, 0.8)

    monkeypatch.setattr(study, "run_variant", run_variant)
    monkeypatch.setattr(study, "figure", lambda results, out: b"")
    assert study.main(["main_job", "--seeds=2", "--first_seed=3", f"--out={tmp_path}"]) == 0
    assert seen == [("async-seed3", 3), ("async-seed4", 4)]
    seen.clear()
    assert study.main(["drivers", "--seeds=1", "--only=async;sync", f"--out={tmp_path}"]) == 0
    assert seen == [("async-seed0", 0), ("sync-seed0", 0)]
    assert study.main(["drivers", "--only=nope", f"--out={tmp_path}"]) == 2


def test_shown_metrics_are_means_with_their_deviation():
    def of(*values):
        return [{"eval": {"after": {"edit_diversity": v, "success_rate": v}}} for v in values]

    # of 0.1, 0.5, 0.3: mean 0.3, standard deviation of a sample 0.2
    results = {"a": of(0.1, 0.5, 0.3), "b": of(None), "c": of(0.25)}
    lines = study.shown_table(["success_rate", "edit_diversity"], results).splitlines()
    assert lines[0] == "| variant | seeds | success rate | edit diversity |"
    assert lines[2] == "| a | 3 | 30.0 ± 20.0 % | 0.300 ± 0.200 |"
    assert lines[3] == "| b | 1 | – | – |"
    assert lines[4] == "| c | 1 | 25.0 % | 0.250 |"


def test_what_searchers_found_is_shown_as_counts():
    results = {"a": [{"eval": {"after": {}}}] * 2, "b": [{"eval": {"after": {}}}]}
    finds = {"a": [Finds(90, 10, 3), Finds(90, 14, 5)], "b": [Finds(80, 0, None)]}
    lines = study.shown_table([], results, finds).splitlines()
    assert lines[0] == "| variant | seeds | different successes found | first success, step |"
    assert lines[2] == "| a | 2 | 12 ± 3 | 4 ± 1 |"
    assert lines[3] == "| b | 1 | 0 | – |"


def test_headline_by_step_takes_the_steps_that_all_runs_have():
    def run(**values):
        return [{"step": int(k[1:]), "eval/success_rate": v} for k, v in values.items()]

    curves = {"a": [run(s0=0.0, s20=0.25, s40=0.5)], "b": [run(s0=0.0, s40=0.2)]}
    lines = study.steps_table("success_rate", curves).splitlines()
    assert lines[0] == "| success rate at step | 0 | 40 |"
    assert lines[2:] == ["| a | 0.0 % | 50.0 % |", "| b | 0.0 % | 20.0 % |"]


def test_finds_are_read_from_the_buffers_of_the_runs(tmp_path):
    buffer = make_buffer()
    buffer.merge([make_commit({1: [[5, 6], [7], [8, 9]]})], 0)
    checkpoints = Checkpoints(study.run_folder(tmp_path, "one, two", 3) / "checkpoints")
    state = HostState(Facts(seed=3, num_searchers=1), {"buffer": buffer.state()})
    checkpoints.save(1, {"x": np.zeros(2)}, state)
    checkpoints.close()
    found = study._finds({"one, two": [report(3, 0.1, 0.2)]}, tmp_path)
    # No response carries a toxicity, so none succeeds.
    assert found == {"one, two": [Finds(attacks=3, successes=0, first_version=None)]}
