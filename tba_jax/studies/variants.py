# SPDX-License-Identifier: Apache-2.0
"""The named studies of whole runs: their variants, as arguments of the main command. Data, no code.

Nothing is known here of how they are run or shown. Invariant: every variant is a valid config
(tests/studies/test_study.py).
"""

from collections.abc import Mapping
from typing import NamedTuple

from tba_jax.studies.named import OBJECTIVES, overrides_of

_SYNC = ("driver=sync", "replay.pace=off")
# Short enough that no variant has reached the ceiling, so that a difference could show.
_SHORT = ("num_steps=45", "eval.period=15", "task.num_eval_prompts=1024", "eval.num_slots=512")

# At half the rate of the preset success falls back less between two evaluations.
_RATE = "optimizer.learning_rate=linear(5e-4, 0, warmup=5)"
_ATTACKS = ("num_steps=80", "eval.period=20", _RATE, *_SYNC)

_LONG_ROUNDS = ("search.prompts_per_round=64", "search.num_slots=64", "search.outbox_bytes=32000")

# The TL;DR miniature by every objective: on policy, and on data exactly 16 updates old. Baselines
# hold beta, as theirs do; TB anneals it, as the paper's TL;DR runs do.
_LAGGED = (*_SYNC, "sync_period=1", "replay.recency_prob=1.0")
_BASELINE = (*_LAGGED, "objective.beta=0.1")
_ONLINE_DPO = (*_BASELINE, "objective.name=online_dpo")
_RLOO = (*_BASELINE, "objective.name=rloo")
_PROXIMAL = (*_BASELINE, "objective.name=proximal_rloo")
_LAG = "search.exact_lag=16"


# The learning curve of the main job, at 60 steps of the schedule.
_CURVE = ("num_steps=60", "eval.period=6", "task.num_eval_prompts=512")
# On this job these are points of another objective's loss, or another name for it.
_LEFT_OUT = ("tb, leave one out", "tba_prime_live", "grpo, beta 0")


class Study(NamedTuple):
    """What a study runs.

    Attributes:
        config: as --config names it.
        variants: name -> config overrides; the others are compared with the first.
        is_frontier: draw the win rate against the divergence instead of against steps.
        shown: evaluation metrics that a second table shows, as means over seeds.
        counts_finds: add to it how many different attacks of the searchers succeeded.
    """

    config: str
    variants: Mapping[str, tuple[str, ...]]
    is_frontier: bool = False
    shown: tuple[str, ...] = ()
    counts_finds: bool = False


STUDIES: dict[str, Study] = {
    # Win rate against divergence from the start, on the TL;DR miniature.
    "tldr_frontier": Study(
        "tldr",
        {
            "tb, async": (),
            "tb, lag 16": (*_LAGGED, _LAG),
            "online dpo, lag 16": (*_ONLINE_DPO, _LAG),
            "rloo, lag 16": (*_RLOO, _LAG),
            "proximal rloo, lag 16": (*_PROXIMAL, _LAG),
            "tb, lag 0": _LAGGED,
            "online dpo, lag 0": _ONLINE_DPO,
            "rloo, lag 0": _RLOO,
            "proximal rloo, lag 0": _PROXIMAL,
        },
        is_frontier=True,
    ),
    # The main job as a user runs it.
    "main_job": Study("math", {"async": ()}),
    # Every objective and preset on the main job, at the main job's learning rate.
    "objectives": Study(
        "math",
        {
            name: (*overrides_of(name), *_CURVE, "optimizer.learning_rate=2e-4")
            for name in OBJECTIVES
            if name not in _LEFT_OUT
        },
        shown=("pass_at_1",),
    ),
    # The same number of trained responses by both drivers, and on data exactly D steps old.
    "drivers": Study(
        "math",
        {
            "sync": (*_SHORT, *_SYNC),
            "async": _SHORT,
            "sync, lag 4": (*_SHORT, *_SYNC, "search.exact_lag=4"),
            "sync, lag 16": (*_SHORT, *_SYNC, "search.exact_lag=16"),
        },
    ),
    # The same updates of parameters and moments kept in float32 or bfloat16, searchers' in float32.
    "low_precision": Study(
        "math",
        {
            "float32": (*_SHORT, *_SYNC),
            "bfloat16, nearest": (*_SHORT, *_SYNC, "model.param_dtype=bfloat16"),
            "bfloat16, stochastic": (
                *_SHORT,
                *_SYNC,
                "model.param_dtype=bfloat16",
                "optimizer.rounding=stochastic",
            ),
        },
    ),
    # Data one publication old of 1 to 8 searchers, each a round of 64 attacks per step, against one
    # actor in turn with the trainer, with and without replay. The searchers are virtual: the
    # synchronous driver does their rounds in turn, so that the figures are about the data, not
    # about how many cores there are.
    "redteam_scaling": Study(
        "redteam",
        {
            **{
                f"TBA, {n} searcher{'s' * (n > 1)}": (
                    *_ATTACKS,
                    "search.exact_lag=1",
                    f"num_searchers={n}",
                )
                for n in (1, 2, 4, 8)
            },
            "sync, replay": _ATTACKS,
            "sync, on-policy": (*_ATTACKS, "replay.recency_prob=1.0"),
        },
        shown=(
            "success_rate",
            "distinct_success_share",
            "edit_diversity",
            "success_edit_diversity",
        ),
        counts_finds=True,
    ),
    # Newer weights when every response under way has ended, or between chunks.
    "in_flight": Study(
        "math",
        {
            "round": (*_SHORT, *_LONG_ROUNDS, "search.swap=round"),
            "in flight": (*_SHORT, *_LONG_ROUNDS, "search.swap=in_flight"),
        },
    ),
    # The stop is trained, or left out of log pi.
    "end_of_sequence": Study(
        "math",
        {
            "EOS trained": (*_SHORT, *_SYNC),
            "EOS left out": (*_SHORT, *_SYNC, "objective.mask_eos=True"),
        },
        shown=("response_length_mean",),
    ),
    # Weights lie in a mailbox and searchers go on, or each side waits for the other.
    "barrier": Study(
        "math",
        {
            f"{name}, k {k}": (
                *_SHORT,
                f"sync_period={k}",
                f"replay.max_staleness={2 * k}",
                *lag,
            )
            for k in (1, 2, 4, 8)
            for name, lag in (("mailbox", ()), ("barrier", ("search.exact_lag=1",)))
        },
    ),
}
