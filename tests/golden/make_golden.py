# SPDX-License-Identifier: Apache-2.0
"""Make the golden files of tests/models with transformers and torch.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python tests/golden/make_golden.py [NAME ...]

For each folder here with a config.json, or those that are named: random weights, and NAME.npz with
the logits of two rows, alone and padded on either side, and 64 greedy tokens (classifiers: the
scores); for an encoder, hidden states and answers for four rows. No test needs this script. For
another model, make a folder with its config.json, as transformers writes it: "architectures" has
the class.

The folders show a head_dim that is not hidden_size / heads, biases, tied and untied heads, every
rotary scaling and activation; contexts so short that scaled rotations differ from plain ones in the
rows; windows shorter than the rows; and patterns of layers that end within a period.

Greedy tokens can only be compared where no two logits tie: `random_model` spreads the weights
(fresh models are nearly uniform), and a seed is passed over when its two best logits come closer
than MARGIN at any greedy step, or when its continuations soon repeat a few tokens. Random recurrent
layers amplify rounding more than others; a seed is passed over when it is above MAX_AMPLIFIED.
"""

import copy
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

NAMES = sorted(path.parent.name for path in HERE.glob("*/config.json"))
ENCODERS = [name for name in NAMES if name.startswith("roberta")]
MODELS = [name for name in NAMES if name not in ENCODERS]
ENCODER_LENGTHS = (12, 5, 8, 1)


def model_class(name: str) -> type[transformers.PreTrainedModel]:
    """The class of transformers that the golden config.json names."""
    (architecture,) = transformers.AutoConfig.from_pretrained(HERE / name).architectures
    return getattr(transformers, architecture)


@torch.no_grad()
def random_model(name: str, seed: int) -> transformers.PreTrainedModel:
    """A float32 model whose logits are far from uniform, and no norm or bias at its start value."""
    torch.manual_seed(seed)
    model = model_class(name)(transformers.AutoConfig.from_pretrained(HERE / name)).eval()
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


def model_and_outputs(name: str) -> tuple[transformers.PreTrainedModel, dict[str, np.ndarray]]:
    """A model of the first seed that serves, and everything the tests compare."""
    if name in ENCODERS:
        return (model := random_model(name, 0)), encoder_outputs(model)
    for seed in range(100):
        model = random_model(name, seed)
        rows = np.random.default_rng(seed).integers(1, model.config.vocab_size, (2, LENGTHS[0]))
        found = outputs(model, rows)
        if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
            if amplified(model, rows, found["logits"]) > MAX_AMPLIFIED:
                continue
        if model.config.architectures[0].endswith("ForSequenceClassification"):
            return model, found
        found["greedy"], lead = greedy(model, torch.tensor(rows), NUM_GREEDY)
        if lead > MARGIN and len(np.unique(found["greedy"])) >= MIN_DISTINCT:
            return model, found
    raise RuntimeError(f"every seed has two logits within {MARGIN} or repeats itself")


def main() -> None:
    """Write the golden files beside this script."""
    names = sys.argv[1:] or NAMES
    if unknown := sorted({*names} - {*NAMES}):
        raise SystemExit(f"no folder {unknown[0]} with a config.json; there are {', '.join(NAMES)}")
    for name in names:
        model, found = model_and_outputs(name)
        folder = HERE / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(HERE / f"{name}.npz", **found)


if __name__ == "__main__":
    main()
