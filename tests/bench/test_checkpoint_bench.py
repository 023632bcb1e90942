# SPDX-License-Identifier: Apache-2.0
"""What digests add to a checkpoint, measured on a small one."""

import json

from tba_jax.bench import checkpoint


def test_both_halves_are_timed_and_shares_are_of_the_rest(capsys):
    assert checkpoint.main(["--gib=0.002", "--repeats=1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["num_bytes"] == 16 * 32 * 1024 * 4
    assert 0 < result["list_s"] < result["save_s"] and result["compare_s"] > 0
    rest = result["save_s"] - result["list_s"]
    assert abs(result["save_share"] * rest - result["list_s"]) < 1e-9
    assert abs(result["restore_share"] * result["restore_s"] - result["compare_s"]) < 1e-9


def test_a_size_that_cannot_be_measured_is_one_line(capsys):
    assert checkpoint.main(["--gib=0"]) == 1
    assert "got --gib=0.0; wanted above 0" in capsys.readouterr().err
