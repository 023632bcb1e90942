# SPDX-License-Identifier: Apache-2.0
"""Conversion between text and token IDs.

tokenizer.json alone decides how text is split; classes of transformers replace a part of it for
some models. This module never pads: callers keep lengths or masks, so `pad_id` may be a real
end-of-sequence token and none is ever lost. Invariant: this module alone decides which IDs are
special (`bos_id`, `eos_ids`, `pad_id`), from the files of the model folder, and every ID that it
returns has an embedding in the model.
"""

import codecs
import datetime
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2.meta
import jinja2.nodes
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tba_jax.models.hf import folders

_NAMED = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
# Follows the first character of a special token's text in a chat, so that it stays text.
DIVIDER = "\ue001"
# Marks the end of the last message while a template renders it. A template that strips messages
# removes the space at the end of the mark.
_END = "\ue000END\ue000 "
# Character -> byte in the tokens of byte-level tokenizers: printable bytes are themselves.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(b): b for b in _PRINTABLE}
_BYTES |= {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}


class Tokenizer:
    """The tokenizer of a model folder; use `Tokenizer.load`.

    Attributes:
        bos_id: beginning-of-sequence token, None if the model has none.
        adds_bos: the model expects `bos_id` before plain text, because its own tokenizer adds it
            (Llama's does; those of GPT-2, Pythia and Qwen do not).
        eos_ids: all tokens that end a response: those of generation_config.json, or of config.json
            if the former has none, as in transformers. The tokenizer's own token is the first if it
            is one of them, and the only one if both files have none.
        pad_id: padding token, else the first end-of-sequence token, else 0. It can be one of
            `eos_ids` (Qwen: <|endoftext|> is both).
        has_chat_template: whether `format_chat` works.
        end: largest token ID plus 1, also of added tokens; the model may have more rows.
    """

    def __init__(self, folder: Path) -> None:
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            settings |= _read_json(folder / name)
        if "AutoTokenizer" in (settings.get("auto_map") or {}):
            raise ValueError(
                f"{folder}: the tokenizer cannot be read, because it is Python code (auto_map in "
                "tokenizer_config.json), which is not run. Save it as tokenizer.json"
            )
        values = {name: settings.get(f"{name}_token") for name in _NAMED}
        texts = {name: x["content"] if isinstance(x, dict) else x for name, x in values.items()}
        self._special = {name: text for name, text in texts.items() if text is not None}
        self._library = library = _read_library(folder, self._special.values())
        special = [x.content for x in library.get_added_tokens_decoder().values() if x.special]
        self._special_text = re.compile(f"(?={'|'.join(map(re.escape, special)) or '(?!)'})(.)")
        self._folder, self._template = folder, _read_template(folder, settings)
        self.has_chat_template = bool(self._template)
        self.end: int = max(library.get_vocab().values()) + 1
        model = _read_json(folder / "config.json")
        self._num_rows: int | None = model.get("vocab_size")  # rows of the embedding
        ids = {name: library.token_to_id(text) for name, text in self._special.items()}
        self._unknown_id: int | None = ids.get("unk")
        bos, eos, pad = (ids.get(name) for name in ("bos", "eos", "pad"))
        self.bos_id: int | None = model.get("bos_token_id") if bos is None else bos
        self.adds_bos = self.bos_id is not None and library.encode("a").ids[:1] == [self.bos_id]
        ends = _end_ids(_read_json(folder / "generation_config.json")) or _end_ids(model)
        ends = sorted(ends or _end_ids({"eos_token_id": eos}), key=lambda i: i != eos)
        self.eos_ids: tuple[int, ...] = tuple(filter(self._has_row, dict.fromkeys(ends)))
        if ends and not self.eos_ids:
            raise self._no_row("end-of-sequence token", max(ends))
        # A pad token without a row would index beyond the embedding.
        fallback = (self.eos_ids or (0,))[0]
        self.pad_id: int = fallback if pad is None or not self._has_row(pad) else pad

    @classmethod
    def load(cls, path_or_hub_id: str | os.PathLike[str]) -> "Tokenizer":
        """Return the tokenizer of a model folder, hub ID or embedded model.

        Raises:
            ValueError: no such model, or its tokenizer is missing, damaged, code or of another.
        """
        return cls(folders.resolve(path_or_hub_id))

    def encode(self, text: str, add_bos: bool) -> np.ndarray:
        """Return the token IDs of a text, int32 [s]; special tokens in the text are recognised.

        Args:
            add_bos: start with the beginning-of-sequence token if the model expects it (`adds_bos`)
                and the text does not start with it. An empty text becomes this token even if
                `adds_bos` is False, provided the model has the token. False for the output of
                `format_chat`, which is complete.

        Raises:
            ValueError: a token of the text has no embedding in the model.
        """
        parts = (self._library.encode(x, add_special_tokens=False) for x in text.split(DIVIDER))
        ids = [token for part in parts for token in part.ids]
        if add_bos and self.adds_bos and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if add_bos and not ids and self._has_row(self.bos_id):
            ids = [self.bos_id]
        return self._checked(ids)

    def encode_complete(self, text: str, max_tokens: int | None = None) -> np.ndarray:
        """Return the token IDs of a text and of special tokens that the tokenizer adds, int32 [s].

        This is the input of encoder models: `<s> text </s>` (RoBERTa), `[CLS] text [SEP]` (BERT).

        Args:
            max_tokens: truncates the text, never the special tokens; at least their number.

        Raises:
            ValueError: a token of the text has no embedding in the model.
        """
        encoded = self._library.encode(text, add_special_tokens=False)
        if max_tokens is not None:
            encoded.truncate(max_tokens - self._library.num_special_tokens_to_add(is_pair=False))
        return self._checked(self._library.post_process(encoded).ids)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of the known token IDs, without special tokens unless requested."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def batch_decode(self, rows: Sequence[Any], skip_special: bool = True) -> list[str]:
        """Return the text of each row of token IDs, as `decode`."""
        return [self.decode(row, skip_special) for row in rows]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return a text for each token; a character of several tokens belongs to the first one."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts, start = [""] * len(ids), 0
        for i, token in enumerate(ids):
            texts[start] += decoder.decode(self.token_bytes(token), final=i + 1 == len(ids))
            if not decoder.getstate()[0]:  # no bytes of an unfinished character
                start = i + 1
        return texts

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character in UTF-8."""
        before, start = self._before  # some tokenizers drop a space at the start of a text
        text = self.decode([*before, token_id], skip_special=False).removeprefix(start)
        token = self._library.id_to_token(token_id) or ""
        if "\ufffd" in text and (code := re.fullmatch("<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(code[1])
        if "\ufffd" in text and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return text.encode()

    @functools.cached_property
    def _before(self) -> tuple[list[int], str]:
        ids = self.encode("a", add_bos=False)[-1:].tolist()
        return ids, self.decode(ids, skip_special=False)

    @functools.cached_property
    def library(self) -> Any:
        """Tokenizer object of transformers, for libraries that need one; its import takes seconds.

        Raises:
            ValueError: transformers refuses the files.
        """
        # Suppress the advice on standard error to install torch, which is not used.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        try:
            # trust_remote_code=False, because the default asks at the terminal.
            return AutoTokenizer.from_pretrained(
                str(self._folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises many types for unusable files
            raise _unreadable(self._folder, error) from error

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

    def format_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        is_complete: bool = False,
        variables: Mapping[str, Any] = {},
    ) -> str:
        """Format messages with the model's chat template, up to the start of the response.

        The text is complete: `encode` it with `add_bos=False`, as transformers does.

        Args:
            messages: each with "role" and "content"; a last message of the assistant is the
                beginning of the response.
            is_complete: the conversation is complete, and the response is a separate message, such
                as a guard's verdict.
            variables: further variables of the template, such as {"enable_thinking": False}; with
                {"special_tokens": False}, texts of special tokens in messages stay text.

        Raises:
            ValueError: the template is missing, refuses messages or variables, or is not valid.
        """
        if not self.has_chat_template:
            raise ValueError("this tokenizer has no chat template. Use plain prompts instead")
        # A template would silently drop missing keys.
        if not messages or any(not {"role", "content"} <= m.keys() for m in messages):
            raise ValueError(
                f"chat messages {list(messages)!r}: wanted some, each with 'role' and 'content'"
            )
        continues = messages[-1]["role"] == "assistant" and not is_complete
        shown = [dict(message) for message in messages]
        variables = dict(variables)
        for each in () if variables.pop("special_tokens", True) else shown:
            each["content"] = self._special_text.sub(rf"\1{DIVIDER}", each["content"])
        shown[-1]["content"] += _END * continues
        given: dict[str, Any] = {"tools": None, "documents": None, "messages": shown}
        given |= {f"{name}_token": text for name, text in self._special.items()}
        given |= {"add_generation_prompt": not continues}
        try:
            template, names = _compiled(self._template)
            text, options = template.render({**variables, **given}), names - given.keys()
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template of this tokenizer refuses the messages ({error}). Change the "
                "roles or their order"
            ) from error
        if unknown := variables.keys() - options:
            raise ValueError(f"the chat template lacks {sorted(unknown)}; it has {sorted(options)}")
        if not continues:
            return text
        before, mark, after = text.rpartition(_END.strip())
        if not mark:
            raise ValueError(
                "the chat template of this tokenizer does not write the last message, which begins "
                "the response. Remove this message, or use another template"
            )
        return before if after.startswith(" ") else before.rstrip()

    def has_vocabulary_of(self, other: "Tokenizer") -> bool:
        """Return whether every token of `other` has the same ID in this tokenizer."""
        return other._library.get_vocab().items() <= self._library.get_vocab().items()

    def _has_row(self, token_id: int | None) -> bool:
        """Return whether the model has an embedding for a token; added tokens may have none."""
        rows = self._num_rows
        return token_id is not None and token_id >= 0 and (rows is None or token_id < rows)

    def _checked(self, ids: Sequence[int | None] | np.ndarray) -> np.ndarray:
        ids = np.asarray(ids, np.int32)
        if ids.size and not self._has_row(int(ids.max())):
            raise self._no_row("token", int(ids.max()))
        return ids

    def _no_row(self, what: str, token_id: int) -> ValueError:
        token = self._library.id_to_token(token_id)
        return ValueError(
            f"{self._folder}: {what} {token!r} has id {token_id}, but config.json says that the "
            f"model has vocab_size = {self._num_rows}. Use the tokenizer files that belong to it"
        )


def _read_library(folder: Path, special: Iterable[str]) -> Any:
    """Return the `tokenizers.Tokenizer` of a folder, without padding and truncation.

    Args:
        special: special tokens, of which tokenizer.json may not mark all.
    """
    from tokenizers import Tokenizer as Library

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder}: no tokenizer.json there. Give a Hugging Face model folder with its "
            "tokenizer; save_pretrained of its AutoTokenizer writes the file"
        )
    try:
        library = Library.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise _unreadable(path, error) from error
    library.no_padding()
    library.no_truncation()
    marked = {x.content for x in library.get_added_tokens_decoder().values() if x.special}
    known = [text for text in special if library.token_to_id(text) is not None]
    library.add_special_tokens([text for text in known if text not in marked])
    return library


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ValueError(
        f"{path}: the tokenizer cannot be read ({reason}). Correct the tokenizer files, or "
        "download them again"
    )


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the chat template: of its own file, or of tokenizer_config.json; "" if none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    declared = settings.get("chat_template") or ""
    if isinstance(declared, str):
        return declared
    return {x["name"]: x["template"] for x in declared}.get("default", "")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training, and changes no text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[jinja2.Template, set[str]]:
    """Return a template with the functions of transformers, and the names that it reads."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja's own filter would escape HTML characters.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), names - {*environment.globals}


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; {} if there is no file."""
    return folders.read_json(path) if path.is_file() else {}


def _end_ids(content: Mapping[str, Any]) -> list[int]:
    """Return the end-of-sequence IDs of a generation_config.json or config.json."""
    declared = content.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    return [i for i in ids if i is not None and i >= 0]  # old Llama files: -1 is none
