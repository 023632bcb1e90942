# SPDX-License-Identifier: Apache-2.0
"""Make the golden files of tests/test_hf_weights.py with transformers and torch.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python tests/golden/make_golden.py [folder of stories260k]

For a Llama and a Qwen2 of random weights: the model folder, and golden.npz with logits and greedy
tokens. For stories260k: its greedy text. The tests need neither torch nor this script.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
COMMON = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {
    # A head_dim that is not hidden_size / heads, biases everywhere, another theta.
    "llama": transformers.LlamaConfig(
        **COMMON,
        head_dim=6,
        attention_bias=True,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    ),
    "qwen2": transformers.Qwen2Config(
        **COMMON,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
    ),
}


def greedy(model: torch.nn.Module, tokens: torch.Tensor, num_tokens: int) -> np.ndarray:
    """Greedy continuation without a cache: the slow, plain definition."""
    for _ in range(num_tokens):
        logits = model(tokens).logits[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens.numpy()


@torch.no_grad()
def main() -> None:
    """Write the golden files beside this script."""
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():  # norms and biases start at 1 and 0: too lenient
            parameter.add_(0.3 * torch.randn_like(parameter))
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = torch.randint(0, config.vocab_size, (2, 12))
        np.savez_compressed(
            HERE / f"{name}.npz",
            tokens=tokens.numpy().astype(np.int32),
            logits=model(tokens).logits.numpy(),
            greedy=greedy(model, tokens, 16)[:, 12:].astype(np.int32),
        )
    source = sys.argv[1] if len(sys.argv) > 1 else HERE / "../../../shared/models/stories260k"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    prompt = "Once upon a time"
    ids = [tokenizer.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False)]
    out = greedy(model, torch.tensor([ids]), 64)[0, len(ids) :].tolist()
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
