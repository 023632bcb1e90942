# SPDX-License-Identifier: Apache-2.0
"""Parsing that commands share: `--config=NAME[:PRESET]`, `--config.FIELD=VALUE`, folders, versions.

Invariant: every user error is a ConfigError of one line.
"""

import difflib
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from tba_jax.config import methods, presets
from tba_jax.config.schema import SETTINGS, Config, editable, freeze
from tba_jax.settings import ConfigError

# Names of the settings in other libraries.
_USUAL = {
    "optimizer.lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "lr": "optimizer.learning_rate",
    "batch_size": "batch.num_prompts",
    "search.max_tokens": "search.max_new_tokens",
    "search.temperature": "search.sampling_temperature",
    "objective.kl_coef": "objective.beta",
    "model.name": "model.path",
}
# Options of a config flag. The config is locked already, except for objectives' own settings.
OPEN: Mapping[str, Any] = {"lock_config": False, "accept_new_attributes": True}


def parse_flags(argv: Sequence[str], flag_values: flags.FlagValues) -> list[str]:
    """Parse flags with absl's parser; every user error is a ConfigError.

    Args:
        argv: program name and arguments, in which an objective's preset is expanded already.
        flag_values: flags, including a config flag named `config`.

    Returns:
        Program name and the arguments that are not flags.
    """
    _check_fields(argv)
    given = [
        f"--config={presets.path_of(text.removeprefix('--config='))}"
        if text.startswith("--config=")
        else text
        for text in argv
    ]
    try:
        return flag_values(given)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        # The parser of config files wraps a whole traceback; only its last exception is useful.
        message = re.split(r"\b\w*Error: ", " ".join(str(error).split()))[-1]
        raise ConfigError(message) from error


def override(config: Config | None, arguments: Sequence[str]) -> Config:
    """Return a config with `--config.FIELD=VALUE` arguments applied.

    Args:
        config: config to change; None: the preset or file of the argument `--config=`.
        arguments: only config flags.

    Raises:
        ConfigError: no such preset, file, field or value, or an argument that is no config flag.
    """
    arguments = methods.written_out(arguments)
    _check_fields(arguments)  # before defining the flags, which fails for unknown fields
    argv = ["", *arguments]
    flag_values = flags.FlagValues()
    if config is None:
        holder = config_flags.DEFINE_config_file(
            "config", flag_values=flag_values, sys_argv=argv, **OPEN
        )
    else:
        holder = config_flags.DEFINE_config_dict(
            "config", editable(config), flag_values=flag_values, sys_argv=argv, **OPEN
        )
    _, *strays = parse_flags(argv, flag_values)
    if strays:
        raise ConfigError(f"unexpected argument {strays[0]!r}; options begin with --")
    return freeze(holder.value)


def _check_fields(arguments: Sequence[str]) -> None:
    """Refuse `--config.FIELD` for unknown fields.

    Settings of any objective pass; `ObjectiveSettings.check` refuses those of other objectives.
    """
    problems = []
    for argument in arguments:
        field = argument.removeprefix("--config.").split("=")[0]
        if not argument.startswith("--config.") or field in SETTINGS:
            continue
        if field.startswith("objective."):
            continue
        near = [_USUAL[field]] if field in _USUAL else []
        near = near or difflib.get_close_matches(field, SETTINGS, n=3, cutoff=0.5)
        near = near or [f for f in SETTINGS if f.endswith(field.split(".")[-1])][:3]
        hint = f"did you mean {' or '.join(near)}?" if near else "main's --dry_run lists them all"
        problems.append(f"config has no field {field!r}; {hint}")
    if problems:
        raise ConfigError(*problems)


def local_folder(text: str | os.PathLike[str], what: str = "--workdir") -> Path:
    """Return a folder of the local file system from a command-line argument.

    Raises:
        ConfigError: `text` is an address such as gs://... As a path it would be a local folder
            named `gs:`, which would be lost with the machine.
    """
    if "://" in str(text):
        raise ConfigError(
            f"{what}={text} is an address; wanted a folder. Mount the bucket (gcsfuse) or a "
            "share (Filestore, NFS) and give its folder, e.g. /mnt/runs/NAME. "
            "docs/launch/tpu_vm.md explains it under Spot machines"
        )
    return Path(text)


def versions() -> dict[str, str]:
    """Return the versions of the packages that determine the results."""
    names = ("tba_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}
