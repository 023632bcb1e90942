# SPDX-License-Identifier: Apache-2.0
"""Policies that act in an environment, in episodes of several turns.

    python -m tba_jax.main --config=configs/agent.py[:PRESET]

The presets, and what each needs, costs and gives: tba_jax/presets/agent.py. An installed package
knows them by name: --config=agent[:PRESET]. A file of your own may change what get_config returns.
"""

import functools

from tba_jax.config import presets

get_config = functools.partial(presets.get_config, "agent")
