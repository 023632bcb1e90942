# SPDX-License-Identifier: Apache-2.0
"""A run that is suspended, loses its work directory to another process, and goes on."""

import numpy as np
import pytest

from tests.chaos.replaced import replace_once


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_process_that_lost_its_directory_leaves_no_line_in_it(cache, tmp_path):
    for number in range(2):
        replace_once(tmp_path / f"run{number}", cache, np.random.default_rng((2, number)))
