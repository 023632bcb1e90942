# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a model folder as its files declare it; reads nothing of the weights.

tokenizer.json alone decides how text is split. Classes of transformers replace a part of it for
some models; `python -m tba_jax.main --dry_run` compares both (`difference`).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.models.hf import folders

_NAMED = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
_PROBES = (
    "The answer is 12345.678, isn't it?",
    "  two spaces\n\n\tand a tab \n",
    "def f(x):\n    return x**2  # caf\u00e9",
    "\u4f60\u597d, \u0434\u043e\u043c, \U0001f600!",
    "http://a.b/c?d=1&e=[2]",
)


class TokenizerFiles(NamedTuple):
    """Contents of the tokenizer files of a model folder.

    Attributes:
        folder: the model folder.
        library: `tokenizers.Tokenizer`, without padding and truncation.
        special: name ("bos", "eos", "pad", "unk", ...) -> text of a special token.
        template: Jinja source of the chat template; "" if there is none.
        bos_id: bos_token_id of config.json; None if it has none.
        end_ids: eos_token_id of generation_config.json if it has any, otherwise of config.json.
        num_rows: vocab_size of config.json: rows of the embedding; None without config.json.
    """

    folder: Path
    library: Any
    special: Mapping[str, str]
    template: str
    bos_id: int | None
    end_ids: Sequence[int]
    num_rows: int | None


def read(folder: Path) -> TokenizerFiles:
    """Read the tokenizer files of a model folder.

    Raises:
        ValueError: there is no tokenizer, it is code, or a file is damaged; the message names the
            file.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ValueError(
            f"{folder}: no tokenizer.json and no tokenizer.model there. Give a Hugging Face "
            "model folder that has its tokenizer files"
        )
    model, generation = (_read_json(folder / x) for x in ("config.json", "generation_config.json"))
    older = _read_json(folder / "special_tokens_map.json")
    newer = _read_json(folder / "tokenizer_config.json")
    settings = {**older, **newer}
    if "AutoTokenizer" in (settings.get("auto_map") or {}):
        raise ValueError(
            f"{folder}: the tokenizer cannot be read, because it is Python code (auto_map in "
            "tokenizer_config.json), which is not run. Save it as tokenizer.json"
        )
    library, special = _library(folder), _special_tokens(settings)
    # Tokens that only tokenizer_config.json declares as special.
    marked = {x.content for x in library.get_added_tokens_decoder().values() if x.special}
    known = [text for text in special.values() if library.token_to_id(text) is not None]
    library.add_special_tokens([text for text in known if text not in marked])
    return TokenizerFiles(
        folder=folder,
        library=library,
        special=special,
        template=_template(folder, settings),
        bos_id=model.get("bos_token_id"),
        end_ids=_end_ids(generation) or _end_ids(model),
        num_rows=model.get("vocab_size"),
    )


def of_transformers(folder: Path) -> Any:
    """Return the tokenizer object of transformers, whose import takes seconds.

    Raises:
        ValueError: transformers refuses the files.
    """
    # Suppress the advice on standard error to install torch, which is not used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        # trust_remote_code=False, because the default asks at the terminal.
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types for unusable files
        raise _unreadable(folder, error) from error


def difference(folder: Path) -> str:
    """Return a line if transformers splits texts otherwise than tokenizer.json; "" if not.

    Raises:
        ValueError: transformers refuses the files.
    """
    library, other = _library(folder), of_transformers(folder)
    for text in _PROBES:
        ours = library.encode(text, add_special_tokens=False).ids
        theirs = other.encode(text, add_special_tokens=False)
        if ours != theirs:
            return (
                f"{folder}: transformers ({type(other).__name__}) splits {text!r} into {theirs}, "
                f"tokenizer.json into {ours}. Training uses tokenizer.json"
            )
    return ""


def _library(folder: Path) -> Any:
    """Return the tokenizer of `tokenizers`; transformers converts a folder without its file."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return of_transformers(folder).backend_tokenizer
    try:
        library = Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise _unreadable(path, error) from error
    library.no_padding()
    library.no_truncation()
    return library


def _unreadable(path: Path, error: Exception) -> ValueError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ValueError(
        f"{path}: the tokenizer cannot be read ({reason}). Correct the tokenizer files, or "
        "download them again"
    )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    values = {name: settings.get(f"{name}_token") for name in _NAMED}
    texts = {name: x["content"] if isinstance(x, dict) else x for name, x in values.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the chat template: of its own file, or of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    declared = settings.get("chat_template") or ""
    if isinstance(declared, str):
        return declared
    named = {x["name"]: x["template"] for x in declared}
    return named.get("default", "")


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; {} if there is no file."""
    return folders.read_json(path) if path.is_file() else {}


def _end_ids(content: Mapping[str, Any]) -> list[int]:
    """Return the end-of-sequence IDs of a generation_config.json or config.json."""
    declared = content.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    return [i for i in ids if i is not None and i >= 0]  # old Llama files: -1 is none
