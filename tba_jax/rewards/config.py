# SPDX-License-Identifier: Apache-2.0
"""Settings of rewards: processes and models that score, and the victim of red-teaming."""

import math
from dataclasses import dataclass

from tba_jax.settings import Section, field, need, share

START_MODEL = "embedded:start_model"
CHAT_TEMPLATE = "chat"
ATTACK = "{attack}"
DEFAULT_MAX_WORKERS = 32  # each takes memory: 0.1 GB with SymPy


@dataclass(frozen=True)
class RewardSettings(Section):
    """Settings of reward processes and reward models."""

    model_path: str = field(
        "", "reward model (one label): HF folder, hub ID or embedded:NAME; empty: none"
    )
    missing_eos: float = field(
        math.inf, "reward of a response that the length limit cut; inf: the reward model's score"
    )
    num_workers: int = field(
        0,
        "processes of rewards, and of environments, shared by all searchers of a process; "
        f"0: half of its cores, at most {DEFAULT_MAX_WORKERS}, and at least 4 for environments",
        at_least=0,
        at_most=512,
        on_resume=True,
    )
    timeout_s: float = field(
        10.0,
        "deadline in seconds of a call of a reward or environment; a late process is killed",
        above=0,
        on_resume=True,
    )
    max_failure_rate: float = share(
        0.5,
        "share of failed rewards, of responses graded together, above which the run stops",
        on_resume=True,
    )


@dataclass(frozen=True)
class VictimSettings(Section):
    """Settings of task redteam: the model under attack and its prompt."""

    path: str = field("", "HF folder or hub ID; empty: the embedded start model")
    template: str = field(
        ATTACK,
        f"the victim's prompt, with the attack in place of {ATTACK}; {CHAT_TEMPLATE}: the attack "
        "is a user message of the victim's chat template",
    )

    def check(self) -> None:
        need(
            self.template == CHAT_TEMPLATE or self.template.count(ATTACK) == 1,
            "victim.template",
            self.template,
            f"must contain {ATTACK} once, the place of the attack",
            f"Set --config.victim.template={CHAT_TEMPLATE} for the victim's own chat template.",
        )


@dataclass(frozen=True)
class ClassifierSettings(Section):
    """Settings of task redteam: the class of responses that an attack should cause."""

    path: str = field(
        "", "HF folder or hub ID of a RoBERTa encoder, or of a language model as guard; empty: none"
    )
    target: str = field(
        "",
        "encoder: a label of its config.json; guard: the text of the verdict (Llama-Guard "
        "3: two newlines and unsafe); without classifier.path: a regular expression",
    )
