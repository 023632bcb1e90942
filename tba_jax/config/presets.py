# SPDX-License-Identifier: Apache-2.0
"""Values of `--config`: a preset of the package (`math`, `math:gsm8k`) or a Python file.

A value without a folder and without `.py` names a preset of the package (`tba_jax/presets/*.py`),
whatever the current directory contains. Every other value is the path of a file. A file defines
`PRESETS`: name of a preset -> the settings that differ from the defaults, by dotted names or by
section. The first preset is the default.
"""

import difflib
import os
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tba_jax.config.schema import Config, make_config
from tba_jax.report.files import flat
from tba_jax.settings import ConfigError

FOLDER = Path(__file__).parents[1] / "presets"


def names() -> list[str]:
    """Return FILE:PRESET for every preset of the package."""
    files = sorted(FOLDER.glob("[a-z]*.py"))
    return [f"{path.stem}:{preset}" for path in files for preset in _presets(path)]


def load(name: str) -> Config:
    """Return the config of a preset or file, without command-line settings; not validated.

    Raises:
        ConfigError: unknown name, or the file has no presets.
    """
    path, preset = path_of(name)
    presets = _presets(path)
    preset = preset or next(iter(presets))
    if preset not in presets:
        known = ", ".join(presets)
        raise ConfigError(
            f"{path.stem} has no preset {preset!r}; it has {known}{_near(preset, presets)}"
        )
    return make_config(flat(presets[preset]) | {"name": f"{path.stem}/{preset}"})


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


def _presets(path: Path) -> dict[str, Any]:
    try:
        found = runpy.run_path(str(path)).get("PRESETS")
    except Exception as error:  # the code of a user's file may raise anything
        raise ConfigError(f"{path}: {type(error).__name__}: {error}. Correct the file") from error
    if not found or not isinstance(found, dict):
        raise ConfigError(
            f"{path} defines no PRESETS. Define for example PRESETS = {{'a': {{'num_steps': 9}}}}"
        )
    return found


def _near(name: str, known: Iterable[str]) -> str:
    """Return a hint with a similar name for the end of an error; "" without one."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
