# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint belongs to: the run that made it, and what that run was made of.

Names are digests: of the model's weights, the tokenizer's files, the data, the source of
reward and objective.
Whoever continues a run compares them; what changed meanwhile would change its results without a
word. Invariant: a checkpoint of another run is not continued, and what changed is named.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import google_crc32c

from tba_jax.config.command_line import versions
from tba_jax.config.schema import Config
from tba_jax.models.hf import folders, hf_weights
from tba_jax.rewards.functions import split_functions
from tba_jax.run.errors import UserError
from tba_jax.run.host_state import CheckpointError, Facts
from tba_jax.settings import GIVEN, is_in_a_file, source_of
from tba_jax.storage import sealed
from tba_jax.tasks.mixture import data_sets
from tba_jax.tasks.registry import Task

KINDS = ("data", "model", "objective", "reward", "tokenizer")
"""What --accept_changed may name."""

_SAMPLED_PROBLEMS = 512  # evenly spaced in each split; data made by a program has no file to digest


def fingerprints(config: Config, task: Task, model_folder: Path) -> dict[str, str]:
    """Return a digest for each of KINDS, from the files of this machine.

    Args:
        config: of the run.
        task: its task.
        model_folder: folder of the start model and its tokenizer.

    Raises:
        ValueError: one of them cannot be read.
    """
    return {
        "data": _digest(_data(config, task)),
        "model": hf_weights.fingerprint(model_folder),
        "objective": _digest(_objective(config)),
        "reward": _digest(_reward(config, task)),
        "tokenizer": _digest(
            _file(model_folder / name)
            for name in hf_weights.TOKENIZER_FILES
            if (model_folder / name).is_file()
        ),
    }


def check(step: int, saved: Facts, now: Facts, accepted: Collection[str]) -> list[str]:
    """Check whether a checkpoint may be continued.

    Args:
        step: step of the checkpoint.
        saved: facts in the checkpoint.
        now: facts of this process.
        accepted: kinds of KINDS that may have changed.

    Returns:
        A line for each change that is accepted.

    Raises:
        CheckpointError: the checkpoint is of another run.
        UserError: a kind changed that is not accepted.
    """
    for name, before, after in (
        ("run", saved.run_id, now.run_id),
        ("seed", saved.seed, now.seed),
    ):
        if before != after:
            raise CheckpointError(
                f"checkpoint {step} is of {name} {before}, and the work directory is of {name} "
                f"{after}: it was copied in. Move it away, or put back the config.json that it "
                "came with"
            )
    # Old checkpoints have no fingerprint of the objective.
    then = {"objective": now.fingerprints["objective"], **saved.fingerprints}
    changed = [kind for kind in KINDS if then[kind] != now.fingerprints[kind]]
    refused = [kind for kind in changed if kind not in accepted]
    if refused:
        raise UserError(
            f"{' and '.join(refused)} changed since checkpoint {step} was written ("
            + "; ".join(
                f"{kind}: {then[kind]} then, {now.fingerprints[kind]} now" for kind in refused
            )
            + "). Put back what the run began with, or go on with what is there now: "
            + " ".join(f"--accept_changed={kind}" for kind in refused)
        )
    return [f"{kind} changed since checkpoint {step} was written; accepted" for kind in changed]


def _data(config: Config, task: Task) -> Iterator[str]:
    """Yield digests of the data files, and some of the problems."""
    paths = [path for path, _ in data_sets(config.task.data_path)]
    for source in (Path(path).expanduser() for path in (*paths, config.task.start_path)):
        if not str(source) or source == Path():
            continue
        files = sorted(source.glob("*")) if source.is_dir() else [source]
        yield from (_file(file) for file in files if file.is_file())
    for size, problem in (
        (task.train_size(), task.train_problem),
        (task.eval_size(), task.eval_problem),
    ):
        yield str(size)
        for index in range(0, size, max(1, size // _SAMPLED_PROBLEMS)):
            yield json.dumps(problem(index), sort_keys=True, default=str)


def _objective(config: Config) -> Iterator[str]:
    """Yield the source of an objective in a user's file; nothing for built-in objectives."""
    if config.objective.name in GIVEN:
        yield source_of(config.objective.name)
    elif is_in_a_file(config.objective.name):
        yield _file(Path(config.objective.name.rpartition(":")[0]).expanduser())


def _reward(config: Config, task: Task) -> Iterator[str]:
    """Yield the source of user-defined functions and environments, and digests of model weights."""
    own = Path(__file__).parents[1]
    environment = [config.task.environment] if config.task.environment else []
    for name in (config.task.reward or task.reward, config.eval.gold_reward, *environment):
        if ":" not in name:
            yield name  # a kind, or none
            continue
        for function in split_functions(name):
            module = function.rpartition(":")[0]
            source = _source(module)
            yield function
            if function in GIVEN:
                yield source_of(function)
            if source is not None and own not in source.parents:
                yield _file(source)
    for path in (config.reward.model_path, config.eval.gold_model, config.victim.path):
        if path:
            yield hf_weights.fingerprint(folders.resolve(path))


def _source(module: str) -> Path | None:
    """Return the file of a module; None where it is not found (loading it reports that)."""
    if module.endswith(".py"):
        path = Path(module).expanduser().absolute()
        return path if path.is_file() else None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _file(path: Path) -> str:
    """Return name, size and CRC-32C of a file."""
    size, value = 0, 0
    try:
        with open(path, "rb") as file:
            while piece := file.read(2**22):
                size += len(piece)
                value = google_crc32c.extend(value, piece)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    return f"{path.name} {size} {value:08x}"


def _digest(parts: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode(errors="surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


def run_id_of(workdir: str | os.PathLike[str]) -> str:
    """Return the run ID in the config.json of a work directory; "" without one."""
    try:
        return str(sealed.read(Path(workdir) / "config.json").get("run_id", ""))
    except (OSError, ValueError):
        return ""  # parts of a run that were built without a claimed directory


def code_name() -> str:
    """Return the version of the package, and a digest of its source files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"tba_jax {versions()['tba_jax']} {digest.hexdigest()[:12]}"
