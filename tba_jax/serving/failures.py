# SPDX-License-Identifier: Apache-2.0
"""Failures that do not end a run: refused requests, lines on standard error, counts by name."""

import collections
import sys
import threading
import time

_REPORT_S = 30.0  # interval of lines about failures with the same name
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}


class Failure(Exception):
    """A failure with a name, by which it is counted, and a text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class ApiError(Exception):
    """A refused request; `param` names a wrong parameter, `code` is a short name for programs."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        kind = _ERROR_TYPES.get(status, "invalid_request_error")
        self.status, self.code = status, code
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class FailureLines:
    """Thread-safe counts of failures by name, and lines about them, which begin with `subject`."""

    def __init__(self, subject: str) -> None:
        self._subject, self._lock = subject, threading.Lock()
        self._unreported, self._untaken = collections.Counter[str](), collections.Counter[str]()
        self._due_s = collections.defaultdict[str, float](float)  # time of the next line by name

    def report(self, name: str, text: str, what: str) -> None:
        """Count a failure, and print `text`, the count, `what` (the counted noun) and `name`.

        Failures with one name are printed at intervals, with their number since the last line.
        """
        with self._lock:
            self._unreported[name] += 1
            self._untaken[name] += 1
            if (now := time.monotonic()) < self._due_s[name]:
                return
            self._due_s[name] = now + _REPORT_S
            num = self._unreported.pop(name)
        sys.stderr.write(f"{self._subject}: {' '.join(text.split())}; {num} {what} {name}\n")

    def take(self) -> dict[str, int]:
        """Return the number of failures by name since the last call."""
        with self._lock:
            taken, self._untaken = self._untaken, collections.Counter()
            return dict(taken)
