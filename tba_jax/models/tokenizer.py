# SPDX-License-Identifier: Apache-2.0
"""Conversion between text and token IDs.

This module never pads: callers keep lengths or masks, so `pad_id` may be a real end-of-sequence
token and none is ever lost. Invariant: this module alone decides which IDs are special (`bos_id`,
`eos_ids`, `pad_id`), from the files of the model folder, and every ID that it returns has an
embedding in the model.
"""

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.models.hf import chat_template, folders, tokenizer_files
from tba_jax.models.hf.tokenizer_files import TokenizerFiles


class Tokenizer:
    """The tokenizer of a model folder; use `Tokenizer.load`.

    Attributes:
        bos_id: beginning-of-sequence token, None if the model has none.
        adds_bos: the model expects `bos_id` before plain text, because its own tokenizer adds it
            (Llama's does; those of GPT-2, Pythia and Qwen do not).
        eos_ids: all tokens that end a response: the tokenizer's own, then those of
            generation_config.json, or of config.json if the former has none.
        pad_id: padding token, else the first end-of-sequence token, else 0. It can be one of
            `eos_ids` (Qwen: <|endoftext|> is both).
        vocab_size: number of tokens, including added ones; the model may have more rows.
        end: largest token ID plus 1; more than `vocab_size` if some IDs are unused.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._files, self._library = files, files.library
        self.vocab_size: int = self._library.get_vocab_size()
        self.end: int = max(self._library.get_vocab().values()) + 1
        ids = {name: self._library.token_to_id(text) for name, text in files.special.items()}
        bos, eos, pad, unknown = (ids.get(name) for name in ("bos", "eos", "pad", "unk"))
        self._unknown_id: int | None = unknown
        self.bos_id: int | None = files.bos_id if bos is None else bos
        first = self._library.encode("a").ids[:1]
        self.adds_bos: bool = self.bos_id is not None and first == [self.bos_id]
        own: list[int] = [] if eos is None else [eos]
        declared = list(dict.fromkeys([*own, *files.end_ids]))
        self.eos_ids: tuple[int, ...] = tuple(i for i in declared if self._has_row(i))
        if self.adds_bos and not self._has_row(self.bos_id):
            raise self._no_row("beginning-of-sequence token", self.bos_id)
        if declared and not self.eos_ids:
            raise self._no_row("end-of-sequence token", max(declared))
        # A pad token without a row would index beyond the embedding.
        fallback = (self.eos_ids or (0,))[0]
        self.pad_id: int = fallback if pad is None or not self._has_row(pad) else pad

    @classmethod
    def load(cls, path_or_hub_id: str | os.PathLike[str]) -> "Tokenizer":
        """Return the tokenizer of a model folder, hub ID or embedded model.

        Raises:
            ValueError: no such model, no tokenizer that can be loaded without running its code, or
                special tokens without an embedding in the model.
        """
        folder = folders.resolve(path_or_hub_id)
        files = tokenizer_files.read(folder)
        try:
            return cls(files)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def encode(self, text: str, add_bos: bool) -> np.ndarray:
        """Return the token IDs of a text, int32 [s]; special tokens in the text are recognised.

        Args:
            text: any text.
            add_bos: start with the beginning-of-sequence token if the model expects it (`adds_bos`)
                and the text does not start with it. An empty text becomes this token even if
                `adds_bos` is False, provided the model has the token. False for the output of
                `format_chat`, which is complete.

        Raises:
            ValueError: a token of the text has no embedding in the model.
        """
        ids = self._library.encode(text, add_special_tokens=False).ids
        if add_bos and self.adds_bos and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if add_bos and not ids and self._has_row(self.bos_id):
            ids = [self.bos_id]
        return self._checked(ids)

    def encode_complete(self, text: str, max_tokens: int | None = None) -> np.ndarray:
        """Return the token IDs of a text and of special tokens that the tokenizer adds, int32 [s].

        This is the input of encoder models: `<s> text </s>` (RoBERTa), `[CLS] text [SEP]` (BERT).

        Args:
            text: any text.
            max_tokens: truncates the text, never the special tokens.

        Raises:
            ValueError: max_tokens leaves no room for the special tokens, or a token of the text has
                no embedding in the model.
        """
        encoded = self._library.encode(text)
        ids = np.array(encoded.ids, np.int32)
        excess = 0 if max_tokens is None else max(len(ids) - max_tokens, 0)
        from_text = np.flatnonzero(np.array(encoded.special_tokens_mask) == 0)
        if excess > len(from_text):
            raise ValueError(
                f"max_tokens={max_tokens} is less than the {len(ids) - len(from_text)} special "
                "tokens that this tokenizer adds. Set a larger limit"
            )
        return self._checked(np.delete(ids, from_text[len(from_text) - excess :]))

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of token IDs, without special tokens unless requested."""
        return self.batch_decode([ids], skip_special)[0]

    def batch_decode(
        self, rows: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True
    ) -> list[str]:
        """Return the text of each row of token IDs; IDs that the tokenizer lacks are ignored."""
        return [
            self._library.decode([int(i) for i in row], skip_special_tokens=skip_special)
            for row in rows
        ]

    @functools.cached_property
    def library(self) -> Any:
        """Tokenizer object of transformers, for libraries that need one; its import takes seconds.

        Raises:
            ValueError: transformers refuses the files.
        """
        return tokenizer_files.of_transformers(self._files.folder)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; a text n times as long has at least n tokens."""
        return max(map(len, self._library.get_vocab()))

    def knows(self, character: str) -> bool:
        """Return whether the tokenizer can represent this character.

        White space may be lost: tokenizers that split words remove it.
        """
        ids = self._library.encode(character, add_special_tokens=False).ids
        return (bool(ids) or character.isspace()) and self._unknown_id not in ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `format_chat` works."""
        return bool(self._files.template)

    def format_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        is_complete: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Format messages with the model's chat template, up to the start of the response.

        The text is complete: `encode` it with `add_bos=False`, as transformers does.

        Args:
            messages: each with "role" and "content"; a last message of the assistant is the
                beginning of the response.
            is_complete: the conversation is complete, and the response is a separate message, such
                as a guard's verdict.
            variables: further variables of the template, such as {"enable_thinking": False}.

        Raises:
            ValueError: the tokenizer has no chat template, a message lacks a key, or the template
                refuses the messages (some have no "system" role).
        """
        if not self.has_chat_template:
            raise ValueError(
                "this tokenizer has no chat template. Use plain prompts, or an instruction-tuned "
                "checkpoint"
            )
        # A template would silently drop missing keys.
        if not messages or any(not {"role", "content"} <= m.keys() for m in messages):
            raise ValueError(
                f"chat messages {list(messages)!r}: wanted at least one, each with 'role' and "
                "'content'"
            )
        special = {f"{name}_token": text for name, text in self._files.special.items()}
        return chat_template.render(
            self._files.template,
            messages,
            continues=messages[-1]["role"] == "assistant" and not is_complete,
            variables={**special, **(variables or {})},
        )

    def has_vocabulary_of(self, other: "Tokenizer") -> bool:
        """Return whether every token of `other` has the same ID in this tokenizer."""
        return other._library.get_vocab().items() <= self._library.get_vocab().items()

    def _has_row(self, token_id: int | None) -> bool:
        """Return whether the model has an embedding for a token; added tokens may have none."""
        rows = self._files.num_rows
        return token_id is not None and token_id >= 0 and (rows is None or token_id < rows)

    def _checked(self, ids: Sequence[int | None] | np.ndarray) -> np.ndarray:
        ids = np.asarray(ids, np.int32)
        if ids.size and not self._has_row(int(ids.max())):
            raise self._no_row("token", int(ids.max()))
        return ids

    def _no_row(self, what: str, token_id: int | None) -> ValueError:
        token = None if token_id is None else self._library.id_to_token(token_id)
        return ValueError(
            f"{what} {token!r} has id {token_id}, but config.json says that the model has "
            f"vocab_size = {self._files.num_rows}. Use the tokenizer files that belong to it"
        )


class TokenTexts:
    """Cache of the texts of single tokens.

    Args:
        tokenizer: tokenizer of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first token, so one token goes before.
        self._before = tokenizer.encode("a", add_bos=False)[-1:].tolist()
        self._before_text = tokenizer.decode(self._before, skip_special=False)
        self._known: dict[int, str] = {}

    def __call__(self, ids: list[int]) -> list[str]:
        """Return a text for each token; a character of several tokens belongs to the first one."""
        texts = [self._one(i) for i in ids]
        for is_part, run in itertools.groupby(range(len(ids)), lambda i: "\ufffd" in texts[i]):
            places = list(run)
            if is_part:
                whole = [ids[i] for i in places]
                texts[places[0]] = self._decode(whole)
                texts[places[0] + 1 : places[-1] + 1] = [""] * (len(places) - 1)
        return texts

    def _one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode([*self._before, *ids], skip_special=False)
        return text.removeprefix(self._before_text)
