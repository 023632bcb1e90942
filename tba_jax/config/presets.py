# SPDX-License-Identifier: Apache-2.0
"""Values of `--config`: a preset of the package (`math`, `math:gsm8k`) or a Python file.

A value without a folder and without `.py` names a preset of the package (`tba_jax/presets/*.py`),
whatever the current directory contains. Every other value is the path of a file, which defines
`get_config(PRESET)` as usual with ml_collections.
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
        presets: name of a preset -> the settings that differ from the defaults, by dotted names.

    Raises:
        ConfigError: unknown preset.
    """
    if preset not in presets:
        known = ", ".join(presets)
        raise ConfigError(
            f"{file} has no preset {preset!r}; it has {known}{_near(preset, presets)}"
        )
    config = default_config()
    config.update_from_flattened_dict(presets[preset] | {"name": f"{file}/{preset}"})
    return config


def names() -> list[str]:
    """Return FILE:PRESET for every preset of the package."""
    files = sorted(FOLDER.glob("[a-z]*.py"))
    return [f"{x.stem}:{preset}" for x in files for preset in runpy.run_path(str(x))["PRESETS"]]


def load(name: str) -> Config:
    """Return the config of a preset or file, without command-line settings; not validated.

    Raises:
        ConfigError: unknown name, or the file has no usable `get_config`.
    """
    path, preset = path_of(name)
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        found = None if get_config is None else get_config(*([preset] if preset else []))
    except ConfigError:
        raise
    except Exception as error:  # the code of a user's file may raise anything
        raise ConfigError(f"{path}: {type(error).__name__}: {error}. Correct the file") from error
    if not isinstance(found, ConfigDict):
        raise ConfigError(
            f"{path} has no get_config(PRESET) that returns a ConfigDict. docs/presets.md has an "
            "example"
        )
    return freeze(found)


def path_of(name: str) -> tuple[Path, str]:
    """Return the file and the preset (or "") that the value of `--config` names.

    Raises:
        ConfigError: the value is neither a preset's name nor a file.
    """
    file, _, preset = name.partition(":")
    packaged = FOLDER / f"{file}.py"
    if file.isidentifier() and packaged.is_file():
        return packaged, preset
    if os.path.isfile(file):
        return Path(file), preset
    known = names()
    files = dict.fromkeys(name.split(":")[0] for name in known)
    near = _near(f"{Path(file).stem}:{preset}".rstrip(":"), [*files, *known])
    raise ConfigError(
        f"no config file {file!r} here ({os.getcwd()}) and no preset of that name; "
        f"there are {', '.join(known)}{near}"
    )


def _near(name: str, known: Iterable[str]) -> str:
    """Return a hint with a similar name for the end of an error; "" without one."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
