# SPDX-License-Identifier: Apache-2.0
"""The state of a process of a run: states of its parts by name, and facts that identify the run.

This module serialises host states, refuses files of other versions, and converts a state to another
number of searchers. The facts have the ID of the run and digests of its inputs: weights, tokenizer,
data, reward, objective. A resumed run compares the digests, because a changed input would change
its results without an error.

Invariants: no file has pickled objects. A checkpoint of another run is refused, and the message
names the changed input (tests/run/test_identity.py).
"""

import dataclasses
import hashlib
import importlib.util
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import numpy as np

from tba_jax.config.command_line import versions
from tba_jax.config.schema import Config
from tba_jax.flow.rounds import pack_commits
from tba_jax.flow.state import PartState
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.outbox import Outbox
from tba_jax.rewards.functions import split_functions
from tba_jax.run.errors import CheckpointError, UserError
from tba_jax.settings import GIVEN, is_in_a_file, source_of
from tba_jax.storage import digests

if TYPE_CHECKING:
    from tba_jax.tasks.registry import Task

ITEMS_FILE = "_CHECKPOINT_METADATA"  # file of Orbax with the classes that wrote the items
# Names in the folder of a checkpoint.
CHECKPOINT_ENTRIES = frozenset(
    {"train_state", "host_state", ITEMS_FILE, "commit_success.txt", digests.NAME}
)

FORMAT = 6
"""1: all counters in one part `run`; 2: each part has its own; 3: tickets, repeats with counts;
4: digests of the inputs; 5: lost responses; 6: lengths of the logs."""

_FACTS_KEY, _META_KEY = "__facts__", "__meta__"

KINDS = ("data", "model", "objective", "reward", "tokenizer")
"""Values of --accept_changed: inputs that may have changed."""

_SAMPLED_PROBLEMS = 512  # evenly spaced in each split; data made by a program has no file to digest


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts that identify the run of a host state.

    Attributes:
        run_id: unique name of the run.
        fingerprints: digests of model, data and more, by kind (`host_state.KINDS`).
        step: step of the checkpoint; -1 in old checkpoints without this field.
        config: flat config of the run; {} in old checkpoints without this field.
    """

    seed: int
    num_searchers: int
    run_id: str = ""
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    format: int = FORMAT
    step: int = -1
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class HostState(NamedTuple):
    """All state of a process except the train state.

    Attributes:
        facts: the run that the state belongs to.
        parts: state of each part, by name: logs, buffer, outbox_I and searcher_I of each searcher
            I, trainer, clock, evaluations.
    """

    facts: Facts
    parts: Mapping[str, PartState]

    def named(self, prefix: str) -> dict[str, PartState]:
        """Return the parts whose names begin with a prefix."""
        return {name: part for name, part in self.parts.items() if name.startswith(prefix)}


def pack(state: HostState) -> bytes:
    """Return a host state as npz bytes: arrays as `part/key`, facts and metadata as JSON."""
    arrays = {
        f"{name}/{key}": np.asarray(value)
        for name, part in state.parts.items()
        for key, value in part.arrays.items()
    }
    entries = {
        _FACTS_KEY: dataclasses.asdict(state.facts),
        _META_KEY: {name: part.meta for name, part in state.parts.items()},
    }
    for key, value in entries.items():
        arrays[key] = np.frombuffer(json.dumps(value).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def read_facts(path: Path) -> Facts:
    """Return the facts of a host state file, without reading its arrays.

    Raises:
        CheckpointError: a format that this version does not know.
        ValueError, KeyError, OSError, zipfile.BadZipFile: when the bytes are not intact.
    """
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as entries:
        return _facts(entries)


def _facts(entries: Any) -> Facts:
    facts: dict[str, Any] = {"format": 1}  # format 1 has no such field
    if _FACTS_KEY in entries.files:
        facts = json.loads(entries[_FACTS_KEY].tobytes().decode())
    if facts["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint is of format {facts['format']} and this version of tba_jax reads "
            f"format {FORMAT}; continue the run with the version that config.json names"
        )
    facts.pop("num_processes", None)  # written by earlier versions
    return Facts(**facts)


def unpack(data: bytes) -> HostState:
    """Return the host state that `pack` converted to bytes.

    Raises:
        CheckpointError: a format that this version does not know.
        ValueError, KeyError, OSError, zipfile.BadZipFile: when the bytes are not intact.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as entries:
        facts = _facts(entries)
        metas = json.loads(entries[_META_KEY].tobytes().decode())
        arrays: dict[str, dict[str, np.ndarray]] = {name: {} for name in metas}
        for full_key in entries.files:
            if full_key not in (_FACTS_KEY, _META_KEY):
                name, key = full_key.split("/", 1)
                arrays[name][key] = entries[full_key]
        parts = {name: PartState(arrays[name], meta) for name, meta in metas.items()}
        return HostState(facts, parts)


class RunClock:
    """Running time of a run in seconds, summed over all processes that resumed it.

    Attributes:
        time_to_first_step_s: running time at the end of the first step; None before that.
    """

    def __init__(self, now: Callable[[], float], start: float) -> None:
        self._now = now
        self._start = start
        self.time_to_first_step_s: float | None = None

    def __call__(self) -> float:
        """Return the running time, without the time between an interruption and the resume."""
        return self._now() - self._start

    def set(self, elapsed_s: float) -> None:
        """Set the running time to that of another process of the run."""
        self._start = self._now() - elapsed_s

    def note_step(self) -> None:
        """Record the running time at the end of the first step."""
        if self.time_to_first_step_s is None:
            self.time_to_first_step_s = self()

    def state(self) -> PartState:
        """Return the running time, as the state of a part."""
        times = {"elapsed_s": self(), "time_to_first_step_s": self.time_to_first_step_s}
        return PartState({}, times)

    def restore(self, state: PartState) -> None:
        """Continue from the running time of earlier processes."""
        self._start -= state.meta["elapsed_s"]
        self.time_to_first_step_s = state.meta["time_to_first_step_s"]


def with_searchers(
    state: HostState, num_searchers: int, make_buffer: Callable[[], ReplayBuffer]
) -> HostState:
    """Return a state for another number of searchers.

    Unmerged rounds are merged first. Every searcher counts its rounds from the highest number so
    far, so that no random number is used twice. Prompt streams begin a new epoch.

    Args:
        make_buffer: returns an empty buffer with the run's settings.
    """
    outboxes = state.named("outbox_")
    buffer = state.parts["buffer"]
    waiting = []
    for saved in outboxes.values():
        outbox = Outbox(max_bytes=1)
        outbox.restore(saved)
        waiting += outbox.take()
    if waiting:
        merged = make_buffer()
        merged.restore(buffer)
        merged.merge(waiting, buffer.meta["step"])
        buffer = merged.state()
    next_round = max(_next_number(outbox.meta["position"]) for outbox in outboxes.values())
    parts = {
        name: part
        for name, part in state.parts.items()
        if not name.startswith(("outbox_", "searcher_"))
    }
    parts["buffer"] = buffer
    for searcher in range(num_searchers):
        arrays, meta = pack_commits([])
        position = {
            "next_round": next_round,
            "prompt_state": None,
            "ahead": [],
            # The ledger compares what the outboxes and the buffer have received.
            "num_generated": buffer.meta["counters"]["generated"] if searcher == 0 else 0,
            "num_lost": 0,
        }
        parts[f"outbox_{searcher}"] = PartState(arrays, {**meta, "position": position})
    parts |= _counters(state, num_searchers)
    facts = dataclasses.replace(state.facts, num_searchers=num_searchers)
    return HostState(facts, parts)


def _next_number(position: Mapping[str, Any]) -> int:
    """Return a round number higher than all rounds of a saved outbox."""
    return max([position["next_round"], *(number + 1 for number, _ in position["ahead"])])


def _counters(state: HostState, num_searchers: int) -> dict[str, PartState]:
    """Return the counters of the searchers; searcher 0 also counts tokens of removed searchers."""
    known = {name: part.meta for name, part in state.named("searcher_").items()}
    names = [f"searcher_{i}" for i in range(num_searchers)]
    lost = sum(meta["decoded_tokens"] for name, meta in known.items() if name not in names)
    found = {}
    for name in names:
        meta = known.get(name, {"decoded_tokens": 0, "idle_s": 0.0})
        tokens = meta["decoded_tokens"] + (lost if name == "searcher_0" else 0)
        found[name] = PartState({}, {**meta, "decoded_tokens": tokens})
    return found


def fingerprints(config: Config, task: "Task", model_folder: Path) -> dict[str, str]:
    """Return a digest for each of KINDS, from the files of this machine.

    Args:
        model_folder: folder of the start model and its tokenizer.

    Raises:
        ValueError: a file cannot be read.
    """
    from tba_jax.models.hf import hf_weights

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


def check_facts(step: int, saved: Facts, now: Facts, accepted: Collection[str]) -> list[str]:
    """Check whether a checkpoint may be continued.

    Args:
        accepted: names in KINDS of inputs that may have changed.

    Returns:
        A line for each change that is accepted.

    Raises:
        CheckpointError: the checkpoint is of another run.
        UserError: an input changed that is not in `accepted`.
    """
    for name, before, after in (
        ("run", saved.run_id, now.run_id),
        ("seed", saved.seed, now.seed),
    ):
        if before != after:
            raise CheckpointError(
                f"checkpoint {step} is of {name} {before}, but the work directory is of {name} "
                f"{after}: the checkpoint was copied there. Move it away, or restore the "
                "config.json of its run"
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
            + "). Restore the files of the start of the run, or continue with the changed files: "
            + " ".join(f"--accept_changed={kind}" for kind in refused)
        )
    return [f"{kind} changed since checkpoint {step} was written; accepted" for kind in changed]


def _data(config: Config, task: "Task") -> Iterator[str]:
    """Yield digests of the data files, and some of the problems."""
    from tba_jax.tasks.mixture import data_sets

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


def _reward(config: Config, task: "Task") -> Iterator[str]:
    """Yield the source of user-defined functions and environments, and digests of model weights."""
    from tba_jax.models.hf import folders, hf_weights

    own = Path(__file__).parents[1]
    environment = [config.task.environment] if config.task.environment else []
    for name in (config.task.reward or task.reward, config.eval.gold_reward, *environment):
        if ":" not in name:
            yield name  # the name of a learned reward, or ""
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
    """Return the file of a module; None if there is no such module, as its import will report."""
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


def code_name() -> str:
    """Return the version of the package, and a digest of its source files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"tba_jax {versions()['tba_jax']} {digest.hexdigest()[:12]}"
