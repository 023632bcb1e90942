# SPDX-License-Identifier: Apache-2.0
"""Shapes of the model of a planned run from its config.json, without weights.

The shapes of the models that the shipped presets name come with the package, so that a preset can
be planned without network. Other models need a local folder, or a hub ID that can be fetched.
"""

import json
from pathlib import Path
from typing import Any

from tba_jax.models.hf import folders


def config_of(path_or_hub_id: str) -> dict[str, Any]:
    """Return the contents of config.json of a model folder, a preset's model, or a hub ID.

    Raises:
        ValueError: the model cannot be found.
    """
    known = json.loads(Path(__file__).with_name("preset_models.json").read_text())
    if path_or_hub_id in known:
        return known[path_or_hub_id]
    return folders.load_config(folders.resolve(path_or_hub_id, with_weights=False))
