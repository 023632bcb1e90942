# SPDX-License-Identifier: Apache-2.0
"""Automated red-teaming.

    python -m tba_jax.main --config=configs/redteam.py[:PRESET]

The presets, and what each needs, costs and gives: tba_jax/presets/redteam.py. An installed package
knows them by name: --config=redteam[:PRESET]. A file of your own may change what
get_config returns.
"""

import functools

from tba_jax.config import presets

get_config = functools.partial(presets.get_config, "redteam")
