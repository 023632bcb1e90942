# SPDX-License-Identifier: Apache-2.0
"""Chat formats: what the library of tool calls raises is one kind of error."""

import types

import numpy as np
import pytest

from tba_jax.environments.chat import RendererFormat


def test_a_response_that_the_library_cannot_read_is_a_value_error():
    def parse_response(tokens, **options):
        raise KeyError("name")

    chat = object.__new__(RendererFormat)
    chat._renderer = types.SimpleNamespace(parse_response=parse_response)
    tokens = np.array([3, 4], np.int32)
    with pytest.raises(ValueError, match="cannot read a response: KeyError: 'name'"):
        chat.calls(tokens, tokens, [])
