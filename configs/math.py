# SPDX-License-Identifier: Apache-2.0
"""Mathematical reasoning.

    python -m tba_jax.main --config=configs/math.py[:PRESET]

The presets, and what each needs, costs and gives: tba_jax/presets/math.py. An installed package
knows them by name: --config=math[:PRESET]. A file of your own may change what get_config returns.

Never put this folder on sys.path: this file would hide the standard library's `math`.
"""

import functools

from tba_jax.config import presets

get_config = functools.partial(presets.get_config, "math")
