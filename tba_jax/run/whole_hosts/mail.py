# SPDX-License-Identifier: Apache-2.0
"""Mail between hosts of a run, as files of the work directory that all of them share.

What a searching host has done goes to the host that keeps the buffer in numbered messages: `Sender`
and `Receiver`. What it should do comes back in one small file that is written over and over:
`write_json` and `read_json`. A file appears whole or not at all. This module knows neither rounds
nor trainers. Invariant: every message is received once and in order, however often either side
looks, and no more than `most` messages wait.
"""

import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from tba_jax.flow.state import PartState, pack_states, unpack_states

FOLDER = "mail"


class Sender:
    """Numbered messages into a folder, which nobody else writes to.

    Args:
        folder: of these messages; made.
        most: messages that may wait to be received.
    """

    def __init__(self, folder: epath.Path, most: int = 4) -> None:
        self._folder = folder
        self._most = most
        self._next = self._received = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def has_room(self) -> bool:
        """Whether another message may be sent."""
        return self._next - self._received < self._most

    @property
    def num_waiting(self) -> int:
        """Messages sent and not known to be received."""
        return self._next - self._received

    def send(self, states: Mapping[str, PartState]) -> None:
        """The next message; there must be room."""
        assert self.has_room, "nobody may send more than is received"
        _write(self._folder / f"{self._next}.npz", pack_states(states))
        self._next += 1

    def acknowledge(self, received: int) -> None:
        """So many messages were received; their files go."""
        while self._received < min(received, self._next):
            (self._folder / f"{self._received}.npz").unlink(missing_ok=True)
            self._received += 1


class Receiver:
    """Reads the messages of one sender.

    Args:
        folder: the sender's.

    Attributes:
        received: messages so far.
    """

    def __init__(self, folder: epath.Path) -> None:
        self._folder = folder
        self.received = 0

    def take(self) -> Mapping[str, PartState] | None:
        """The next message, None where it has not come yet."""
        path = self._folder / f"{self.received}.npz"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        self.received += 1
        return unpack_states(data)


def write_json(path: epath.Path, value: Any) -> None:
    """Replace a file's content."""
    _write(path, json.dumps(value).encode())


def read_json(path: epath.Path) -> Any:
    """A file's content, None where it is not there."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def _write(path: epath.Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".unfinished")
    temporary.write_bytes(data)
    temporary.replace(path)
