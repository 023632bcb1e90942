# SPDX-License-Identifier: Apache-2.0
"""Preference tuning with a learned reward: TL;DR summaries.

    python -m tba_jax.main --config=configs/tldr.py[:PRESET]

The presets, and what each needs, costs and gives: tba_jax/presets/tldr.py. An installed package
knows them by name: --config=tldr[:PRESET]. A file of your own may change what get_config returns.
"""

import functools

from tba_jax.config import presets

get_config = functools.partial(presets.get_config, "tldr")
