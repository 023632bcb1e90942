# SPDX-License-Identifier: Apache-2.0
"""Attackers, victims and judges on disk: the golden models of random weights, with tokenizers."""

import json
import shutil
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

GOLDEN = Path(__file__).parent / "golden"
# With four special tokens the 48 that every golden model has.
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,!?:#\n0123456789-"

CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_model(folder, golden, special_tokens, roles, template="", chat_template=None):
    """Copy a golden model and give it a tokenizer of one token per character.

    Args:
        folder: to make.
        golden: which golden model.
        special_tokens: ids 0, 1, ...
        roles: e.g. {"bos_token": "<s>"}.
        template: what the tokenizer puts around a text, e.g. "<s> $A </s>".
        chat_template: jinja source.
    """
    shutil.copytree(GOLDEN / golden, folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocab = {token: i for i, token in enumerate([*special_tokens, *CHARACTERS][:size])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=special_tokens[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special_tokens))
    if template:
        named = [(t, vocab[t]) for t in special_tokens if t in template]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=named)
    tokenizer.save(str(folder / "tokenizer.json"))
    chat = {"chat_template": chat_template} if chat_template else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, **chat}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def write_gpt2(folder):
    """Beginning and end are one token, which the tokenizer does not add; no padding token."""
    roles = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    return write_model(folder, "gpt2", ("<unk>", "<|endoftext|>", "<unk2>"), roles)


def write_llama(folder):
    """An instruction-tuned Llama, or a guard: it has a chat template."""
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokens = ("<pad>", "<bos>", "<eos>", "<unk>")
    return write_model(folder, "llama", tokens, roles, "<bos> $A", CHAT)


def write_roberta(folder):
    """A toxicity classifier with the labels nothate, hate and unsure."""
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return write_model(folder, "roberta", ("<s>", "<pad>", "</s>", "<unk>"), roles, "<s> $A </s>")


def write_minilm(folder):
    """A sentence embedding model."""
    roles = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    tokens = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
    return write_model(folder, "roberta_bert", tokens, roles, "[CLS] $A [SEP]")
