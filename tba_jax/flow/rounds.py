# SPDX-License-Identifier: Apache-2.0
"""A finished round: its groups, metrics and times.

A searcher commits a `RoundCommit` to the buffer; its `RoundReport` has the metrics. A searcher
that decodes without rounds commits tickets: a ticket is a round of one prompt, and tickets may
finish in any order. Invariants: a commit that `check_commit` accepts counts every response once,
and a commit that is packed for a file is restored exactly.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.flow.records import Snapshot, pack_groups, unpack_groups
from tba_jax.flow.trajectory import Group


class PhaseTimes(NamedTuple):
    """Times of a round in seconds: start and end since the run began, and durations of its phases.

    `decode_s` is the round's share of the searcher's decoding time. `reference_s` is the time for
    log-probs of the reference after the rewards were computed.
    """

    start_s: float
    end_s: float
    decode_s: float
    reward_s: float
    reference_s: float


class DecodeCounts(NamedTuple):
    """Counts of decode sessions, as in their `Statistics`."""

    tokens: int
    slot_steps: int
    prompt_tokens: int
    kept_tokens: int

    def plus(self, other: "DecodeCounts") -> "DecodeCounts":
        """Return the sum of two counts, field by field."""
        return DecodeCounts(*map(sum, zip(self, other, strict=True)))


NO_COUNTS = DecodeCounts(0, 0, 0, 0)


class RoundMetrics(NamedTuple):
    """Metrics of the responses in one round or ticket of a searcher.

    Attributes:
        tokens: number of sampled tokens; 0 for given responses.
        reward_mean: mean over the responses that have a reward; nan if none has one.
        response_length_mean: mean number of tokens of a response, end-of-sequence included.
        unique_fraction: share of different responses among those to one prompt.
        kind_share: share of the task's first response kind.
        cut_share: share of the responses that the length limit cut.
        equal_rewards_share: share of the groups whose responses all have the same reward.
        further: metric name -> mean: of each of several rewards, and of the seconds that an
            episode waited for its environment.
    """

    tokens: int
    reward_mean: float
    response_length_mean: float
    unique_fraction: float
    kind_share: float
    cut_share: float
    equal_rewards_share: float
    further: Mapping[str, float]


class RoundReport(NamedTuple):
    """Metrics and times of a round."""

    metrics: RoundMetrics
    times: PhaseTimes

    def record(self) -> dict[str, float]:
        """Return all fields, flat and JSON-compatible."""
        metrics = self.metrics._asdict()
        further = metrics.pop("further")
        return {**self.times._asdict(), **metrics, **further}

    @classmethod
    def from_record(cls, record: Mapping[str, float]) -> "RoundReport":
        """Inverse of `record`.

        Raises:
            ValueError: a field is missing.
        """
        plain = RoundMetrics._fields[:-1]  # all except those whose names depend on the task
        names = [*PhaseTimes._fields, *plain]
        if missing := [name for name in names if name not in record]:
            raise ValueError(
                f"a saved round has no {', '.join(missing)}: another version of tba_jax saved it; "
                "continue the run with that version, or begin again in another --workdir"
            )
        values: dict[str, Any] = {name: record[name] for name in plain}
        further = {name: value for name, value in record.items() if name not in names}
        times = PhaseTimes(*(record[name] for name in PhaseTimes._fields))
        return cls(RoundMetrics(**values, further=further), times)


def summarise_rounds(reports: Sequence[RoundReport]) -> dict[str, float]:
    """Return search metrics of the rounds that one sync merged; {} without rounds."""
    if not reports:
        return {}
    metrics = [report.metrics for report in reports]
    busy = sum(times.decode_s for _, times in reports)
    out = {
        "search/rounds": float(len(reports)),
        "search/decode_s": busy,
        "search/reward_s": sum(times.reward_s for _, times in reports),
        "search/reference_s": sum(times.reference_s for _, times in reports),
        "search/round_s": sum(times.end_s - times.start_s for _, times in reports),
        "search/tokens_per_s": sum(m.tokens for m in metrics) / max(busy, 1e-9),
        "search/reward_mean": mean_known([m.reward_mean for m in metrics]),
        "search/response_length_mean": mean_known([m.response_length_mean for m in metrics]),
        "search/kind_share": mean_known([m.kind_share for m in metrics]),
        "search/unique_fraction": mean_known([m.unique_fraction for m in metrics]),
        "search/cut_share": mean_known([m.cut_share for m in metrics]),
        "search/equal_rewards_share": mean_known([m.equal_rewards_share for m in metrics]),
    }
    for name in dict.fromkeys(name for m in metrics for name in m.further):
        out[f"search/{name}"] = mean_known([m.further.get(name, math.nan) for m in metrics])
    return out


def mean_known(values: Sequence[float]) -> float:
    """Return the mean of the values that are not nan; nan if there are none."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else math.nan


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RoundCommit:
    """Result of one finished round of a searcher, committed as a whole.

    Attributes:
        searcher: index of the searcher.
        round: number of the round or ticket, counted from 0 without gaps, in the order of prompts.
        version: policy version at the start of the round.
        groups: scored groups; a ticket has one group.
        prompt_state: JSON-compatible state of the prompt stream after the prompts of the round.
        generated: number of sampled or given responses: trajectories and rejected responses of all
            groups.
        report: metrics and times of the round.
    """

    searcher: int
    round: int
    version: int
    groups: tuple[Group, ...]
    prompt_state: Mapping[str, Any]
    generated: int
    report: RoundReport

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the arrays of the trajectories."""
        return sum(y.num_bytes for g in self.groups for y in g.trajectories)


def check_commit(commit: RoundCommit) -> None:
    """Refuse a commit that would break the ledger or the buffer later.

    Raises:
        ValueError: inconsistent counts, a reward that is not finite, missing log-probs, or an empty
            response.
    """
    where = f"round {commit.round} of searcher {commit.searcher}"
    counted = sum(len(g.trajectories) + sum(g.rejected.values()) for g in commit.groups)
    if counted != commit.generated:
        raise ValueError(
            f"{where} has a count of {commit.generated} responses, but its groups have "
            f"{counted} (trajectories plus rejected); count every response once"
        )
    for group in commit.groups:
        for y in group.trajectories:
            if y.prompt_id != group.prompt.prompt_id:
                raise ValueError(
                    f"{where}: a response to prompt {y.prompt_id} is in the group of prompt "
                    f"{group.prompt.prompt_id}; put it into its own group"
                )
            if not math.isfinite(y.reward):
                raise ValueError(
                    f"{where}, prompt {y.prompt_id}: reward is {y.reward}, wanted a finite "
                    "number; count it as rejected instead"
                )
            if not 0 < len(y.response_tokens) == len(y.behavior_token_logprobs):
                raise ValueError(
                    f"{where}, prompt {y.prompt_id}: {len(y.response_tokens)} response tokens and "
                    f"{len(y.behavior_token_logprobs)} log-probs, wanted equal counts of at least "
                    "1; an empty response still has its end-of-sequence token"
                )
            if y.token_advantages is not None and (
                len(y.token_advantages) != len(y.response_tokens)
                or not np.isfinite(y.token_advantages).all()
            ):
                raise ValueError(
                    f"{where}, prompt {y.prompt_id}: {len(y.token_advantages)} advantages of "
                    f"{len(y.response_tokens)} response tokens, wanted a finite number for each"
                )
            if y.is_sampled is not None and (
                len(y.is_sampled) != len(y.response_tokens) or not y.is_sampled.any()
            ):
                raise ValueError(
                    f"{where}, prompt {y.prompt_id}: is_sampled has {len(y.is_sampled)} values, "
                    f"{int(y.is_sampled.sum())} of them True, for {len(y.response_tokens)} "
                    "response tokens; wanted a value for each token and at least one True. Leave "
                    "out responses without a token of the policy"
                )


def pack_commits(commits: Sequence[RoundCommit]) -> Snapshot:
    """Return commits as flat arrays and JSON-compatible metadata, without loss."""
    arrays, meta = pack_groups([group for commit in commits for group in commit.groups])
    meta["commits"] = [
        {
            "searcher": c.searcher,
            "round": c.round,
            "version": c.version,
            "num_groups": len(c.groups),
            "prompt_state": dict(c.prompt_state),
            "generated": c.generated,
            "wall": c.report.record(),
        }
        for c in commits
    ]
    return arrays, meta


def unpack_commits(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> list[RoundCommit]:
    """Inverse of `pack_commits`."""
    groups = iter(unpack_groups(arrays, meta))
    return [
        RoundCommit(
            searcher=c["searcher"],
            round=c["round"],
            version=c["version"],
            groups=tuple(itertools.islice(groups, c["num_groups"])),
            prompt_state=c["prompt_state"],
            generated=c["generated"],
            report=RoundReport.from_record(c["wall"]),
        )
        for c in meta["commits"]
    ]
