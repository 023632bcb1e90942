# SPDX-License-Identifier: Apache-2.0
"""Conversion between text and token ids; the only module that uses tokenizer libraries.

They are imported when a tokenizer is loaded: `tokenizers` if tokenizer.json suffices, otherwise
transformers, which takes seconds. This module never pads: callers keep lengths or masks, so
`pad_id` may be a real end-of-sequence token and none is ever lost. Invariant: this module alone
decides which ids are special (`bos_id`, `eos_ids`, `pad_id`), from the files of the model folder,
and every id that it returns has an embedding in the model.
"""

import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.models.hf import folders


class Tokenizer:
    """The tokenizer of a model folder; use `Tokenizer.load`.

    Attributes:
        bos_id: beginning-of-sequence token, None if the model has none.
        adds_bos: the model expects `bos_id` before plain text, because its own tokenizer adds it
            (Llama's does; those of GPT-2, Pythia and Qwen do not).
        eos_ids: all tokens that end a response, including those of generation_config.json.
        pad_id: padding token, else the first end-of-sequence token, else 0. It can be one of
            `eos_ids` (Qwen: <|endoftext|> is both).
        vocab_size: number of tokens, including added ones; the model may have more rows.
    """

    def __init__(
        self, tokenizer: Any, eos_ids: Sequence[int] = (), model_vocab_size: int | None = None
    ):
        self._tokenizer = tokenizer
        self._model_vocab_size = model_vocab_size
        self.vocab_size: int = len(tokenizer)
        self.bos_id: int | None = tokenizer.bos_token_id
        self.adds_bos: bool = self.bos_id is not None and tokenizer.encode("a")[:1] == [self.bos_id]
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        declared = tuple(dict.fromkeys([*own, *eos_ids]))
        self.eos_ids: tuple[int, ...] = tuple(i for i in declared if self._has_row(i))
        if self.adds_bos and not self._has_row(self.bos_id):
            raise self._no_row("beginning-of-sequence token", self.bos_id)
        if any(i >= 0 for i in declared) and not self.eos_ids:
            raise self._no_row("end-of-sequence token", max(declared))
        pad = tokenizer.pad_token_id
        # A pad token without a row would index beyond the embedding.
        self.pad_id: int = pad if self._has_row(pad) else (self.eos_ids or (0,))[0]

    @classmethod
    def load(cls, path_or_hub_id: str | os.PathLike[str]) -> "Tokenizer":
        """Return the tokenizer of a model folder, hub ID or embedded model.

        Raises:
            ValueError: no such model, no tokenizer that can be loaded without running its code, or
                special tokens without an embedding in the model.
        """
        folder = folders.resolve(path_or_hub_id)
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            raise ValueError(
                f"{folder}: no tokenizer.json and no tokenizer.model there. Give a Hugging Face "
                "model folder that has its tokenizer files"
            )
        generation, model, library, settings = (
            _read_json(folder / name)  # a check, because the library's error names no file
            for name in (
                "generation_config.json",
                "config.json",
                "tokenizer.json",
                "tokenizer_config.json",
            )
        )
        _check_ids(folder / "tokenizer.json", library)
        eos_ids = [
            *_declared_eos_ids(folder / "generation_config.json", generation),
            *_declared_eos_ids(folder / "config.json", model),
        ]
        vocab_size = model.get("vocab_size")
        if vocab_size is not None and not _is_id(vocab_size):
            raise ValueError(
                f"{folder / 'config.json'}: vocab_size = {vocab_size!r:.60}, want a whole number. "
                "Download the file again"
            )
        if _says_everything(folder, library, settings):
            tokenizer = _read(folder, lambda: _Plain(folder / "tokenizer.json", settings))
        else:
            tokenizer = _of_transformers(folder)
        try:
            return cls(tokenizer, eos_ids, vocab_size)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error

    def encode(self, text: str, add_bos: bool) -> np.ndarray:
        """Return the token IDs of a text, int32 [s]; special tokens in the text are recognised.

        Args:
            text: any text.
            add_bos: start with the beginning-of-sequence token if the model expects it (`adds_bos`)
                and the text does not start with it (output of `format_chat` may). An empty text
                becomes this token even if `adds_bos` is False, provided the model has the token.

        Raises:
            ValueError: a token of the text has no embedding in the model.
        """
        # Not verbose: transformers would warn about lengths that callers check themselves.
        ids = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if add_bos and self.adds_bos and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if add_bos and not ids and self.bos_id is not None and self._has_row(self.bos_id):
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
        encoded = self._tokenizer(text, return_special_tokens_mask=True)
        ids = np.array(encoded["input_ids"], np.int32)
        excess = 0 if max_tokens is None else max(len(ids) - max_tokens, 0)
        from_text = np.flatnonzero(np.array(encoded["special_tokens_mask"]) == 0)
        if excess > len(from_text):
            raise ValueError(
                f"max_tokens={max_tokens} is less than the {len(ids) - len(from_text)} special "
                "tokens that this tokenizer adds. Set a larger limit"
            )
        return self._checked(np.delete(ids, from_text[len(from_text) - excess :]))

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of token ids, without special tokens unless requested."""
        return self.batch_decode([ids], skip_special)[0]

    def batch_decode(
        self, rows: Sequence[Sequence[int] | np.ndarray], skip_special: bool = True
    ) -> list[str]:
        """Return the text of each row of token IDs; IDs that the tokenizer lacks are ignored.

        A model may have more embedding rows than its tokenizer has tokens, and may sample them.
        """
        return [
            # Clean-up would delete the spaces that the model wrote before punctuation.
            self._tokenizer.decode(
                [int(i) for i in row],
                skip_special_tokens=skip_special,
                clean_up_tokenization_spaces=False,
            )
            for row in rows
        ]

    @property
    def library(self) -> Any:
        """Tokenizer object of the library that reads the files."""
        return self._tokenizer

    @property
    def longest_token(self) -> int:
        """Characters of the longest token; a text n times as long has at least n tokens."""
        return self._longest_token

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def knows(self, character: str) -> bool:
        """Return whether the tokenizer can represent this character.

        White space may be lost: tokenizers that split words remove it.
        """
        ids = self._tokenizer.encode(character, add_special_tokens=False, verbose=False)
        unknown = self._tokenizer.unk_token_id
        return (bool(ids) or character.isspace()) and (unknown is None or unknown not in ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether `format_chat` works."""
        return bool(self._tokenizer.chat_template)

    def format_chat(
        self, messages: Sequence[Mapping[str, str]], *, is_complete: bool = False
    ) -> str:
        """Format messages with the model's chat template, up to the start of the response.

        The text contains the beginning-of-sequence token if the template writes it. `encode` does
        not add a second one.

        Args:
            messages: each with "role" and "content"; a last message of the assistant is the
                beginning of the response.
            is_complete: the conversation is complete, and the response is a separate message, such
                as a guard's verdict.

        Raises:
            ValueError: the tokenizer has no chat template, jinja2 is not installed, a message lacks
                a key, or the template refuses the messages (some have no "system" role).
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
        try:
            from jinja2 import TemplateError

            begun = messages[-1]["role"] == "assistant" and not is_complete
            return self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tokenize=False,
                add_generation_prompt=not begun,
                continue_final_message=begun,
            )
        except ImportError as error:
            raise ValueError("chat templates need jinja2. Run pip install jinja2") from error
        except TemplateError as error:
            raise ValueError(
                f"the chat template of this tokenizer refuses the messages ({error}). Change the "
                "roles or their order"
            ) from error

    def has_vocabulary_of(self, other: "Tokenizer") -> bool:
        """Return whether every token of `other` has the same ID in this tokenizer."""
        return other._tokenizer.get_vocab().items() <= self._tokenizer.get_vocab().items()

    def _has_row(self, token_id: int | None) -> bool:
        """Return whether the model has an embedding for a token; added tokens may have none."""
        size = self._model_vocab_size
        return token_id is not None and token_id >= 0 and (size is None or token_id < size)

    def _checked(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = np.asarray(ids, np.int32)
        if ids.size and not self._has_row(int(ids.max())):
            raise self._no_row("token", int(ids.max()))
        return ids

    def _no_row(self, what: str, token_id: int | None) -> ValueError:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return ValueError(
            f"{what} {token!r} has id {token_id}, but config.json says that the model has "
            f"vocab_size = {self._model_vocab_size}. Use the tokenizer files that belong to it"
        )


# Accepted values in tokenizer_config.json of a tokenizer without Python code. They do not change
# the methods that `Tokenizer` uses, which never pad, truncate or clean up.
_PLAIN_SETTINGS = {
    *("tokenizer_class", "clean_up_tokenization_spaces", "model_max_length", "padding_side"),
    *("bos_token", "eos_token", "pad_token", "unk_token"),
}


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


def _says_everything(folder: Path, library: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether tokenizer.json suffices to load the tokenizer without transformers.

    Args:
        folder: folder of the model.
        library: contents of its tokenizer.json.
        settings: contents of its tokenizer_config.json.
    """
    others = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
    special = {x["content"] for x in library.get("added_tokens", ()) if x["special"]}
    declared = [value for name, value in settings.items() if name.endswith("_token")]
    return (
        bool(library)
        and settings.get("tokenizer_class") == "PreTrainedTokenizerFast"
        and settings.keys() <= _PLAIN_SETTINGS
        # transformers would add other tokens to the vocabulary.
        and all(isinstance(x, str) and x in special for x in declared)
        and not any((folder / name).exists() for name in others)
    )


class _Plain:
    """The methods of a transformers tokenizer that `Tokenizer` uses, from tokenizer.json alone."""

    chat_template = None

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer as Library

        self._library = Library.from_file(str(path))
        self._library.no_padding()
        self._library.no_truncation()
        ids = {
            name: self._library.token_to_id(settings[f"{name}_token"])
            for name in ("bos", "eos", "pad", "unk")
            if f"{name}_token" in settings
        }
        self.bos_token_id: int | None = ids.get("bos")
        self.eos_token_id: int | None = ids.get("eos")
        self.pad_token_id: int | None = ids.get("pad")
        self.unk_token_id: int | None = ids.get("unk")

    def __len__(self) -> int:
        return self._library.get_vocab_size()

    def __call__(self, text: str, *, return_special_tokens_mask: bool) -> dict[str, list[int]]:
        assert return_special_tokens_mask
        encoded = self._library.encode(text)
        return {"input_ids": encoded.ids, "special_tokens_mask": encoded.special_tokens_mask}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> list[int]:
        del verbose
        return self._library.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not clean_up_tokenization_spaces
        return self._library.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self._library.id_to_token(token_id)

    def get_vocab(self) -> dict[str, int]:
        return self._library.get_vocab()


def _of_transformers(folder: Path) -> Any:
    # Suppress the advice on standard error to install torch, which is not used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # imported only if necessary: it takes seconds

    # False, because the default asks at the terminal.
    return _read(
        folder,
        lambda: AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        ),
    )


def _read(folder: Path, load: Callable[[], Any]) -> Any:
    """Return the tokenizer that `load` makes from the files in `folder`.

    Raises:
        ValueError: the library refuses the files.
    """
    try:
        return load()
    except Exception as error:  # `tokenizers` raises plain Exception for unreadable files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{folder}: the tokenizer cannot be read ({reason}). Correct the tokenizer files, or "
            "download them again"
        ) from error


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < 2**31


def _check_ids(path: Path, library: Mapping[str, Any]) -> None:
    """Check the token IDs of a tokenizer.json.

    Args:
        path: path of the file, for messages.
        library: contents of the file.

    Raises:
        ValueError: an ID is not a whole number from 0, or two tokens have the same ID.
    """
    model, added = library.get("model"), library.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    # Other models keep a list, whose tokens have their index as ID.
    ids = [*vocabulary.items()] if isinstance(vocabulary, dict) else []
    if not isinstance(added, list | None):
        raise ValueError(f"{path}: added_tokens = {added!r:.60}; want a list. Correct the file")
    for token in added or ():
        if not isinstance(token, dict) or not {"id", "content", "special"} <= token.keys():
            raise ValueError(
                f"{path}: added token {token!r:.80}; want an object with id, content and special. "
                "Download the file again"
            )
        ids.append((token["content"], token["id"]))
    names: dict[int, str] = {}
    for name, token_id in ids:
        if not _is_id(token_id) or token_id < 0:
            raise ValueError(
                f"{path}: token {name!r:.60} has the ID {token_id!r:.40}; want a whole number from "
                "0. Correct the file, or download it again"
            )
        if names.setdefault(token_id, name) != name:
            raise ValueError(
                f"{path}: the tokens {names[token_id]!r:.60} and {name!r:.60} have the same ID "
                f"{token_id}. Correct the file, or download it again"
            )


def _declared_eos_ids(path: Path, content: Mapping[str, Any]) -> list[int]:
    """Return the end-of-sequence IDs of a generation_config.json or config.json.

    Args:
        path: path of the file, for messages.
        content: content of the file.

    Raises:
        ValueError: eos_token_id is neither a whole number nor a list of whole numbers.
    """
    declared = content.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    ids = [token_id for token_id in ids if token_id is not None]
    if not all(map(_is_id, ids)):
        raise ValueError(
            f"{path}: eos_token_id = {declared!r:.60}; want a token ID, a list of token IDs or "
            "null. Correct the file, or download it again"
        )
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; {} where there is no file."""
    return folders.read_json(path) if path.is_file() else {}
