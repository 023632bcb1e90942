# SPDX-License-Identifier: Apache-2.0
"""The attack of `foreign_files`, on a few directories."""

import random

from tests.chaos.foreign_files import one


def test_commands_change_no_file_of_another_program(tmp_path):
    seen = sum(
        (one(tmp_path / str(i), random.Random(i)) for i in range(12)),
        start=one(tmp_path / "first", random.Random(99)),
    )
    assert seen["train accepted"] and seen["train refused"] and seen["report refused"]
