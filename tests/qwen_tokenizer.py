# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer with the special tokens of Qwen 3."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tba_jax.models.tokenizer import Tokenizer as Own


def qwen_like_tokenizer(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    plain += ["<think>", "</think>"]
    raw.add_special_tokens([AddedToken(x, special=True) for x in special])
    raw.add_tokens([AddedToken(x, normalized=False) for x in plain])
    whole = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    whole.save_pretrained(folder)
    return Own.load(folder)
