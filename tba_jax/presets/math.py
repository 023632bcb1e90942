# SPDX-License-Identifier: Apache-2.0
"""Mathematical reasoning. What each preset needs, costs and gives: docs/presets.md.

    python -m tba_jax.main --config=math[:PRESET]

arithmetic (default)
    Six-term sums with the embedded start model (0.3M parameters), offline on 2 CPU cores.
gsm8k
    The paper's Figure 1 run: RhoMath-1B (SFT) on GSM8K, with the settings of table 2, appendix B.1
    and the launch script. Parameters and moments are bfloat16, as in the paper, but updates are
    rounded at random: rounded to nearest, most weights lose updates of size 1e-5
    (docs/lab/low_precision.md).
gsm8k_official
    `gsm8k` with the prompt and the masked EOS of the paper's code (docs/fidelity.md). `gsm8k`
    itself uses the prompt format that the start model was tuned on, and trains EOS, as Trajectory
    Balance needs.
math
    TBA' on MATH with Qwen2.5-7B (section 6 and table 4): exact VarGrad, with a reference that is
    reset to the policy. Ratios are not bounded.
tba_prime_2, tba_prime_10
    `math` on data at most 2 and 10 steps old (exactly that old in the paper's code; here with
    --config.driver=sync --config.search.exact_lag=2 or 10), centred by the sampler's mean.
qwen3_1_7b, qwen3_4b, gemma_3_12b, gpt_oss_20b, qwen3_30b_a3b
    `math` with models of 2025 and their chat templates, some with adapters.
"""

from typing import Any

from tba_jax.config.methods import METHODS

PRESETS: dict[str, dict[str, Any]] = {
    "arithmetic": {
        "num_steps": 60,
        "task.max_prompt_tokens": 12,
        # A batch has 40 to 60 distinct responses: one compiled program of 64 rows is enough.
        "batch.micro_batch_rows": 64,
        "optimizer.learning_rate": "linear(4e-4, 0, warmup=3)",
        "search.max_new_tokens": 16,
        # Responses have about seven tokens. More slots would not raise the throughput, but each
        # response would take longer and be two steps staler.
        "search.num_slots": 64,
        # Searcher and trainer share two cores: if one runs ahead, it takes time from the other.
        "replay.pace": "trainer",
        "replay.max_staleness": 2,
        "replay.max_bytes": 256 * 2**20,
        "checkpoint.period": 30,
        "eval.period": 10,
    },
    "gsm8k": {
        "num_steps": 700,
        "sync_period": 2,
        "num_searchers": 3,
        "placement": "split",
        "task.name": "gsm8k",
        "task.max_prompt_tokens": 512,
        "task.num_eval_prompts": 0,
        "model.path": "realtreetune/rho-1b-sft-GSM8K",
        # The official run keeps model and AdamW in pure bfloat16. The top of this file names
        # better settings.
        "model.param_dtype": "bfloat16",
        "model.compute_dtype": "bfloat16",
        # Prompts and responses are far shorter than their limits, so most of a padded row would be
        # padding. A question is computed once for the answers that fit behind it. Eight rows at a
        # time suit a device that must materialise the attention scores (1 GiB in each layer).
        "batch.num_prompts": 7,
        "batch.packed_length": 1024,
        "batch.micro_batch_rows": 8,
        "objective.group_size": 20,
        "objective.beta": "linear(0.014, 0.004, 500)",
        "objective.scale": "paper",
        "objective.importance": "none",
        # The cosine has 600 steps, but only 300 remain, so the run ends at half the peak rate.
        # The paper's run does the same.
        "optimizer.learning_rate": "cosine(1e-5, 0, 600, warmup=50, hold=350)",
        "optimizer.clip_norm": 0.0,
        "search.samples_per_prompt": 24,
        "search.max_new_tokens": 512,
        "search.num_slots": 72,
        # TRL adds 1e-7; it does not matter in bfloat16.
        "search.sampling_temperature": 0.7,
        "search.initial_fill": 500,
        "eval.period": 100,
    },
    "math": {
        "num_steps": 400,
        "num_searchers": 4,
        "placement": "split",
        # 16 bytes of master weight, moments and reference per parameter, and its gradient: 152 GB
        # for 7.6 billion, 38 GB on each of four devices.
        "mesh.fsdp": 4,
        "task.name": "math",
        "task.max_prompt_tokens": 1024,
        "task.num_eval_prompts": 500,
        "model.path": "Qwen/Qwen2.5-7B",
        "model.compute_dtype": "bfloat16",
        # One group per trainer device at a time, a row with its prompt once.
        "batch.num_prompts": 32,
        "batch.micro_batch_rows": 64,
        "objective.beta": 0.005,
        "objective.importance": "none",
        "optimizer.learning_rate": 1e-6,
        "optimizer.b2": 0.99,
        "optimizer.weight_decay": 0.01,
        "reference.reset_period": 50,
        "search.max_new_tokens": 2048,
        "search.num_slots": 64,
        # No replay, and data at most two steps old; TBA' with async_level = 2 has exactly two.
        "replay.recency_prob": 1.0,
        "replay.pace": "trainer",
        "replay.max_staleness": 2,
        "eval.period": 5,
    },
}

_MATH = PRESETS["math"]
PRESETS["gsm8k_official"] = {
    **PRESETS["gsm8k"],
    "task.name": "gsm8k_official",
    "objective.mask_eos": True,
}
for _lag in (2, 10):
    PRESETS[f"tba_prime_{_lag}"] = {
        **_MATH,
        **METHODS["tba_prime"],
        "replay.max_staleness": _lag,
    }

_ONE_DEVICE = {"placement": "shared", "num_searchers": 1, "mesh.fsdp": 1}
# Adapters are float32, and the model as published.
_ADAPTERS = {"lora.rank": 32, "model.param_dtype": "bfloat16"}
# A micro-batch gathers the matrices of all experts once (docs/lab/experts.md).
_MANY_ROWS = {"batch.micro_batch_rows": 128}
for _name, _path, _changes in (
    ("qwen3_1_7b", "Qwen/Qwen3-1.7B", _ONE_DEVICE),
    ("qwen3_4b", "Qwen/Qwen3-4B", _ONE_DEVICE | _ADAPTERS),
    ("gemma_3_12b", "google/gemma-3-12b-it", {}),
    ("gpt_oss_20b", "openai/gpt-oss-20b", _ADAPTERS),
    ("qwen3_30b_a3b", "Qwen/Qwen3-30B-A3B", _ADAPTERS | _MANY_ROWS),
):
    PRESETS[_name] = {
        **_MATH,
        **_changes,
        "task.chat": True,
        "objective.importance": None,  # the default bounds ratios
        "model.path": _path,
    }
