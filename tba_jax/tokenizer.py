# SPDX-License-Identifier: Apache-2.0
"""Text <-> token ids; the only module that knows the tokenizer library.

The library is imported when a tokenizer is loaded, not with this module. It does not know models,
prompts or tasks. The invariant it owns: which ids are special (`bos_id`, `eos_ids`, `pad_id`) is
decided here, once, from the files of the model folder.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class Tokenizer:
    """The tokenizer of a model folder; use `Tokenizer.load`.

    Attributes:
        bos_id: beginning-of-sequence token, None where the model has none.
        eos_ids: every token that ends a response, generation_config.json's included.
        pad_id: padding token, else the first end-of-sequence token, else 0.
        vocab_size: number of tokens, added ones included.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *eos_ids]))
        pad = tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else (self.eos_ids or (0,))[0]
        self.vocab_size: int = len(tokenizer)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer of a model folder (`hf_weights.resolve` finds that of a hub id).

        Raises:
            ValueError: no folder, or no tokenizer in it that can be read without running its code.
        """
        folder = Path(path)
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            raise ValueError(
                f"{folder}: no tokenizer.json and no tokenizer.model there. Give a Hugging Face "
                "model folder that has its tokenizer files"
            )
        # It would advise on standard error to install torch, which is not used.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer  # seconds to import: only when needed

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ImportError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{folder}: the tokenizer cannot be read ({reason})") from error
        return cls(tokenizer, _declared_eos_ids(folder))

    def encode(self, text: str, add_bos: bool) -> np.ndarray:
        """int32 [s]: token ids of the text, special tokens written in it recognised.

        Args:
            text: any text.
            add_bos: put the beginning-of-sequence token first, where the model has one (not for
                the output of `format_chat`, which contains it).
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return np.array(ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Text of token ids, special tokens left out unless asked for."""
        return self.batch_decode([ids], skip_special)[0]

    def batch_decode(
        self, rows: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True
    ) -> list[str]:
        """Text of each row of token ids."""
        return [
            # No clean-up: it would delete spaces in front of punctuation that the model wrote.
            self._tokenizer.decode(
                [int(i) for i in row],
                skip_special_tokens=skip_special,
                clean_up_tokenization_spaces=False,
            )
            for row in rows
        ]

    def format_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The messages in the model's chat template, ending where the assistant begins.

        Args:
            messages: each with "role" and "content".

        Raises:
            ValueError: the tokenizer has no chat template, or jinja2 is not installed.
        """
        if not self._tokenizer.chat_template:
            raise ValueError(
                "this tokenizer has no chat template; use plain prompts, or an instruction-tuned "
                "checkpoint"
            )
        try:
            return self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
            )
        except ImportError as error:
            raise ValueError("chat templates need jinja2; pip install jinja2") from error


def _declared_eos_ids(folder: Path) -> list[int]:
    """End-of-sequence ids of generation_config.json and config.json, in that order."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            declared = json.loads((folder / name).read_text()).get("eos_token_id")
            ids += (
                declared if isinstance(declared, list) else [] if declared is None else [declared]
            )
    return ids
