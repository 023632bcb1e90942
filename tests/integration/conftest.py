# SPDX-License-Identifier: Apache-2.0
from tests.serving.served_model import model  # noqa: F401
