# SPDX-License-Identifier: Apache-2.0
"""Settings of held-out evaluation."""

from dataclasses import dataclass

from tba_jax.settings import Section, field, need


@dataclass(frozen=True)
class EvalSettings(Section):
    """Evaluation on held-out prompts."""

    period: int = field(
        50, "steps between evaluations; 0: only before and after training", at_least=0
    )
    num_samples: int = field(1, "responses per prompt; with more than 1, also pass@k", at_least=1)
    temperature: float = field(0.0, "sampling temperature, with top-p 1; 0: greedy", at_least=0.0)
    gold: str = field(
        "",
        "judge of the win rate: a reward model, in bfloat16 (on CPU in float32), or "
        "package.module:function or FILE.py:function; adds divergence from the start model",
    )
    embedding_path: str = field(
        "", "task redteam: folder or hub ID of a sentence embedding model, for cosine_diversity"
    )

    @property
    def gold_reward(self) -> str:
        """Function that judges the win rate; "" without one."""
        is_function = ":" in self.gold and not self.gold.startswith("embedded:")
        return self.gold if is_function else ""

    @property
    def gold_model(self) -> str:
        """Reward model that judges the win rate; "" without one."""
        return "" if self.gold_reward else self.gold

    def check(self) -> None:
        need(
            self.num_samples == 1 or self.temperature > 0,
            "eval.num_samples",
            self.num_samples,
            "greedy responses to a prompt are all the same",
            "Set --config.eval.temperature=1.0 or --config.eval.num_samples=1.",
        )
        need(
            not self.gold_reward or all(self.gold_reward.rpartition(":")),
            "eval.gold",
            self.gold,
            "must be a reward model, package.module:function or path/to/file.py:function",
            "For example --config.eval.gold=my_rewards:length_reward.",
        )
