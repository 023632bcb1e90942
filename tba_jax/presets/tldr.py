# SPDX-License-Identifier: Apache-2.0
"""Preference tuning with a learned reward: TL;DR summaries.

    python -m tba_jax.main --config=tldr[:PRESET]

toy (default)
    Posts are strings of letters, and responses are digests of them. The policy (0.1M parameters)
    and the reward model, trained on noisy comparisons, are embedded. The exact gold reward judges
    the evaluations. Offline on 2 CPU cores. Win rates by divergence: docs/lab/tldr_toy.md.
pythia410m, pythia1b, pythia2.8b, pythia2.8b_slow
    The paper's runs (table 3, appendix B.2): Pythia SFT policies and reward models of the same
    size, 256 steps of 8 prompts x 20 responses, three searchers; the slow one has 825 steps (figure
    4). A gold reward model of 6.9B parameters compares responses with human references.
"""


def _pythia(size: str) -> dict:
    """Return the settings of the paper's run for one size of Pythia."""
    return {
        "num_steps": 256,
        "sync_period": 10,
        "num_searchers": 3,
        "placement": "split",
        "task.name": "tldr",
        "task.max_prompt_tokens": 512,
        "task.num_eval_prompts": 0,
        # float32 as in the paper.
        "model.path": f"mnoukhov/pythia{size}-sft-tldr",
        # Posts are four times as long as summaries, and one post serves twenty summaries.
        "batch.num_prompts": 8,
        "objective.group_size": 20,
        # The paper's beta falls towards 0.05 in 128 steps, and jumps to 0.05 at its update 32,
        # counted from 1.
        "objective.beta": "linear(1, 0.05, 128, jump=31)",
        "objective.scale": "paper",
        "objective.importance": "none",
        "optimizer.learning_rate": "linear(3e-6, 0)",
        "optimizer.clip_norm": 0.0,
        "search.samples_per_prompt": 20,
        "search.max_new_tokens": 128,
        "search.num_slots": 160,
        "search.sampling_temperature": 0.7,
        "search.initial_fill": 10_000,
        # Softmax of the reward, at temperature 1, over a prompt's stored responses.
        "replay.recency_prob": 0.5,
        "replay.priority_temperature": 1.0,
        "reward.model_path": f"mnoukhov/pythia{size}-rm-tldr6.9b",
        # TRL's penalty_reward_value.
        "reward.missing_eos": -1.0,
        "eval.period": 128,
        "eval.temperature": 0.01,
        "eval.gold": "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr",
    }


PRESETS = {
    "toy": {
        "num_steps": 120,
        "sync_period": 5,
        "task.name": "tldr_toy",
        "task.max_prompt_tokens": 26,
        "model.path": "embedded:tldr_toy_policy",
        "batch.num_prompts": 8,
        "objective.beta": "linear(1, 0.1, 60, jump=15)",
        "optimizer.learning_rate": "linear(1e-3, 0, warmup=5)",
        "search.max_new_tokens": 12,
        "search.num_slots": 128,
        "replay.recency_prob": 0.5,
        "replay.priority_temperature": 1.0,
        "replay.pace": "trainer",
        "reward.model_path": "embedded:tldr_toy_reward",
        # 1 below the mean score of the reference digests, 0.31.
        "reward.missing_eos": -0.69,
        "checkpoint.period": 0,
        "eval.period": 20,
        "eval.temperature": 1.0,
        "eval.gold": "tba_jax.rewards.graders:digest_reward",
    },
    "pythia410m": _pythia("410m"),
    "pythia1b": _pythia("1b"),
    "pythia2.8b": _pythia("2.8b"),
    "pythia2.8b_slow": {
        **_pythia("2.8b"),
        "num_steps": 825,
        "objective.beta": "linear(1, 0.05, 412, jump=139)",
    },
}
