# SPDX-License-Identifier: Apache-2.0
"""A wall clock that is wrong by TBA_OTHER_CLOCK_S seconds; `killer` puts it on the path."""

import os
import time

_now, _now_ns = time.time, time.time_ns
_shift = int(os.environ.get("TBA_OTHER_CLOCK_S", "0"))
time.time = lambda: _now() + _shift
time.time_ns = lambda: _now_ns() + _shift * 10**9
