# SPDX-License-Identifier: Apache-2.0
"""The state of one host: the states of its parts by name, and the facts that they belong to.

It serialises them and refuses what other versions wrote; what a part's state means is known to the
part alone. Invariant: nothing on disk is pickled.
"""

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.flow.state import PartState
from tba_jax.storage import digests

ITEMS_FILE = "_CHECKPOINT_METADATA"  # Orbax's: which classes wrote the items of a checkpoint
# What a checkpoint of a run holds.
CHECKPOINT_ENTRIES = frozenset(
    {"train_state", "host_state", ITEMS_FILE, "commit_success.txt", digests.NAME}
)

FORMAT = 6
"""1: all counters in one part `run`; 2: each part has its own; 3: tickets, repeats with counts;
4: what the run was made of; 5: responses that were lost; 6: where logs ended."""

_FACTS_KEY, _META_KEY = "__facts__", "__meta__"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which and what to do."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a host's state belongs to.

    Attributes:
        seed: of the run.
        num_searchers: of the whole run.
        run_id: the run's own name.
        fingerprints: names of what it was made of (`identity.KINDS`).
        format: in which it was written.
        step: of the checkpoint; -1 in checkpoints that do not say.
        config: flat config of the run; {} in checkpoints that do not hold it.
    """

    seed: int
    num_searchers: int
    run_id: str = ""
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    format: int = FORMAT
    step: int = -1
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class HostState(NamedTuple):
    """Everything of one process that is not train state.

    Attributes:
        facts: what it belongs to.
        parts: state of each part, by name: logs, buffer, outbox_I and searcher_I of each searcher
            I, trainer, clock, evaluations.
    """

    facts: Facts
    parts: Mapping[str, PartState]

    def named(self, prefix: str) -> dict[str, PartState]:
        """The parts whose names begin so."""
        return {name: part for name, part in self.parts.items() if name.startswith(prefix)}


def pack(state: HostState) -> bytes:
    """Host state as npz bytes: arrays as `part/key`, facts and metadata as JSON entries."""
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
    facts: dict[str, Any] = {"format": 1}  # the first format did not name itself
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
    """Inverse of `pack`.

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
