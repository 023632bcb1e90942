# SPDX-License-Identifier: Apache-2.0
from served_model import model  # noqa: F401
