# SPDX-License-Identifier: Apache-2.0
"""Parsing that commands share: `--config=NAME[:PRESET]`, `--config.FIELD=VALUE`, folders, versions.

Invariant: every user error is a ConfigError of one line.
"""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from tba_jax.config import methods, presets
from tba_jax.config.schema import Config
from tba_jax.settings import ConfigError


def override(config: Config | None, arguments: Sequence[str]) -> Config:
    """Return a config with `--config.FIELD=VALUE` arguments applied.

    Args:
        config: config to change; None: the preset or file of the argument `--config=`.
        arguments: only config flags; of a repeated one, the last counts.

    Raises:
        ConfigError: no such preset, file, field or value, or an argument that is no config flag.
    """
    fields: dict[str, str] = {}
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag == "--config" and equals and config is None:
            fields[""] = value
        elif not flag.startswith("--config.") or not equals:
            raise ConfigError(f"unexpected argument {argument!r}; wanted --config.FIELD=VALUE")
        else:
            fields[flag.removeprefix("--config.")] = value
    name = fields.pop("", "")
    return methods.replace(presets.load(name) if config is None else config, fields)


def local_folder(text: str | os.PathLike[str], what: str = "--workdir") -> Path:
    """Return a folder of the local file system from a command-line argument.

    Raises:
        ConfigError: `text` is an address such as gs://... As a path it would be a local folder
            named `gs:`, which would be lost with the machine.
    """
    if "://" in str(text):
        raise ConfigError(
            f"{what}={text} is an address; wanted a folder. Mount the bucket (gcsfuse) and give "
            "its folder, e.g. /mnt/runs/NAME (docs/launch/tpu_vm.md, Spot machines)"
        )
    return Path(text)


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine the results."""
    names = ("tba_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}
