# SPDX-License-Identifier: Apache-2.0
"""Definitions of the studies on enumerable problems.

A study combines objectives with cases. Cases that differ only in their `Condition` have equal
`Settings` and share a program. Protocols: docs/lab/claims.md.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from tba_jax.studies.enumerated import Problem, few_modes, sparse, stops, sums
from tba_jax.studies.enumerated_data import SAMPLERS, Condition, Settings
from tba_jax.studies.named import OBJECTIVES

LAGS = (0, 8, 32)


class Case(NamedTuple):
    """Differences of a case from the defaults of its study.

    Attributes:
        condition: fields of `Condition`.
        settings: fields of `Settings`.
    """

    condition: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Study:
    """Objectives and cases that are compared.

    Attributes:
        names: names of objectives.
        cases: label -> case.
        problem: function that makes the problem.
        rates: learning rates; the best rate is selected for each objective and case.
        beta: beta of the target, and of objectives that do not set beta.
        num_steps: steps of each run.
        settings_of: objective -> further fields of `Settings`.
        axis: description of the cases, for figures.
        shows: reported quantity: the end of runs, their training data, diversity at equal success,
            or endings of responses.
    """

    names: tuple[str, ...]
    cases: Mapping[str, Case]
    problem: Callable[[], Problem] = sums
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    beta: float = 0.05
    num_steps: int = 400
    settings_of: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    axis: str = ""
    shows: Literal["ends", "data", "diversity", "stops"] = "ends"

    def condition(self, label: str) -> Condition:
        """Return the condition of a case."""
        return Condition(self.beta, self.beta)._replace(**self.cases[label].condition)

    def settings(self, name: str, label: str) -> Settings:
        """Return the settings of an objective in a case."""
        first = Settings(num_steps=self.num_steps, target_beta=self.beta)
        own = self.settings_of.get(name, {})
        return dataclasses.replace(first, **{**own, **self.cases[label].settings})


# Variants of the loss that only one study compares.
_OF_CENTRING = ("tb", "tb, centred by the sampler", "tb, not centred")
_ALL = tuple(
    name
    for name in OBJECTIVES
    # Other drivers are the same objective here. VinePPO needs values from a searcher; dynamic
    # sampling is excluded.
    if name
    not in (
        *_OF_CENTRING[1:],
        "tb, leave one out",
        "vineppo",
        "gflownet_sync",
        "reinforce",
    )
)
_FEW = ("tb", "grpo, beta 0", "proximal_rloo")
# Objectives with the reward only, and objectives with their own KL term.
_OF_DIVERSITY = (
    "tb",
    "rloo, beta 0",
    "grpo, beta 0",
    "dr_grpo",
    "dapo",
    "cispo",
    "proximal_rloo",
    "grpo",
    "ppo",
    "online_dpo",
)
_PRIME = {name: {"reset_period": 50} for name in ("tba_prime", "tba_prime_live")}
_BETAS = (0.0, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5)
_ANNEALED = ((0.2, 0.005), (0.5, 0.02))


def _betas(lag: int) -> dict[str, Case]:
    held = {f"{b:g}, lag {lag}": {"beta": b, "beta_final": b} for b in _BETAS}
    moved = {f"{b:g} to {c:g}, lag {lag}": {"beta": b, "beta_final": c} for b, c in _ANNEALED}
    return {label: Case({**fields, "lag": lag}) for label, fields in (held | moved).items()}


# The sparse problem.
_REPLAYED = {"prompts": 4, "num_evaluations": 100, "replay": "responses"}
_HALF_BY_REWARD = {"lag": 2, "recency": 0.5, "inverse_temperature": 5.0}
_SPARSE_RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def _on_sparse(cases: Mapping[str, Case], axis: str) -> Study:
    """Return a study of sampling settings on the problem `sparse`."""
    return Study(("tb",), cases, sparse, _SPARSE_RATES, num_steps=200, axis=axis, shows="data")


STUDIES: Mapping[str, Study] = {
    # Which objectives converge to pi_ref exp(r / beta)?
    "optimum": Study(
        _ALL,
        {
            "uniform": Case({"sampler": SAMPLERS.index("uniform")}),
            "reference": Case({"sampler": SAMPLERS.index("reference")}),
            "16 steps old": Case({"lag": 16}),
            "policy": Case(),
        },
        few_modes,
        (0.03, 0.1),
        0.1,
        1000,
        axis="data drawn by",
    ),
    # Success and collapsed runs by the age of the data.
    "staleness": Study(
        _ALL,
        {str(lag): Case({"lag": lag}) for lag in LAGS},
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        settings_of=_PRIME,
        axis="steps of lag",
    ),
    # K responses to each of 128 / K prompts.
    "group": Study(
        _FEW,
        {str(k): Case({"lag": 4}, {"group": k, "prompts": 128 // k}) for k in (4, 8, 16, 32)},
        axis="K, responses to a prompt",
    ),
    # m, the share of new groups.
    "recency": Study(
        _FEW,
        {
            f"{m:g}": Case({"lag": 2, "recency": m}, {"replay": "groups"})
            for m in (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
        },
        axis="m, share of new groups",
    ),
    # k: steps between two policies that draw.
    "sync": Study(
        _FEW,
        {str(k): Case({"sync_period": k}) for k in (1, 2, 4, 8, 16, 32)},
        axis="k, steps between publications",
    ),
    # For beta above 0, rloo is TB times K / (K - 1); it is also defined for beta 0.
    "beta": Study(("rloo",), _betas(0) | _betas(32), axis="beta"),
    # Mean that centres a group's log-ratio, and the reference of that ratio.
    "centring": Study(
        _OF_CENTRING,
        {
            "frozen": Case({"lag": 10}),
            "reset every 50": Case({"lag": 10}, {"reset_period": 50}),
        },
        num_steps=800,
        axis="reference",
    ),
    # Long runs.
    "reset": Study(
        ("tb",),
        {
            "never": Case({"lag": 4}),
            **{str(n): Case({"lag": 4}, {"reset_period": n}) for n in (200, 100, 50, 25)},
        },
        num_steps=800,
        axis="steps between resets of the reference",
    ),
    # How much of the result of TBA' on stale data is due to its resets of the reference?
    "staleness_resets": Study(
        ("tb", "tba_prime"),
        {
            f"{label}, lag {lag}": Case({"lag": lag}, {"reset_period": period})
            for label, period in (("never", 0), ("every 50", 50))
            for lag in LAGS
        },
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        axis="resets of the reference, lag",
    ),
    # S strings drawn for each group of K; distinct strings are taken first.
    "samples": Study(
        _FEW,
        {
            str(n): Case({"lag": 4}, {"prompts": 16, "group": 8, "samples": n})
            for n in (8, 10, 16, 32)
        },
        axis="S, number of strings drawn for a group of 8",
        shows="data",
    ),
    # Half of the groups are replayed, with probability by reward.
    "priority": _on_sparse(
        {
            "no replay": Case({"lag": 2}, _REPLAYED),
            **{
                f"{c:g}": Case({**_HALF_BY_REWARD, "inverse_temperature": c}, _REPLAYED)
                for c in (0.0, 1.0, 5.0)
            },
        },
        "inverse temperature of replay",
    ),
    # Rounds of 64 responses per step.
    "searchers": _on_sparse(
        {str(n): Case(_HALF_BY_REWARD, {**_REPLAYED, "searchers": n}) for n in (1, 2, 4, 8)},
        "searchers",
    ),
    # Stored strings and the share of replay.
    "capacity": _on_sparse(
        {
            f"{n}, m {m:g}": Case({**_HALF_BY_REWARD, "capacity": n, "recency": m}, _REPLAYED)
            for n in (16, 64, 256)
            for m in (0.25, 0.5, 0.75)
        },
        "strings kept, m",
    ),
    # Which policies have more modes at equal success?
    "diversity": Study(
        _OF_DIVERSITY,
        {str(lag): Case({"lag": lag}, {"num_evaluations": 40}) for lag in (0, 8)},
        axis="steps of lag",
        shows="diversity",
    ),
    # Responses with an end: the end is trained, or excluded from log pi.
    "stops": Study(
        ("tb", "rloo, beta 0", "grpo, beta 0"),
        {
            f"{name}, lag {lag}": Case({"lag": lag}, {"mask_eos": masks})
            for lag in (0, 8)
            for name, masks in (("EOS trained", False), ("EOS left out", True))
        },
        stops,
        axis="end of sequence, lag",
        shows="stops",
    ),
}
