# SPDX-License-Identifier: Apache-2.0
"""Values of `--config`: a preset of the package (`math`, `math:gsm8k`) or a Python file.

A value without a folder and without `.py` names a preset of the package, whatever the current
directory contains. A file of `tba_jax/presets` has the settings that differ from the defaults, by
dotted names, for each preset. Every other value is the path of a file, which defines
`get_config(PRESET)` as usual with ml_collections.
"""

import difflib
import functools
import os
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tba_jax.config.schema import SETTINGS, Config, make_config
from tba_jax.report.files import flat
from tba_jax.settings import ConfigError

FOLDER = Path(__file__).parents[1] / "presets"


def get_config(file: str, preset: str = "") -> ConfigDict:
    """Return the default config with the settings of a preset of the package, to edit.

    Args:
        file: name of a file in `tba_jax/presets`.
        preset: name of a preset in it; "": the first.

    Raises:
        ConfigError: unknown preset.
    """
    presets = _presets(FOLDER / f"{file}.py")
    preset = preset or next(iter(presets))
    if preset not in presets:
        known = ", ".join(presets)
        raise ConfigError(f"{file} has no preset {preset!r}; it has {known}{near(preset, presets)}")
    sections = {name.rpartition(".")[0] for name in SETTINGS} - {""}
    config: Any = ConfigDict({section: {} for section in sections}, type_safe=False)
    config.update_from_flattened_dict({name: x.default for name, x in SETTINGS.items()})
    config.lock()
    config.objective.unlock()  # objectives have settings of their own
    config.update_from_flattened_dict(presets[preset] | {"name": f"{file}/{preset}"})
    return config


def names() -> list[str]:
    """Return FILE:PRESET for every preset of the package."""
    files = sorted(FOLDER.glob("[a-z]*.py"))
    return [f"{path.stem}:{preset}" for path in files for preset in _presets(path)]


def load(name: str) -> Config:
    """Return the config of a preset or file, without command-line settings; not validated.

    Raises:
        ConfigError: unknown name, or the file has no usable `get_config`.
    """
    path, preset = path_of(name)
    try:
        make: Any = functools.partial(get_config, path.stem)
        if path.parent != FOLDER:
            make = runpy.run_path(str(path)).get("get_config", lambda preset="": None)
        found = make(preset) if preset else make()
    except ConfigError:
        raise
    except Exception as error:  # the code of a user's file may raise anything
        raise ConfigError(f"{path}: {type(error).__name__}: {error}. Correct the file") from error
    if not isinstance(found, ConfigDict):
        raise ConfigError(
            f"{path} has no get_config(PRESET) that returns a ConfigDict. Define one that changes "
            "tba_jax.config.presets.get_config('math', 'gsm8k'), for example"
        )
    return make_config(flat(found.to_dict()))


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
    hint = near(f"{Path(file).stem}:{preset}".rstrip(":"), [*files, *known])
    raise ConfigError(
        f"no config file {file!r} here ({os.getcwd()}) and no preset of that name; "
        f"there are {', '.join(known)}{hint}"
    )


def _presets(path: Path) -> dict[str, Any]:
    return runpy.run_path(str(path))["PRESETS"]


def near(name: str, known: Iterable[str]) -> str:
    """Return a hint with a similar name for the end of an error; "" without one."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""
