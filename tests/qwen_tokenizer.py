# SPDX-License-Identifier: Apache-2.0
"""Byte-level tokenizers, as of GPT-2, Qwen and Llama 3, made here."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tba_jax.models.tokenizer import Tokenizer as Own


def byte_level(special, added=(), merges=()):
    """BPE of 256 bytes and a few merges; behind them are special tokens, then the added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(x + y for x, y in merges)])}
    library = Tokenizer(models.BPE(vocab, list(merges)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(x, special=True) for x in special])
    library.add_tokens([AddedToken(x, normalized=False) for x in added])
    return library


def qwen_like_tokenizer(folder):
    """A tokenizer with the special tokens of Qwen 3."""
    added = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    added += ["<think>", "</think>"]
    whole = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], added),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    whole.save_pretrained(folder)
    return Own.load(folder)
