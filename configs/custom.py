# SPDX-License-Identifier: Apache-2.0
"""Your own model, prompts and reward.

    python -m tba_jax.main --config=configs/custom.py[:PRESET]

The presets, and what each needs, costs and gives: tba_jax/presets/custom.py. An installed package
knows them by name: --config=custom[:PRESET]. A file of your own may change what get_config returns.
"""

from tba_jax.presets.custom import PRESETS as PRESETS
from tba_jax.presets.custom import get_config as get_config
