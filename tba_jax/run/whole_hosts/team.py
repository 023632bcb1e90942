# SPDX-License-Identifier: Apache-2.0
"""Which hosts of a run train and which search, and how they meet in the work directory.

A host that searches says hello with a word of its own; the one that keeps the buffer answers that
word with the name of this start of the run, and waits until all hosts have read it. So nobody takes
a file for new that an earlier start left. No program and no collective includes hosts that search.
Invariant: all hosts of a start have the same command, or all end.
"""

import contextlib
import dataclasses
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etils import epath

from tba_jax.config.devices import asked
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import CONTINUE, Cluster, PeerError
from tba_jax.devices.placement import arrange
from tba_jax.devices.slices import hosts_of
from tba_jax.run.errors import UserError
from tba_jax.run.shared import Shared
from tba_jax.run.whole_hosts.home import Home
from tba_jax.run.whole_hosts.mail import FOLDER, read_json, write_json
from tba_jax.run.whole_hosts.remote_search import RemoteSearch, versions_kept
from tba_jax.run.workdir import claim_together, command_of, differences
from tba_jax.weights.remote import Members, VersionWriter

if TYPE_CHECKING:
    from tba_jax.run.lock import Hold

MEET_S = 300.0
"""Longest wait for a host to show itself in the work directory; all have joined already."""
_POLL_S = 0.05
_SESSION = re.compile("[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class Team:
    """A start of a run whose searchers are elsewhere.

    Attributes:
        session: its name.
        folder: of its mail.
        hosts: searchers of each host that searches, by process number.
    """

    session: str
    folder: epath.Path
    hosts: Mapping[int, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Roles:
    """What processes do, by number.

    Attributes:
        train: those with devices of the trainer; the first keeps the buffer.
        search: searchers of each of those that have some.
        others: all that do not train.
    """

    train: tuple[int, ...]
    search: Mapping[int, tuple[int, ...]]
    others: tuple[int, ...]


def roles_of(config: Config, devices: Sequence[Any]) -> Roles:
    """Who does what.

    Args:
        config: of the run.
        devices: of all processes.

    Raises:
        PlacementError: devices cannot be divided so.
    """
    hosts = hosts_of(devices)
    found = {h: arrange(config.placement, devices, asked(config), h) for h in hosts}
    train = tuple(hosts_of(found[hosts[0]].trainer))
    search = {
        h: tuple(range(a.first_searcher, a.first_searcher + len(a.groups)))
        for h, a in found.items()
        if a.groups
    }
    return Roles(train, search, tuple(h for h in hosts if h not in train))


def meet_at_home(
    cluster: Cluster,
    config: Config,
    workdir: Path,
    roles: Roles,
    held: contextlib.ExitStack,
) -> "tuple[bool, Hold | None, Team]":
    """Claim the directory with the hosts that train, and meet those that do not.

    Args:
        cluster: the hosts that train.
        config: of the run.
        workdir: its directory.
        roles: of all hosts.
        held: lets go of the directory when it ends.

    Returns:
        As `claim_together`, and the team.

    Raises:
        UserError: as `claim_together`, or a host has another command.
        PeerError: a host does not show itself.
    """
    is_finished, hold = claim_together(cluster, config, workdir, held)
    session = cluster.broadcast_json(uuid.uuid4().hex[:16])
    folder = epath.Path(workdir) / FOLDER
    team = Team(session, folder / session, roles.search)
    answer: dict[str, Any] = {}
    if cluster.is_primary:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _greet(team, folder, config, workdir, roles.others, is_finished)
        except (UserError, PeerError) as error:
            answer = {"error": str(error), "is_user": isinstance(error, UserError)}
    answer = cluster.broadcast_json(answer)
    if answer:
        raise (UserError if answer["is_user"] else PeerError)(answer["error"])
    return is_finished, hold, team


def _greet(
    team: Team,
    folder: epath.Path,
    config: Config,
    workdir: Path,
    others: Sequence[int],
    is_finished: bool,
) -> None:
    """Answer every hello until each host has confirmed the answer to its own."""
    for old in folder.iterdir():
        if _SESSION.fullmatch(old.name) and old.is_dir():
            shutil.rmtree(old, ignore_errors=True)
    team.folder.mkdir(parents=True, exist_ok=True)
    mine = command_of(config, workdir)
    answered: dict[int, str] = {}
    missing, end = set(others), time.monotonic() + MEET_S
    while missing:
        for process in sorted(missing):
            hello = read_json(folder / f"hello_{process}.json")
            if hello is None:
                continue
            if hello.get("session") == team.session:
                missing.discard(process)
                if hello["refused"]:
                    raise UserError(hello["refused"])
            elif answered.get(process) != hello["word"]:
                lines = differences(mine, hello["command"])
                refused = (
                    f"process {process} was started with another command than process 0: "
                    f"{'; '.join(lines)}. Start the same command on every host"
                )
                reply = {
                    "word": hello["word"],
                    "session": team.session,
                    "finished": is_finished,
                    "refused": refused if lines else "",
                }
                write_json(folder / f"welcome_{process}.json", reply)
                answered[process] = hello["word"]
        if missing and time.monotonic() > end:
            raise PeerError(
                f"process(es) {', '.join(map(str, sorted(missing)))} did not show themselves in "
                f"{folder} within {MEET_S:.0f} s: do all hosts see the same work directory? "
                f"{CONTINUE}"
            )
        time.sleep(_POLL_S)


def meet_elsewhere(
    config: Config,
    workdir: Path,
    process: int,
    roles: Roles,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[bool, Team]:
    """Meet the host that keeps the buffer; for one that does not train.

    Args:
        config: of the run.
        workdir: its directory.
        process: number of this one.
        roles: of all hosts.
        sleep, clock: waiting, and seconds that only go on.

    Returns:
        Whether the run is finished, and the team.

    Raises:
        UserError: this process has another command. PeerError: nobody answers.
    """
    folder = epath.Path(workdir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    word, end = uuid.uuid4().hex, clock() + MEET_S
    hello = {"word": word, "command": command_of(config, workdir)}
    write_json(folder / f"hello_{process}.json", hello)
    while True:
        reply = read_json(folder / f"welcome_{process}.json")
        if reply is not None and reply["word"] == word:
            break
        if clock() > end:
            raise PeerError(
                f"process {roles.train[0]}, which keeps the replay buffer, did not answer in "
                f"{folder} within {MEET_S:.0f} s: do all hosts see the same work directory? "
                f"{CONTINUE}"
            )
        sleep(_POLL_S)
    confirmed = {**hello, "session": reply["session"], "refused": reply["refused"]}
    write_json(folder / f"hello_{process}.json", confirmed)
    if reply["refused"]:
        raise UserError(reply["refused"])
    return reply["finished"], Team(reply["session"], folder / reply["session"], roles.search)


def make_remote_search(
    shared: Shared,
    team: Team,
    publish: Callable[[Any], Any],
    log_event: Callable[[Mapping[str, Any]], None],
) -> RemoteSearch:
    """The searchers of the run as a host that trains has them.

    Args:
        shared: what its parts stand on.
        team: who searches.
        publish: copy and cast of the weights.
        log_event: schedule log.
    """
    config, cluster = shared.config, shared.cluster
    home = None
    if cluster.is_primary:
        home = Home(
            team.folder,
            team.hosts,
            outbox_bytes=config.search.outbox_bytes if config.driver == "async" else sys.maxsize,
            log_event=log_event,
            limit_s=config.log.watchdog_s,
        )
    transport = VersionWriter(
        str(shared.workdir),
        publish,
        session=team.session,
        members=Members(cluster.number, cluster.members),
        keep=config.sync.keep,
        timeout_s=config.checkpoint.timeout_s,
        kept=versions_kept(home),
    )
    return RemoteSearch(transport, home)
