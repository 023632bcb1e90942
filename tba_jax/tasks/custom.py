# SPDX-License-Identifier: Apache-2.0
"""The `custom` task: the user's own prompts, from files or the hub, graded by the user's reward.

The prompt of a row is its column `prompt`: a text or a list of chat messages. Without this column,
the prompt is the column `messages` without the last answer, or else the first of
`PROMPT_COLUMNS` that the row has. The reward functions receive all other columns.

Invariant: all rows have the same columns and the same kind of prompt, and no prompt is in both
splits.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tba_jax.tasks import rows
from tba_jax.tasks.rows import Rows, has_split, read_rows
from tba_jax.tasks.task import Problem, Split, Task, chat

# Arguments of reward functions in TRL, which does not pass columns of these names either.
DROPPED_COLUMNS = ("completion", "completion_ids")
# In a row without `prompt` and `messages`, the first of these columns is the prompt.
PROMPT_COLUMNS = ("question", "problem", "instruction", "query")
RESERVED_COLUMNS = ("prompts", "completions")


class Custom(Task):
    """Prompts and columns of any data set.

    A test split of the data is the held-out split. Without a test split, at least `num_held_out`
    training rows are held out: the rows whose prompts have the smallest SHA-256. This choice does
    not depend on file order or seed, and rows with equal prompts stay together.

    Args:
        data_path: a source as in `rows`.
        num_held_out: number of rows to hold out if the data has no test split.
        chat: whether to format a text prompt as a user message.
        columns: new names of columns, as in `task.columns`.

    Raises:
        ValueError: the source is missing, or a row is malformed (the message has file and line).
    """

    name = "custom"  # the config must name a reward
    has_chat = True

    def __init__(self, data_path: str, num_held_out: int, chat: bool, columns: str = "") -> None:
        self._data_path, self._num_held_out, self._chat = data_path, num_held_out, chat
        pairs = (pair.split("=") for pair in columns.split(",") if pair)
        self._names = {old.strip(): new.strip() for new, old in pairs}

    @functools.cached_property
    def _splits(self) -> dict[Split, tuple[Rows, Sequence[int]]]:
        """Rows of each split, and the indices of its problems in them."""
        first: list[tuple[Problem, str]] = []
        digests: list[bytes] = []  # of each prompt

        def problems(split: rows.Split) -> Iterator[Problem]:
            for where, row in read_rows(self._data_path, split):
                problem = _problem(_named(row, self._names, where), where)
                first.append((problem, where)) if not first else None
                _same_form(problem, where, *first[0])
                text = json.dumps(problem[0], sort_keys=True)
                digests.append(hashlib.sha256(text.encode()).digest())
                yield problem

        found = Rows(problems("train"))
        if has_split(self._data_path, "test"):
            test = Rows(problems("test"))
            return {"train": (found, range(len(found))), "eval": (test, range(len(test)))}
        held_out = _split_off(digests, self._num_held_out, self._data_path)
        kept = [i for i in range(len(found)) if i not in held_out]
        return {"train": (found, kept), "eval": (found, sorted(held_out))}

    def size(self, split: Split) -> int:
        return len(self._splits[split][1])

    def problem(self, split: Split, index: int) -> Problem:
        found, chosen = self._splits[split]
        prompt, columns = found[chosen[index]]
        is_chat = self._chat or isinstance(prompt, list)
        return chat(prompt, columns) if is_chat else (prompt, columns)


def _named(row: dict[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return a row with renamed columns, and with a column `prompt` if one can be derived."""
    missing = [old for old in names if old not in row]
    if missing:
        raise ValueError(
            f"{where}: no column {missing[0]!r}, which task.columns names; got "
            f"{', '.join(sorted(map(str, row)))}. Correct --config.task.columns"
        )
    found = {names.get(name, name): value for name, value in row.items()}
    if "prompt" in found:
        return found
    usual = next((name for name in PROMPT_COLUMNS if name in found), "")
    if isinstance(found.get("messages"), list):
        messages = found.pop("messages")
        last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
        is_answered = last.get("role") == "assistant"
        found["prompt"] = messages[:-1] if is_answered else messages
        if is_answered:
            found["reference_answer"] = last.get("content")
    elif "messages" not in found and usual:
        found["prompt"] = found.pop(usual)
    return found


def _problem(row: dict[str, Any], where: str) -> Problem:
    """Return the prompt and the columns of a row; raise ValueError if they cannot be used."""
    if "prompt" not in row:
        columns = ", ".join(sorted(map(str, row)))
        raise ValueError(
            f"{where}: no column 'prompt'; got {columns}. Name it, for example "
            f'--config.task.columns="prompt={min(map(str, row), default="question")}"'
        )
    for name in (name for name in RESERVED_COLUMNS if name in row):
        raise ValueError(
            f"{where}: column {name!r} has the name of a reward function's argument. Rename "
            f"it, for example --config.task.columns=my_{name}={name}"
        )
    prompt = row["prompt"]
    columns = {k: v for k, v in row.items() if k != "prompt" and k not in DROPPED_COLUMNS}
    for name, value in columns.items():
        if not _is_plain(value):
            raise ValueError(
                f"{where}: column {name!r} holds {value!r:.80}, a {type(value).__name__}; wanted "
                "text, finite numbers, true, false, null, and lists or objects of them. Convert it "
                "or remove the column"
            )
    is_text, is_list = isinstance(prompt, str) and prompt, isinstance(prompt, list) and prompt
    if not (is_text or (is_list and all(map(_is_message, prompt)))):
        raise ValueError(
            f"{where}: 'prompt' is {prompt!r:.80}; wanted text, or a list of chat messages, "
            "objects with the texts 'role' and 'content'. Convert it"
        )
    return prompt, columns


def _is_message(value: Any) -> bool:
    names = ("role", "content")
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in names)


def _is_plain(value: Any) -> bool:
    """Return whether JSON stores and restores the value unchanged; checkpoints need that."""
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        return False


def _same_form(problem: Problem, where: str, first: Problem, first_where: str) -> None:
    """Refuse a problem whose columns or kind of prompt differ from the first's."""
    kind, first_kind = (
        "texts" if isinstance(prompt, str) else "chat messages" for prompt, _ in (problem, first)
    )
    if kind != first_kind:
        raise ValueError(
            f"{where}: the prompt is of kind {kind!r}, in {first_where} it is {first_kind!r}. "
            "Convert one of them"
        )
    for name in sorted(problem[1].keys() ^ first[1].keys()):
        here, there = (where, first_where) if name in first[1] else (first_where, where)
        raise ValueError(
            f"{here}: no column {name!r}, which {there} has. Write null in rows without a value"
        )


def _split_off(prompts: Sequence[bytes], num_held_out: int, source: str) -> set[int]:
    """Return the indices of the held-out rows, from digests of all prompts."""
    if num_held_out < 1:
        raise ValueError(
            f"task.num_eval_prompts={num_held_out}: {source} has no test split, so the number of "
            "rows to hold out is needed. Set --config.task.num_eval_prompts=100"
        )
    bound = sorted(prompts)[:num_held_out][-1]
    held_out = {i for i, digest in enumerate(prompts) if digest <= bound}
    if len(held_out) == len(prompts):
        raise ValueError(
            f"task.num_eval_prompts={num_held_out}: {source} has {len(prompts)} rows and no test "
            "split, so no row is left to train on. Lower it, or give a folder with train.jsonl and "
            "test.jsonl"
        )
    return held_out
