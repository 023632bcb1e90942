# SPDX-License-Identifier: Apache-2.0
"""Model folders: their location, and the contents of config.json.

A model may be a path, a hub ID, or come with the package. This module reads no weights.
"""

import json
import os
from pathlib import Path
from typing import Any

EMBEDDED = "embedded:"  # prefix of the name of a model that comes with the package
ADAPTER_SETTINGS = "adapter_config.json"
_ASSETS = Path(__file__).parents[2] / "assets"


def load_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of config.json of a model folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: no config.json there. A model is a Hugging Face folder with config.json "
            "and *.safetensors; give the folder itself"
        )
    return read_json(path)


def resolve(path_or_hub_id: str | os.PathLike[str], *, with_weights: bool = True) -> Path:
    """Return the folder of a model: the path itself, or a snapshot of the hub repository.

    `embedded:NAME` is the model of that name that comes with the package.

    Args:
        path_or_hub_id: folder, hub ID or embedded:NAME.
        with_weights: whether to download the weights of a snapshot, too.

    Raises:
        ValueError: neither a folder nor a repository that can be downloaded or is cached.
    """
    if str(path_or_hub_id).startswith(EMBEDDED):
        return _embedded(str(path_or_hub_id).removeprefix(EMBEDDED))
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    # Imported here, because a run on a local folder does not need the package.
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.txt", "*.model", "*.jinja", *["*.safetensors"] * with_weights]
    name = str(path_or_hub_id)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"model {name!r} is not a folder. Give a folder with config.json and *.safetensors, or "
            f"the ID of a Hugging Face repository that can be fetched (this: {reason})"
        ) from error


def _embedded(name: str) -> Path:
    there = {path.parent.name: path.parent for path in _ASSETS.glob("*/config.json")}
    if name not in there:
        raise ValueError(
            f"no model {EMBEDDED}{name}; this package comes with "
            + ", ".join(EMBEDDED + x for x in sorted(there))
        )
    return there[name]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file of a model folder.

    Raises:
        ValueError: the file is damaged, or has no object.
    """
    try:
        contents = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"{path}: not valid JSON: {error}. Download the file again") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path}: holds no JSON object. Download the file again")
    return contents
