# SPDX-License-Identifier: Apache-2.0
"""Architecture of a config's model from its config.json, without its weights.

The sources are, in this order, config.json of a local folder, config.json on the hub, and, if the
hub cannot be reached, the table below with published shapes of the presets' models.

Invariant: the source of the shape is always returned with it.
"""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from tba_jax.models.hf import folders

_TIMEOUT_S = 5.0

_RHO_1B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_PYTHIA = {
    "model_type": "gpt_neox",
    "vocab_size": 50304,
    "rotary_pct": 0.25,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
}


def _pythia(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return _PYTHIA | {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def _qwen(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Any:
    return {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    } | more


_LLAMA_3_2_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
_LLAMA_3_1_8B = _LLAMA_3_2_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "rope_scaling": _LLAMA_3_2_1B["rope_scaling"] | {"factor": 8.0},
    "tie_word_embeddings": False,
}
_LLAMA_3_1_70B = _LLAMA_3_1_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_QWEN3_1_7B = _QWEN3 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
_QWEN3_4B = _QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
_QWEN3_30B_A3B = _QWEN3 | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
# Settings that are missing here have their defaults in transformers, as in this model.
_QWEN3_5_9B = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
_QWEN3_5_35B_A3B = _QWEN3_5_9B | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
}
_GEMMA_3_12B = {
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "tie_word_embeddings": False,
}
_ROBERTA_BASE = {
    "model_type": "roberta",
    "vocab_size": 50265,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
# A reward model: a language model with one label in place of the vocabulary.
_REWARD = {
    "architectures": ["GPTNeoXForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
}
_PYTHIA_SIZES = {
    "410m": _pythia(1024, 24, 16),
    "1b": _pythia(2048, 16, 8),
    "2.8b": _pythia(2560, 32, 32),
    "6.9b": _pythia(4096, 32, 32) | {"vocab_size": 50432},
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "realtreetune/rho-1b-sft-GSM8K": _RHO_1B,
    "microsoft/rho-math-1b-v0.1": _RHO_1B,
    "Qwen/Qwen2.5-0.5B": _qwen(896, 4864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B": _qwen(1536, 8960, 28, 12, 2, max_position_embeddings=131072),
    "Qwen/Qwen2.5-7B": _qwen(
        3584,
        18944,
        28,
        28,
        4,
        vocab_size=152064,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    **{f"EleutherAI/pythia-{size}": shape for size, shape in _PYTHIA_SIZES.items()},
    **{f"EleutherAI/pythia-{size}-deduped": shape for size, shape in _PYTHIA_SIZES.items()},
    **{f"mnoukhov/pythia{size}-sft-tldr": shape for size, shape in _PYTHIA_SIZES.items()},
    **{
        f"mnoukhov/pythia{size}-rm-tldr6.9b": shape | _REWARD
        for size, shape in _PYTHIA_SIZES.items()
    },
    "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr": _PYTHIA_SIZES["6.9b"] | _REWARD,
    "Qwen/Qwen3-1.7B": _QWEN3_1_7B,
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen/Qwen3.5-9B": _QWEN3_5_9B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN3_5_35B_A3B,
    "google/gemma-3-12b-it": _GEMMA_3_12B,
    "openai/gpt-oss-20b": _GPT_OSS_20B,
    "openai-community/gpt2": _GPT2,
    "gpt2": _GPT2,
    "vicgalle/gpt2-alpaca": _GPT2,
    "meta-llama/Llama-3.2-1B": _LLAMA_3_2_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_3_2_1B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3_1_8B,
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_3_1_70B,
    "meta-llama/Llama-Guard-3-8B": _LLAMA_3_1_8B,
    "facebook/roberta-hate-speech-dynabench-r4-target": _ROBERTA_BASE
    | {"id2label": {"0": "nothate", "1": "hate"}},
    "sentence-transformers/all-MiniLM-L6-v2": {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    },
}


def published_config(path_or_hub_id: str) -> tuple[dict[str, Any], str]:
    """Return (contents of config.json, their source) of a folder or hub ID without reading weights.

    Raises:
        ValueError: neither a local folder, nor the hub, nor the table has the model.
    """
    is_embedded = path_or_hub_id.startswith(folders.EMBEDDED)
    folder = Path(folders.resolve(path_or_hub_id) if is_embedded else path_or_hub_id)
    folder = folder.expanduser()
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise ValueError(
                f"{folder}: no config.json; put the model's config.json there (a "
                "plan needs no other file)"
            )
        return json.loads(file.read_text()), str(file)
    fetched, reason = _fetch(path_or_hub_id)
    if fetched is not None:
        return fetched, f"config.json of {path_or_hub_id}, {reason}"
    if path_or_hub_id in PUBLISHED:
        where = f"built-in table of published shapes; the hub could not be reached ({reason})"
        return PUBLISHED[path_or_hub_id], where
    raise ValueError(
        f"model {path_or_hub_id!r} is not a local folder, the hub could not be reached "
        f"({reason}), and the built-in table has only {', '.join(PUBLISHED)}. Give a folder with "
        "the model's config.json"
    )


def _fetch(hub_id: str) -> tuple[dict[str, Any] | None, str]:
    """Return (contents of config.json, source) or (None, reason of the failure), within seconds."""
    import huggingface_hub

    try:
        cached = huggingface_hub.try_to_load_from_cache(hub_id, "config.json")
    except ValueError as error:  # not a hub id
        return None, str(error).splitlines()[0]
    if isinstance(cached, str):
        return json.loads(Path(cached).read_text()), "cached"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return None, "HF_HUB_OFFLINE=1"
    # The download of huggingface_hub retries for half a minute without network.
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    url = f"{endpoint}/{hub_id}/resolve/main/config.json"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
            return json.loads(reply.read()), "from the hub"
    except OSError as error:
        return None, str(getattr(error, "reason", error))
