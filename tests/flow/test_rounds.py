# SPDX-License-Identifier: Apache-2.0
"""What the logs keep of rounds."""

import json
import math
from unittest.mock import ANY

import pytest
from fake_rounds import make_report

from tba_jax.flow.rounds import RoundReport, summarise_rounds


def test_a_report_comes_back_from_a_flat_record():
    report = make_report(3, reward_mean=0.75, further={"reward_part_length": 0.5})
    record = json.loads(json.dumps(report.record()))
    assert record == {
        "start_s": 3.0,
        "end_s": 3.5,
        "decode_s": 0.25,
        "reward_s": 0.125,
        "reference_s": 0.125,
        "tokens": 4,
        "reward_mean": 0.75,
        "response_length_mean": 2.0,
        "unique_fraction": 1.0,
        "kind_share": 0.5,
        "cut_share": 0.0,
        "equal_rewards_share": 0.0,
        "reward_part_length": 0.5,
    }
    assert RoundReport.from_record(record) == report


def test_a_record_of_another_version_is_refused_by_the_field_it_lacks():
    record = make_report(0).record()
    del record["unique_fraction"], record["reward_s"]
    with pytest.raises(ValueError, match="saved round has no reward_s, unique_fraction: another"):
        RoundReport.from_record(record)


def test_search_metrics_are_means_over_rounds_and_leave_out_what_is_nan():
    assert summarise_rounds([]) == {}
    reports = [
        make_report(
            0, tokens=30, reward_mean=0.5, further={"reward_part_a": 1.0, "environment_s": 3.0}
        ),
        make_report(4, tokens=10, reward_mean=math.nan, further={"reward_part_a": 2.0}),
    ]
    assert summarise_rounds(reports) == {
        "search/rounds": 2.0,
        **dict.fromkeys(("search/decode_s", "search/reward_s", "search/reference_s"), ANY),
        "search/round_s": sum(times.end_s - times.start_s for _, times in reports),
        "search/tokens_per_s": 80.0,
        "search/reward_mean": 0.5,
        "search/response_length_mean": 2.0,
        "search/kind_share": 0.5,
        "search/cut_share": 0.0,
        "search/equal_rewards_share": 0.0,
        "search/unique_fraction": 1.0,
        "search/reward_part_a": 1.5,
        "search/environment_s": 3.0,
    }
