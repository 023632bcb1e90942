# SPDX-License-Identifier: Apache-2.0
"""What a run that has no checkpoint says of the steps that were made before."""

import pytest

from tba_jax.run.build import steps_made


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        (b'{"step": 0, "eval/n": 4}\n', 0),
        (b'{"step": 1}\n' * 10_000 + b'{"step": 7, "train/loss": 1.0}\n{"step": 8, "tr', 7),
        (b'{"step": 3}\n{"step": "x"}\n{"step": {\n\xff\n', 3),
        (b"", 0),
    ],
)
def test_the_last_whole_line_says_how_far_a_run_came(tmp_path, content, steps):
    assert steps_made(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert steps_made(tmp_path) == steps
