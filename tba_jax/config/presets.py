# SPDX-License-Identifier: Apache-2.0
"""Values of `--config`: a preset of the package (`math`, `math:gsm8k`) or a Python file.

A value without a folder and without `.py` names a preset of the package (`tba_jax/presets/*.py`),
whatever the current directory contains. Every other value is the path of a file.
"""

import difflib
import os
import runpy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tba_jax.config.schema import Config, default_config, freeze
from tba_jax.settings import ConfigError

FOLDER = Path(__file__).parents[1] / "presets"


def differing(file: str, presets: Mapping[str, Any], preset: str) -> ConfigDict:
    """Return the default config with the settings of one preset; `config.name` is FILE/PRESET.

    Args:
        presets: name of a preset -> its settings by section.

    Raises:
        ConfigError: unknown preset.
    """
    if preset not in presets:
        known = ", ".join(presets)
        raise ConfigError(
            f"{file} has no preset {preset!r}; it has {known}{_near(preset, presets)}"
        )
    config = default_config()
    config.name = f"{file}/{preset}"
    config.update(presets[preset])
    return config


def names() -> list[str]:
    """Return FILE:PRESET for every preset of the package."""
    return [
        f"{path.stem}:{preset}"
        for path in sorted(FOLDER.glob("[a-z]*.py"))
        for preset in runpy.run_path(str(path))["PRESETS"]
    ]


def load(name: str) -> Config:
    """Return the config of a preset or file, without command-line settings; not validated.

    Raises:
        ConfigError: unknown name, or the file has no `get_config`.
    """
    path, _, preset = path_of(name).partition(":")
    get_config = runpy.run_path(path).get("get_config")
    if get_config is None:
        raise ConfigError(f"{path} defines no get_config(PRESET). docs/presets.md has an example")
    return freeze(get_config(preset) if preset else get_config())


def path_of(name: str) -> str:
    """Return PATH.py[:PRESET] for the value of `--config`.

    Raises:
        ConfigError: the value is neither a preset's name nor a file.
    """
    file, colon, preset = name.partition(":")
    packaged = FOLDER / f"{file}.py"
    if file.isidentifier() and packaged.is_file():
        return f"{packaged}{colon}{preset}"
    if os.path.isfile(file):
        return name
    known = names()
    files = dict.fromkeys(name.split(":")[0] for name in known)
    near = _near(f"{Path(file).stem}{colon}{preset}", [*files, *known])
    raise ConfigError(
        f"no config file {file!r} here ({os.getcwd()}) and no preset of that name; "
        f"there are {', '.join(known)}{near}"
    )


def _near(name: str, known: Iterable[str]) -> str:
    """Return a hint with a similar name for the end of an error; "" without one."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
