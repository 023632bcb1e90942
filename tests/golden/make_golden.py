# SPDX-License-Identifier: Apache-2.0
"""Make the golden files of tests/models with transformers and torch.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python tests/golden/make_golden.py [folder of stories260k]

For each model of `MODELS`, of random weights: its folder, and NAME.npz with the logits of two rows,
alone and padded on either side, and 64 greedy tokens (classifiers: the scores). For each encoder of
`ENCODERS`: hidden states and answers for four rows. For stories260k: its greedy text. Of the tests,
only test_parity needs torch and this script.

Greedy tokens can only be compared where no two logits tie: `random_model` spreads the weights
(fresh models are nearly uniform), and a seed is passed over when its two best logits come closer
than MARGIN at any greedy step, or when its continuations soon repeat a few tokens. Random recurrent
layers amplify rounding more than others; a seed is passed over when it is above MAX_AMPLIFIED.
"""

import copy
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
MARGIN = 5e-3  # the logits of two float32 implementations differ by about 1e-5 here
# Largest change of a logit, of the largest one, when float32 weights change in their last place.
MAX_AMPLIFIED = 3e-6
MIN_DISTINCT = 10  # tokens in the two continuations
PAD, NUM_GREEDY = 0, 64
LENGTHS = (12, 7)

_COMMON = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2}
_GPT2 = {
    "vocab_size": 48,
    "n_embd": 16,
    "n_inner": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": PAD,
}


# Contexts short enough that the scaled rotations differ from the plain ones within these rows.
# Heads of 16 make YaRN's ramp longer than a step.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 2.5}


def _plain(theta):
    return {"rope_theta": theta, "rope_type": "default"}


def _llama(rope=None, **changes):
    rope = {"rope_theta": 500000.0} | (rope or {"rope_type": "default"})
    return transformers.LlamaConfig(**(_GROUPED | {"rope_parameters": rope} | changes))


def _qwen2(rope, **changes):
    return transformers.Qwen2Config(**(_GROUPED | {"rope_parameters": rope} | changes))


def _neox(fraction=0.25, rope=None, **changes):
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": fraction} | (rope or _plain(10000.0))
    # Heads of 8, so that a quarter of one is a pair.
    values = _COMMON | {"num_attention_heads": 2, "rope_parameters": rope}
    return transformers.GPTNeoXConfig(**(values | changes))


def _gpt2(**changes):
    return transformers.GPT2Config(**(_GPT2 | changes))


_SLIDING, _FULL, _LINEAR_ATTENTION = "sliding_attention", "full_attention", "linear_attention"
_QWEN3 = _GROUPED | {
    "rope_parameters": _plain(1000000.0),
    "head_dim": 6,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2}
_GEMMA = _GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 5}
_QWEN3_5 = _GROUPED | {
    "head_dim": 8,
    # A pattern of two layers, and one more.
    "num_hidden_layers": 3,
    "layer_types": [_LINEAR_ATTENTION, _FULL, _LINEAR_ATTENTION],
    "rope_parameters": _plain(10000.0)
    | {"partial_rotary_factor": 0.25, "mrope_section": [1, 0, 0], "mrope_interleaved": True},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Written as golden files. A head_dim that is not hidden_size / heads, biases, tied and untied
# heads, every rotary scaling and activation occur somewhere.
MODELS = {
    "llama": _llama(
        head_dim=6,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "llama3": _llama(LLAMA3, head_dim=8, tie_word_embeddings=True),
    "qwen2": _qwen2(_plain(1000000.0), tie_word_embeddings=True),
    "qwen2_yarn": _qwen2(YARN, head_dim=16, tie_word_embeddings=False),
    "qwen3": transformers.Qwen3Config(**_QWEN3),
    "qwen3_moe": transformers.Qwen3MoeConfig(**_QWEN3, **_EXPERTS, norm_topk_prob=True),
    "gemma2": transformers.Gemma2Config(
        **_GEMMA,
        rope_parameters=_plain(10000.0),
        attn_logit_softcapping=3.0,
        final_logit_softcapping=9.0,
    ),
    # A pattern of three layers, and one more.
    "gemma3": transformers.Gemma3TextConfig(
        **_GEMMA | {"num_hidden_layers": 4, "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING]},
        rope_parameters={_FULL: LINEAR | {"rope_theta": 1000000.0}, _SLIDING: _plain(10000.0)},
    ),
    "mistral": transformers.MistralConfig(
        **_GROUPED, rope_parameters=_plain(10000.0), sliding_window=5, head_dim=6
    ),
    "olmo3": transformers.Olmo3Config(
        **_GROUPED | {"num_hidden_layers": 4},
        rope_parameters={_FULL: YARN, _SLIDING: _plain(10000.0)},
        sliding_window=5,
    ),
    # The pattern is two layers long.
    "gpt_oss": transformers.GptOssConfig(
        **_GROUPED | {"num_hidden_layers": 3},
        rope_parameters=YARN | {"truncate": False},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
    ),
    "qwen3_5": transformers.Qwen3_5TextConfig(**_QWEN3_5),
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(
        **_QWEN3_5, **_EXPERTS, shared_expert_intermediate_size=12
    ),
    "gpt_neox": _neox(),
    "gpt_neox_serial": _neox(
        0.5, LINEAR, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_fast"
    ),
    "gpt2": _gpt2(),
    "qwen2_reward": _qwen2(
        _plain(1000000.0), num_labels=1, architectures=["Qwen2ForSequenceClassification"]
    ),
    "gpt_neox_reward": _neox(num_labels=1, architectures=["GPTNeoXForSequenceClassification"]),
    "gpt2_classifier": _gpt2(num_labels=3, architectures=["GPT2ForSequenceClassification"]),
}
_ENCODER = {name: _COMMON[name] for name in list(_COMMON)[:5]} | {"max_position_embeddings": 24}
ENCODERS = {
    "roberta": transformers.RobertaConfig(
        **_ENCODER,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        id2label={0: "nothate", 1: "hate", 2: "unsure"},
        architectures=["RobertaForSequenceClassification"],
    ),
    "roberta_bert": transformers.BertConfig(**_ENCODER, architectures=["BertModel"]),
}
ENCODER_LENGTHS = (12, 5, 8, 1)


def model_class(config):
    """The transformers class of a config: a language model unless it names another."""
    if not config.architectures:
        return transformers.AutoModelForCausalLM
    if config.architectures[0].endswith("ForSequenceClassification"):
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModel


@torch.no_grad()
def random_model(config, seed: int) -> torch.nn.Module:
    """A float32 model whose logits are far from uniform, and no norm or bias at its start value."""
    torch.manual_seed(seed)
    # A copy: saving a model writes its class into its config.
    model = model_class(config).from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def padded(rows: np.ndarray, side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, mask, positions): the first LENGTHS tokens of each row, two pads too many."""
    width = rows.shape[1] + 2
    tokens, mask = np.full((len(rows), width), PAD), np.zeros((len(rows), width), int)
    for i, n in enumerate(LENGTHS):
        where = slice(0, n) if side == "right" else slice(width - n, width)
        tokens[i, where], mask[i, where] = rows[i, :n], 1
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return tuple(torch.tensor(x) for x in (tokens, mask, positions))


@torch.no_grad()
def outputs(model: torch.nn.Module, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Logits (or scores) of the rows as they are, and padded on either side."""
    found = {"tokens": rows.astype(np.int32), "logits": model(torch.tensor(rows)).logits.numpy()}
    for side in ("left", "right"):
        tokens, mask, positions = padded(rows, side)
        logits = model(tokens, attention_mask=mask, position_ids=positions).logits
        found[f"{side}_mask"] = mask.numpy().astype(bool)
        found[f"{side}_tokens"] = tokens.numpy().astype(np.int32)
        found[f"{side}_logits"] = logits.numpy()
    return found


@torch.no_grad()
def encoder_outputs(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Right-padded tokens and mask; their hidden states; logits, or embeddings of sentences."""
    rng, pad = np.random.default_rng(0), model.config.pad_token_id
    tokens = np.full((len(ENCODER_LENGTHS), max(ENCODER_LENGTHS)), pad, np.int32)
    mask = np.arange(tokens.shape[1]) < np.array(ENCODER_LENGTHS)[:, None]
    for row, n in enumerate(ENCODER_LENGTHS):
        tokens[row, :n] = rng.integers(3, model.config.vocab_size, n)
    tokens[0, 4] = pad  # a padding token in a text
    inputs = {"input_ids": torch.tensor(tokens).long(), "attention_mask": torch.tensor(mask).long()}
    found = {"tokens": tokens, "mask": mask}
    if hasattr(model, "classifier"):
        hidden = model.roberta(**inputs).last_hidden_state
        return found | {"hidden": hidden.numpy(), "logits": model(**inputs).logits.numpy()}
    hidden = model(**inputs).last_hidden_state
    weight = inputs["attention_mask"][..., None].float()
    unit = torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)
    return found | {"hidden": hidden.numpy(), "embeddings": unit.numpy()}


@torch.no_grad()
def greedy(
    model: torch.nn.Module, tokens: torch.Tensor, num_tokens: int
) -> tuple[np.ndarray, float]:
    """(greedy continuation, smallest lead of a best logit over the second), without a cache."""
    start, lead = tokens.shape[1], np.inf
    for _ in range(num_tokens):
        logits = model(tokens).logits[:, -1]
        best = logits.topk(2).values
        lead = min(lead, (best[:, 0] - best[:, 1]).min().item())
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens[:, start:].numpy().astype(np.int32), lead


@torch.no_grad()
def amplified(model: torch.nn.Module, rows: np.ndarray, logits: np.ndarray) -> float:
    """Change of logits, relative to the largest, when every weight changes by 1e-7 of itself."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    return np.abs(other(torch.tensor(rows)).logits.numpy() - logits).max() / np.abs(logits).max()


def model_and_outputs(config) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """A model of the first seed that serves, and everything the tests compare."""
    for seed in range(100):
        model = random_model(config, seed)
        rows = np.random.default_rng(seed).integers(1, config.vocab_size, (2, LENGTHS[0]))
        found = outputs(model, rows)
        if _LINEAR_ATTENTION in (getattr(config, "layer_types", None) or ()):
            if amplified(model, rows, found["logits"]) > MAX_AMPLIFIED:
                continue
        if config.architectures:
            return model, found
        found["greedy"], lead = greedy(model, torch.tensor(rows), NUM_GREEDY)
        if lead > MARGIN and len(np.unique(found["greedy"])) >= MIN_DISTINCT:
            return model, found
    raise RuntimeError(f"every seed has two logits within {MARGIN} or repeats itself")


@torch.no_grad()
def main() -> None:
    """Write the golden files beside this script."""
    for name, config in (MODELS | ENCODERS).items():
        if name in ENCODERS:
            found = encoder_outputs(model := random_model(config, 0))
        else:
            model, found = model_and_outputs(config)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(HERE / f"{name}.npz", **found)
    source = sys.argv[1] if len(sys.argv) > 1 else HERE / "../../../shared/models/stories260k"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    prompt = "Once upon a time"
    ids = [tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]
    out = greedy(model, torch.tensor([ids]), 64)[0][0].tolist()
    golden = {
        "prompt": prompt,
        "prompt_ids": ids,
        "greedy_ids": out,
        "text": tokenizer.decode(out, skip_special_tokens=True),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }
    (HERE / "stories260k.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
