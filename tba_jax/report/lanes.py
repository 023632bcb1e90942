# SPDX-License-Identifier: Apache-2.0
"""Working times of searchers, trainer and evaluations, as intervals from a schedule log.

A long run has millions of intervals, so sets of intervals are [n, 2] arrays of seconds. Invariant:
a log is read once, as a stream, and only the times of its lines are kept.
"""

import array
import collections
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.report.jsonl import parse_line, read_blocks
from tba_jax.report.lines import wrong_times

Intervals = np.ndarray  # float64 [n, 2]: start and end in seconds
Lane = dict[str, Intervals]  # by phase

ROUND_PHASES = ("decode", "reward", "reference")  # in their order within a round

_FIELDS = {
    "round": ("start_s", "end_s", "decode_s", "reward_s", "reference_s", "environment_s"),
    "step": ("start_s", "end_s", "wait_s"),
    "sync": ("start_s", "end_s"),
    "eval": ("start_s", "end_s"),
}
# A run writes rounds, by far the most frequent events, in this form. Other forms, and rounds with
# an environment, are parsed as JSON.
_ROUND = b'{"event": "round"'
_ROUNDS = re.compile(
    rb'^\{"event": "round", "searcher": (\d+), "round": \d+, .*?'
    + b"".join(rb', "%s": %s' % (x.encode(), rb"([^,}]+)") for x in _FIELDS["round"][:-1])
    + b"[,}]",
    re.MULTILINE,
)
# A run writes the times before these fields, which are most of the line.
_LONG_TAILS = {b'{"event": "step"': b', "trajectory_ids"'}
_WITHOUT_TIMES = b'{"event": "chunk"'


class Times(NamedTuple):
    """The times of a schedule log, one row for each event.

    Attributes:
        rounds: searcher -> start, end, and seconds of decode, reward and reference, and of the wait
            for an environment (mean over the responses).
        steps: start, end, and seconds of the wait before the start.
        syncs, evals: start, end.
    """

    rounds: Mapping[int, np.ndarray]
    steps: np.ndarray
    syncs: np.ndarray
    evals: np.ndarray


def read_times(path: Path, start: int = 0) -> Times:
    """Return the times of a schedule log; empty without a file.

    Args:
        start: byte at which a line begins; earlier lines are ignored.

    Raises:
        ValueError: a line is not a JSON object (with file and line number).
    """
    rows = _Rows()
    for first, lines in read_blocks(path, start):
        parsed = (_WITHOUT_TIMES, _ROUND)
        if not _add_rounds(rows, [line for line in lines if line.startswith(_ROUND)]):
            parsed = (_WITHOUT_TIMES,)
        for number, line in enumerate(lines, first):
            if not line.startswith(parsed):
                _add_event(rows, _timed_event(f"{path}, line {number}", line))
    return _as_times(rows)


class _Rows(collections.defaultdict[tuple[str, int], "array.array[float]"]):
    """(event, searcher or 0) -> times of all events of that kind, in one flat array."""

    def __init__(self) -> None:
        super().__init__(lambda: array.array("d"))


def _add_rounds(rows: _Rows, lines: list[bytes]) -> bool:
    """Add lines that are all `round` events; return whether they are.

    A regular expression reads such lines faster than a JSON parser.
    """
    joined = b"".join(lines)
    found = _ROUNDS.findall(joined)
    if len(found) < len(lines) or b'"environment_s"' in joined:
        return False
    try:
        numbers = [*map(float, itertools.chain.from_iterable(found))]
    except ValueError:
        return False
    table = np.array(numbers).reshape(-1, len(_FIELDS["round"]))
    table = np.pad(table, ((0, 0), (0, 1)))  # no environment
    for searcher in np.unique(table[:, 0]):
        own = table[table[:, 0] == searcher, 1:]
        rows["round", int(searcher)].frombytes(own.tobytes())
    return True


def _timed_event(where: str, line: bytes) -> Mapping[str, Any]:
    tail = line.find(_LONG_TAILS.get(line[: line.find(b",")], b"\r\n"))
    event: Mapping[str, Any] = {}
    if tail >= 0:
        event = parse_line(where, line[:tail] + b"}", wrong_times)
    return event if "end_s" in event else parse_line(where, line, wrong_times)


def _add_event(rows: _Rows, event: Mapping[str, Any]) -> None:
    kind = event.get("event", "")
    if kind in _FIELDS and "start_s" in event and "end_s" in event:
        key = kind, event["searcher"] if kind == "round" else 0
        rows[key].extend([event.get(name) or 0.0 for name in _FIELDS[kind]])


def _as_times(rows: _Rows) -> Times:
    def table(kind: str, searcher: int = 0) -> np.ndarray:
        values = rows.get((kind, searcher), array.array("d"))
        return np.array(values, np.float64).reshape(-1, len(_FIELDS[kind]))

    searchers = sorted(searcher for kind, searcher in rows if kind == "round")
    rounds = {searcher: table("round", searcher) for searcher in searchers}
    return Times(rounds, table("step"), table("sync"), table("eval"))


def lanes_of(times: Times) -> dict[str, Lane]:
    """Return lane -> phase -> intervals: the searchers in order, the trainer, evaluations.

    The phases of a round follow each other from its start. The remaining time of a round counts as
    decode, because the searcher works on the host then. Overlapping rounds are tickets, which are
    graded while other tickets are decoded; grading has its own lane. A step's wait is before its
    start.
    """
    lanes: dict[str, Lane] = {}
    for searcher, rounds in times.rounds.items():
        own = rounds[np.argsort(rounds[:, 0], kind="stable")]
        if (own[1:, 0] < own[:-1, 1]).any():
            lanes |= _ticket_lanes(searcher, own)
        else:
            lanes[f"searcher {searcher}"] = _round_lane(own)
    start, end, wait = times.steps.T
    if len(times.steps) or len(times.syncs):
        lanes["trainer"] = {
            "step": _intervals(start, end),
            "wait": _intervals(start - wait, start),
            "sync": times.syncs,
        }
    if len(times.evals):
        lanes["evaluation"] = {"evaluation": times.evals}
    return lanes


def _intervals(start: np.ndarray, end: np.ndarray) -> Intervals:
    return np.stack([start, end], axis=1)


def _round_lane(rounds: np.ndarray) -> Lane:
    """Return the phases of rounds, one after the other."""
    begin, end = rounds[:, 0], rounds[:, 1]
    seconds = rounds[:, 2:5].copy()
    seconds[:, 0] += np.maximum(0.0, end - begin - seconds.sum(axis=1))
    scale = (end - begin) / np.maximum(seconds.sum(axis=1), 1e-9)
    edges = begin[:, None] + np.cumsum(seconds, axis=1) * scale[:, None]
    edges = np.concatenate([begin[:, None], edges], axis=1)
    return {phase: edges[:, i : i + 2] for i, phase in enumerate(ROUND_PHASES)}


def _ticket_lanes(searcher: int, tickets: np.ndarray) -> dict[str, Lane]:
    """Return the lanes of a searcher's decoding and grading of tickets.

    Tickets that were graded together end together.
    """
    end, together = np.unique(tickets[:, 1], return_inverse=True)
    reward_s, reference_s = (np.bincount(together, tickets[:, i]) for i in (3, 4))
    reference = end - reference_s
    reward = reference - reward_s
    start = tickets[:, 0]
    return {
        f"searcher {searcher}": {
            "decode": merge_intervals(_intervals(start, np.maximum(start, reward[together])))
        },
        f"grader {searcher}": {
            "reward": merge_intervals(_intervals(reward, reference)),
            "reference": merge_intervals(_intervals(reference, end)),
        },
    }


def waiting_shares(times: Times, edges: np.ndarray) -> dict[str, np.ndarray]:
    """Return lane -> share of the responses that wait for their environment, between the edges.

    The log has the mean wait for each ticket; the wait is spread evenly over the ticket.

    Args:
        edges: float64 [n + 1], seconds in ascending order.
    """
    lanes = {}
    for searcher, rounds in times.rounds.items():
        if not rounds[:, 5].any():
            continue
        start, end = rounds[:, :1], rounds[:, 1:2]
        inside = np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1])
        inside = np.maximum(inside, 0.0)  # [tickets, n]
        share = rounds[:, 5] / np.maximum(end - start, 1e-9)[:, 0]
        waiting = share @ inside / np.maximum(inside.sum(axis=0), 1e-9)
        lanes[f"environment {searcher}"] = np.minimum(waiting, 1.0)
    return lanes


def merge_intervals(intervals: Intervals) -> Intervals:
    """Return the union of intervals, as disjoint intervals in ascending order."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    if not len(intervals):
        return intervals
    reached = np.maximum.accumulate(intervals[:, 1])
    first = np.concatenate([[True], intervals[1:, 0] > reached[:-1]])
    last = np.concatenate([first[1:], [True]])
    return _intervals(intervals[first, 0], reached[last])


def length_before(merged: Intervals, moments: np.ndarray) -> np.ndarray:
    """Return the total length of a union of intervals before each moment.

    Args:
        merged: disjoint intervals in ascending order.
        moments: float64 [n], seconds.
    """
    lengths = np.concatenate([[0.0], np.cumsum(merged[:, 1] - merged[:, 0])])
    index = np.searchsorted(merged[:, 0], moments, side="right")
    ends = np.concatenate([[-np.inf], merged[:, 1]])[index]
    return lengths[index] - np.maximum(0.0, ends - moments)


def overlap(first: Intervals, second: Intervals) -> float:
    """Return the total length of the intersection of two unions of intervals."""
    a, b = merge_intervals(first), merge_intervals(second)
    if not (len(a) and len(b)):
        return 0.0
    return float((length_before(a, b[:, 1]) - length_before(a, b[:, 0])).sum())


def busy_shares(lanes: Mapping[str, Lane]) -> dict[str, float]:
    """Return the busy shares of each searcher and the trainer, and "both".

    Training time is from the first round to the last step. "both" is the share of that time in
    which the trainer and at least one searcher work.
    """
    searchers = {
        name: np.concatenate([*lane.values()])
        for name, lane in lanes.items()
        if name.startswith("searcher")
    }
    if not searchers or "trainer" not in lanes or not len(lanes["trainer"]["step"]):
        return {}
    rounds = np.concatenate([*searchers.values()])
    work = np.concatenate([lanes["trainer"]["step"], lanes["trainer"]["sync"]])
    window = np.array([[rounds[:, 0].min(), work[:, 1].max()]])
    length = float(window[0, 1] - window[0, 0])
    shares = {name: overlap(spans, window) / length for name, spans in searchers.items()}
    shares["trainer"] = overlap(work, window) / length
    shares["both"] = overlap(rounds, work) / length
    return shares
