# SPDX-License-Identifier: Apache-2.0
"""The state of a process of a run: states of its parts by name, and facts that identify the run.

Invariants: no file has pickled objects. A checkpoint of another run is refused
(tests/run/test_host_state.py).
"""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tba_jax.config.command_line import versions
from tba_jax.flow.state import PartState
from tba_jax.run.errors import CheckpointError

_FACTS_KEY, _META_KEY = "__facts__", "__meta__"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts that identify the run of a host state.

    Attributes:
        run_id: unique name of the run.
        step: step of the checkpoint.
    """

    seed: int
    run_id: str = ""
    step: int = -1


class HostState(NamedTuple):
    """All state of a process except the train state.

    Attributes:
        facts: the run that the state belongs to.
        parts: state of each part, by name: logs, buffer, owner, trainer, clock, evaluations.
    """

    facts: Facts
    parts: Mapping[str, PartState]


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


def unpack(data: bytes) -> HostState:
    """Return the host state that `pack` converted to bytes.

    Raises:
        ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile: the bytes are not intact.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as entries:
        facts = Facts(**json.loads(entries[_FACTS_KEY].tobytes().decode()))
        metas = json.loads(entries[_META_KEY].tobytes().decode())
        arrays: dict[str, dict[str, np.ndarray]] = {name: {} for name in metas}
        for full_key in entries.files:
            if full_key not in (_FACTS_KEY, _META_KEY):
                name, key = full_key.split("/", 1)
                arrays[name][key] = entries[full_key]
        parts = {name: PartState(arrays[name], meta) for name, meta in metas.items()}
        return HostState(facts, parts)


def check_facts(step: int, saved: Facts, now: Facts) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        CheckpointError: the checkpoint was copied into the work directory.
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


def code_name() -> str:
    """Return the version of the package, and a digest of its source files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"tba_jax {versions()['tba_jax']} {digest.hexdigest()[:12]}"
