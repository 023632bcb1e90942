# SPDX-License-Identifier: Apache-2.0
"""Which errors a user can mend, and how an error is told. Imports nothing heavy by itself."""

import sys
import traceback
from pathlib import Path


class UserError(Exception):
    """A mistake of the user's: printed as one line, without a traceback."""


class StarvedError(RuntimeError):
    """Searchers fill a buffer that no batch can be drawn from; the message says why."""


class WorkdirLost(RuntimeError):
    """The work directory is gone, or another process has taken it over; the message says which."""


def tell(error: BaseException) -> int:
    """Print an error, with its traceback where that may help; the exit code."""
    from tba_jax.devices.worker import WorkerError

    if isinstance(error, WorkerError):
        print(f"error: {error}", file=sys.stderr)
        if error.__cause__ is not None and not is_mendable(error.__cause__):
            traceback.print_exception(error.__cause__)
        return 1
    if is_mendable(error):
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError | ValueError) else 1
    traceback.print_exception(error)
    return 1


def is_mendable(error: BaseException) -> bool:
    """Whether the message tells a user what to do, so that a traceback would only hide it.

    That holds for our named errors, and for a ValueError that this package raised itself; one that
    comes out of numpy or jax is a defect of ours and keeps its traceback.
    """
    from tba_jax.devices.cluster import PeerError
    from tba_jax.devices.turns import TurnError
    from tba_jax.report.writers import LogError
    from tba_jax.rewards.pool import RewardFailure
    from tba_jax.run.checkpoint import CheckpointError
    from tba_jax.train.trainer import NonFiniteError
    from tba_jax.weights.transport import PublicationError

    named = (
        UserError,
        CheckpointError,
        LogError,
        PeerError,
        PublicationError,
        RewardFailure,
        NonFiniteError,
        StarvedError,
        TurnError,
        WorkdirLost,
    )
    if isinstance(error, named):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = Path(frames[-1].filename) if frames else Path()
    return isinstance(error, ValueError) and Path(__file__).parents[1] in raised_in.parents
