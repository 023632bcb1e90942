# SPDX-License-Identifier: Apache-2.0
"""Make the golden files of tests/models/test_encoder.py with transformers and torch.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python tests/golden/make_golden_roberta.py

For a RoBERTa classifier and a BERT of random weights: the model folder, and an npz with tokens of
unequal lengths, hidden states and answers. The tests need neither torch nor this script.
"""

import shutil
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
    "max_position_embeddings": 24,
}
LENGTHS = (12, 5, 8, 1)


def make(name: str) -> torch.nn.Module:
    """A model whose every parameter is random: fresh norms and biases are 1 and 0, too lenient."""
    torch.manual_seed(0)
    if name == "roberta":
        config = transformers.RobertaConfig(
            **COMMON,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            id2label={0: "nothate", 1: "hate", 2: "unsure"},
        )
        model = transformers.RobertaForSequenceClassification(config)
    else:
        model = transformers.BertModel(transformers.BertConfig(**COMMON))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def padded(pad_id: int, side: str = "right") -> tuple[np.ndarray, np.ndarray]:
    """(tokens, mask) of rows of unequal lengths; the first has a padding token in its text."""
    rng = np.random.default_rng(0)
    tokens = np.full((len(LENGTHS), max(LENGTHS)), pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, n in enumerate(LENGTHS):
        at = slice(0, n) if side == "right" else slice(max(LENGTHS) - n, None)
        tokens[row, at] = rng.integers(3, COMMON["vocab_size"], n)
        mask[row, at] = True
    tokens[0, 4] = pad_id  # it fills the width, so on either side this is in its text
    return tokens, mask


@torch.no_grad()
def answers(model: torch.nn.Module, tokens: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Hidden states, and logits where there is a head, else sentence embeddings."""
    inputs = {
        "input_ids": torch.tensor(tokens, dtype=torch.long),
        "attention_mask": torch.tensor(mask, dtype=torch.long),
    }
    if hasattr(model, "classifier"):
        hidden = model.roberta(**inputs).last_hidden_state
        return {"hidden": hidden.numpy(), "logits": model(**inputs).logits.numpy()}
    hidden = model(**inputs).last_hidden_state
    weight = inputs["attention_mask"][..., None].float()
    mean = (hidden * weight).sum(1) / weight.sum(1)
    unit = torch.nn.functional.normalize(mean, dim=1)
    return {"hidden": hidden.numpy(), "embeddings": unit.numpy()}


def main() -> None:
    """Write the golden files beside this script."""
    for name, folder in (("roberta", "roberta"), ("bert", "roberta_bert")):
        model = make(name)
        shutil.rmtree(HERE / folder, ignore_errors=True)
        model.save_pretrained(HERE / folder)
        (HERE / folder / "model.safetensors").chmod(0o644)
        tokens, mask = padded(model.config.pad_token_id)
        np.savez_compressed(
            HERE / f"{folder}.npz", tokens=tokens, mask=mask, **answers(model, tokens, mask)
        )


if __name__ == "__main__":
    main()
