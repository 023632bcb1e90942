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
    gold_model: str = field(
        "", "reward model whose rewards decide the win rate; in bfloat16, on CPU in float32"
    )
    gold_reward: str = field(
        "",
        "package.module:function or FILE.py:function whose rewards decide the win rate, instead "
        "of gold_model",
    )
    reference_metrics: bool = field(
        False, "also report perplexity under the start model and KL to it"
    )
    embedding_path: str = field(
        "", "task redteam: folder or hub ID of a sentence embedding model, for cosine_diversity"
    )

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
            "eval.gold_reward",
            self.gold_reward,
            "must read package.module:function or path/to/file.py:function",
            "For example --config.eval.gold_reward=my_rewards:length_reward.",
        )
        need(
            not (self.gold_reward and self.gold_model),
            "eval.gold_reward",
            self.gold_reward,
            f"config.eval.gold_model = {self.gold_model!r} also sets a gold reward",
            "Leave one of them empty, for example --config.eval.gold_model=''.",
        )
