# SPDX-License-Identifier: Apache-2.0
"""Definitions of the studies on enumerable problems, and the objectives that they compare.

A study combines objectives with cases. Cases that differ only in their `Condition` have equal
`Settings` and share a program. Protocols: docs/lab/claims.md.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.config.methods import fields_of
from tba_jax.config.schema import make_config
from tba_jax.studies.problems import Problem, few_modes, sums
from tba_jax.studies.training import SAMPLERS, Condition, Settings
from tba_jax.train.config import ObjectiveSettings

# Name -> settings of the section `objective`; `preset` is one of `config.methods`.
OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "tb": {"preset": "tba"},
    "tb, learned log Z": {"preset": "tba", "log_z": "learned"},
    "tba_prime": {"preset": "tba_prime"},
    "tba_prime_live": {"preset": "tba_prime_live"},
    "rloo": {"name": "rloo"},
    "rloo, beta 0": {"name": "rloo", "beta": 0.0},
    "proximal_rloo": {"name": "proximal_rloo"},
    "grpo": {"preset": "grpo"},
    "grpo, beta 0": {"name": "grpo", "beta": 0.0},
    "dr_grpo": {"name": "dr_grpo"},
    "dapo": {"preset": "dapo"},
    "gspo": {"name": "gspo"},
    "cispo": {"preset": "cispo"},
    "ipo": {"name": "ipo"},
    "ppo": {"preset": "ppo"},
    "online_dpo": {"name": "online_dpo"},
}


def settings_of(name: str, beta: float) -> ObjectiveSettings:
    """Return the settings of an objective, with constant `beta` unless the objective sets beta."""
    given = dict(OBJECTIVES[name])
    of_preset = fields_of(given.pop("preset")) if "preset" in given else {}
    fields = {"objective.beta": beta}
    fields |= {k: v for k, v in of_preset.items() if k.startswith("objective.")}
    fields |= {f"objective.{field}": value for field, value in given.items()}
    return make_config(fields).objective


@dataclasses.dataclass(frozen=True)
class Study:
    """Objectives and cases that are compared.

    Attributes:
        names: names of objectives.
        cases: label -> fields of `Condition` and `Settings` that differ from the study's.
        problem: function that makes the problem.
        rates: learning rates; the best rate is selected for each objective and case.
        beta: beta of the target, and of objectives that do not set beta.
        num_steps: steps of each run.
        settings_of: objective -> further fields of `Settings`.
        axis: description of the cases.
        is_of_target: whether the distance to the target is of interest, instead of success.
        has_slopes: whether the cases are lags, so that success has a slope over them.
    """

    names: tuple[str, ...]
    cases: Mapping[str, Mapping[str, Any]]
    problem: Callable[[], Problem] = sums
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    beta: float = 0.05
    num_steps: int = 400
    settings_of: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    axis: str = ""
    is_of_target: bool = False
    has_slopes: bool = False

    def condition(self, label: str) -> Condition:
        """Return the condition of a case."""
        own = {k: x for k, x in self.cases[label].items() if k in Condition._fields}
        return Condition(self.beta, self.beta)._replace(**own)

    def settings(self, name: str, label: str) -> Settings:
        """Return the settings of an objective in a case."""
        own = {k: x for k, x in self.cases[label].items() if k not in Condition._fields}
        of_name = self.settings_of.get(name, {})
        return Settings(num_steps=self.num_steps, target_beta=self.beta, **{**of_name, **own})


_ALL = tuple(OBJECTIVES)
_FEW = ("tb", "grpo, beta 0", "proximal_rloo")
_PRIME = {name: {"reset_period": 50} for name in ("tba_prime", "tba_prime_live")}
_BETAS = (0.0, 0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5)
_ANNEALED = ((0.2, 0.005), (0.5, 0.02))


def _betas(lag: int) -> dict[str, dict[str, Any]]:
    held = {f"{b:g}, lag {lag}": {"beta": b, "beta_final": b} for b in _BETAS}
    moved = {f"{b:g} to {c:g}, lag {lag}": {"beta": b, "beta_final": c} for b, c in _ANNEALED}
    return {label: {**fields, "lag": lag} for label, fields in (held | moved).items()}


STUDIES: Mapping[str, Study] = {
    # Which objectives converge to pi_ref exp(r / beta)?
    "optimum": Study(
        _ALL,
        {
            "uniform": {"sampler": SAMPLERS.index("uniform")},
            "reference": {"sampler": SAMPLERS.index("reference")},
            "16 steps old": {"lag": 16},
            "policy": {},
        },
        few_modes,
        (0.03, 0.1),
        0.1,
        1000,
        axis="data drawn by",
        is_of_target=True,
    ),
    # Success and collapsed runs by the age of the data.
    "staleness": Study(
        _ALL,
        {str(lag): {"lag": lag} for lag in (0, 8, 32)},
        rates=(1e-3, 3e-3, 1e-2, 3e-2),
        settings_of=_PRIME,
        axis="steps of lag",
        has_slopes=True,
    ),
    # K responses to each of 128 / K prompts.
    "group": Study(
        _FEW,
        {str(k): {"lag": 4, "group": k, "prompts": 128 // k} for k in (4, 8, 16, 32)},
        axis="K, responses to a prompt",
    ),
    # m, the share of new groups.
    "recency": Study(
        _FEW,
        {
            f"{m:g}": {"lag": 2, "recency": m, "replays": True}
            for m in (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
        },
        axis="m, share of new groups",
    ),
    # k: steps between two policies that draw.
    "sync": Study(
        _FEW,
        {str(k): {"sync_period": k} for k in (1, 2, 4, 8, 16, 32)},
        axis="k, steps between publications",
    ),
    # For beta above 0, rloo is TB times K / (K - 1); it is also defined for beta 0.
    "beta": Study(("rloo",), _betas(0) | _betas(32), axis="beta"),
}
