# SPDX-License-Identifier: Apache-2.0
"""The one served model of these tests."""

import pytest
from served_model import ServedModel, folder_with_template


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = folder_with_template(tmp_path_factory.mktemp("model"))
    with ServedModel(folder).running() as found:
        yield found
