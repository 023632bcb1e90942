# SPDX-License-Identifier: Apache-2.0
"""Copies of a work directory: a local folder and an object store.

A run works in the local folder. `push` uploads new files to the bucket; `fetch` rebuilds the local
folder from the bucket. Checkpoints and published weights are folders that are written once: such a
folder is complete if its `digests.json` exists, because that file is uploaded last and deleted
first. A store cannot append to objects, so a log is stored as numbered pieces, logs/LOG/HOLD-PIECE,
that `fetch` joins. Every process that takes the lock of the directory gets a new hold number and
uploads the whole log under it; `fetch` reads the pieces of the highest hold number. Other files are
replaced whole. Invariant: a fetched folder was uploaded completely and matches its digests
(tests/storage/test_bucket.py).
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from etils import epath

from tba_jax.storage import digests
from tba_jax.storage.bucket import Bucket, StorageError

FOLDERS = ("checkpoints", "weights")
"""Folders whose subfolders have numbers as names and are written once."""
FILES = ("config.json", "versions.json", "report.json", "report.html")
"""Files that are replaced whole."""
_PIECE = 2**26  # maximum number of bytes of a log in one object


class Mirror:
    """A local folder and its copy in a bucket.

    Args:
        bucket: the copy.
        folder: the local folder; `fetch` deletes its content.
        number: hold number of the lock, part of the names of log pieces; 0 if only `fetch` is used.
    """

    def __init__(self, bucket: Bucket, folder: Path, number: int = 0) -> None:
        self._bucket, self.folder, self._number = bucket, folder, number
        self._sent: dict[str, tuple[int, int]] = {}  # log -> pieces, bytes
        self._known: dict[str, tuple[int, int]] = {}  # file -> size, time of change
        self._whole: set[str] = set()  # complete folders in the bucket

    def fetch(self, note: Callable[[str], None], *, weights: bool = False) -> None:
        """Rebuild the local folder: logs, files and the newest intact checkpoint.

        Args:
            note: receives a line for each damaged folder in the bucket.
            weights: also fetch the newest published weights, which a resumed run does not need.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        names = self._bucket.names()
        for name in (name for name in names if name in FILES):
            self._bucket.download(name, self.folder / name)
        for log, pieces in _logs(names).items():
            with open(self.folder / log, "wb") as file:
                for piece in pieces:
                    file.write(self._bucket.read(piece) or b"")
        for kind in FOLDERS if weights else FOLDERS[:1]:
            self._fetch_newest(kind, names, note)

    def _fetch_newest(self, kind: str, names: list[str], note: Callable[[str], None]) -> None:
        for number in sorted(_complete(kind, names), reverse=True):
            inside = [name for name in names if name.startswith(f"{kind}/{number}/")]
            for name in inside:
                self._bucket.download(name, self.folder / name)
            local = self.folder / kind / str(number)
            found = digests.damage(epath.Path(local))
            if not found:
                return
            note(f"{self._bucket}/{kind}/{number} is damaged: {found[0]}")
            shutil.rmtree(local)

    def push(self) -> None:
        """Upload new and changed files; files that appear during the call wait for the next one.

        Raises:
            OSError, StorageError: the store refuses an operation.
        """
        # Logs are uploaded first, so that a checkpoint in the bucket has the log of its steps.
        whole = {kind: self._whole_here(kind) for kind in FOLDERS}
        for log in sorted(self.folder.glob("*.jsonl")):
            self._push_log(log)
        for kind, here in whole.items():
            self._push_folders(kind, here)
        files = [self.folder / name for name in FILES]
        for file in (*files, *sorted(self.folder.glob("plots/*"))):
            self._push_file(file)

    def _whole_here(self, kind: str) -> list[str]:
        return sorted(
            (
                path.name
                for path in _entries(self.folder / kind)
                if path.name.isdigit() and (path / digests.NAME).is_file()
            ),
            key=int,
        )

    def _push_folders(self, kind: str, here: list[str]) -> None:
        """Upload complete folders that the bucket lacks; delete those that are gone locally."""
        for number in here:
            if f"{kind}/{number}" not in self._whole:
                self._push_folder(kind, number)
        gone = {each for each in self._whole if each.startswith(f"{kind}/")}
        gone -= {f"{kind}/{number}" for number in here}
        for name in gone:
            self._remove_folder(name)
        self._whole -= gone

    def _push_folder(self, kind: str, number: str) -> None:
        name = f"{kind}/{number}"
        # Hard links keep the files if the run deletes the folder during the upload.
        kept = self.folder / "being_pushed"
        shutil.rmtree(kept, ignore_errors=True)
        try:
            shutil.copytree(self.folder / name, kept, copy_function=os.link)
        except (FileNotFoundError, shutil.Error):
            return  # the run has deleted the folder
        self._remove_folder(name)  # an incomplete upload, or a folder of steps that were repeated
        files = [file for file in sorted(kept.rglob("*")) if file.is_file()]
        last = kept / digests.NAME
        for file in (*(file for file in files if file != last), last):
            self._bucket.upload(file, f"{name}/{file.relative_to(kept)}")
        shutil.rmtree(kept)
        self._whole.add(name)

    def _remove_folder(self, name: str) -> None:
        inside = self._bucket.names(f"{name}/")
        first = f"{name}/{digests.NAME}"
        self._bucket.remove([first, *(each for each in inside if each != first)])

    def forget(self) -> None:
        """Delete from the bucket the logs of earlier holders, and folders that are gone locally."""
        names = self._bucket.names()
        for kind in FOLDERS:
            inside = {name.split("/")[1] for name in names if name.startswith(f"{kind}/")}
            for number in filter(str.isdecimal, inside):
                name = f"{kind}/{number}"
                if not (self.folder / name).is_dir():
                    self._remove_folder(name)
                else:
                    self._whole.add(name)
        old = [name for name in names if name.startswith("logs/")]
        self._bucket.remove([name for name in old if _hold(name) < self._number])

    def _push_log(self, log: Path) -> None:
        pieces, sent = self._sent.get(log.name, (0, 0))
        if log.stat().st_size < sent:
            raise StorageError(
                f"{log} became shorter while the run wrote to it: another process has changed it. "
                "Run the same command again"
            )
        with open(log, "rb") as file:
            file.seek(sent)
            while content := file.read(_PIECE):
                content = content[: content.rfind(b"\n") + 1]  # whole lines
                if not content:
                    return
                name = f"logs/{log.name}/{self._number:08d}-{pieces:08d}"
                self._bucket.write(name, content)
                pieces, sent = pieces + 1, sent + len(content)
                self._sent[log.name] = pieces, sent
                file.seek(sent)

    def _push_file(self, file: Path) -> None:
        try:
            stat = os.stat(file)
        except FileNotFoundError:
            return
        name = str(file.relative_to(self.folder))
        seen = stat.st_size, stat.st_mtime_ns
        if self._known.get(name) != seen:
            self._bucket.upload(file, name)
            self._known[name] = seen


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _complete(kind: str, names: list[str]) -> list[int]:
    """Return the numbers of the folders of a kind that are complete in the bucket."""
    found = []
    for name in names:
        parts = name.split("/")
        if len(parts) == 3 and (parts[0], parts[2]) == (kind, digests.NAME) and parts[1].isdigit():
            found.append(int(parts[1]))
    return found


def _hold(piece: str) -> int:
    return int(piece.rpartition("/")[2].partition("-")[0])


def _logs(names: list[str]) -> Mapping[str, list[str]]:
    """Return each log's pieces by the newest lock holder, up to the first missing piece."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.startswith("logs/"):
            found.setdefault(name.split("/")[1], []).append(name)
    for log, pieces in found.items():
        newest = max(map(_hold, pieces))
        mine = [piece for piece in pieces if _hold(piece) == newest]
        wanted = [f"logs/{log}/{newest:08d}-{i:08d}" for i in range(len(mine))]
        found[log] = [piece for piece, want in zip(mine, wanted, strict=True) if piece == want]
    return found
