# SPDX-License-Identifier: Apache-2.0
"""Pairs of runs whose settings differ."""

import pytest

from tba_jax.bench import overrides
from tba_jax.bench.async_speedup import Figures


def test_the_order_alternates_and_a_ratio_compares_the_runs_of_one_seed(monkeypatch, capsys):
    ran = []
    steps = {"unchanged": iter([2.0, 4.0, 8.0]), "changed": iter([3.0, 4.0, 10.0])}

    def run(side, args, changed, num_steps, seed, workdir):
        assert changed == (["--config.a=1", "--config.b=x y"] if side == "changed" else [])
        ran.append((side[0], num_steps, seed))

    monkeypatch.setattr(overrides, "_run", run)
    monkeypatch.setattr(
        overrides,
        "read",
        lambda workdir, skip: Figures(next(steps[workdir.name[:-2]]), 1.0, 0.5, 1.0, 0.0),
    )
    flags = ["--changed=--config.a=1 '--config.b=x y'", "--seeds=3", "--num_steps=9", "--skip=4"]
    assert overrides.main(flags) == 0
    # The first run of each side fills the compilation cache.
    assert ran == [("u", 4, 0), ("c", 4, 0)] + [
        (side, 9, seed) for seed, sides in enumerate(["uc", "cu", "uc"]) for side in sides
    ]
    assert "changed / unchanged: 1.250 (seeds: 1.500, 1.000, 1.250)" in capsys.readouterr().out


def test_a_side_that_fails_is_one_error(capsys):
    flags = ["--changed=--config.num_step=1", "--seeds=1", "--num_steps=2", "--skip=1"]
    assert overrides.main([*flags, "--", "--config.seed=nonsense"]) == 1
    assert "overrides: unchanged, seed 0: exit code" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--seeds=0"], ["--skip=5", "--num_steps=5"]])
def test_wrong_counts_are_refused(flags, capsys):
    assert overrides.main(["--changed=", *flags]) == 1
    assert "wanted at least one seed, and steps after those" in capsys.readouterr().err
