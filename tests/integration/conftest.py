# SPDX-License-Identifier: Apache-2.0
"""One compilation cache for all the processes of a test session."""

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")
