# SPDX-License-Identifier: Apache-2.0
"""The `custom` task: the user's own prompts, from files or the hub, graded by the user's reward.

The prompt of a row is its column `prompt`: a text or a list of chat messages. Without this column,
the prompt is the column `messages` without the last answer, or else the first of
`PROMPT_COLUMNS` that the row has. The reward functions receive all other columns.

With several data sets, an epoch has every row of every set at least once; if a set is smaller than
its share, its rows occur several times. Every row then has a column `data_set`, the name of its
set, and the columns of all sets, with None for columns that its own set lacks.

Invariant: all rows of a set have the same columns, all prompts are texts or all are chats, and no
prompt of a set is in both splits.
"""

import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.tasks import rows
from tba_jax.tasks.rows import has_split, read_rows
from tba_jax.tasks.task import Problem, PromptContent, Split, Task, chat

# Arguments of reward functions in TRL, which does not pass columns of these names either.
DROPPED_COLUMNS = ("completion", "completion_ids")
# In a row without `prompt` and `messages`, the first of these columns is the prompt.
PROMPT_COLUMNS = ("question", "problem", "instruction", "query")
RESERVED_COLUMNS = ("prompts", "completions")
COLUMN = "data_set"


class _DataSet:
    """A data set with its rows of both splits.

    A test split of the data is the held-out split. Without a test split, at least `num_held_out`
    training rows are held out: the rows whose prompts have the smallest SHA-256. This choice does
    not depend on file order or seed, and rows with equal prompts stay together.

    Attributes:
        path: a source as in `rows`.
        test: source and name of the test split; None: the test split of `path`, if any.
        is_disjoint: whether training rows with a prompt of the test split are left out.
    """

    def __init__(self, path: str, num_held_out: int, read: Callable[..., Problem]) -> None:
        self.path, self._num_held_out, self._read = path, num_held_out, read
        self.test: tuple[str, rows.Split] | None = None
        self.is_disjoint = False

    @functools.cached_property
    def rows(self) -> dict[Split, list[tuple[str, Problem]]]:
        """Place and problem of the rows of each split."""
        train = [(x, self._read(row, x)) for x, row in read_rows(self.path, "train")]
        held_out = read_rows(*(self.test or (self.path, "test"))) if self.has_test else ()
        test = [(x, self._read(row, x)) for x, row in held_out]
        for row in (*train, *test):
            _same_columns(*row, *train[0])
        digests = [_digest(prompt) for _, (prompt, _) in train]
        out = {_digest(prompt) for _, (prompt, _) in test} if self.is_disjoint else set[bytes]()
        if not test:
            out = _held_out(digests, self._num_held_out, self.path)
            test = [row for row, x in zip(train, digests, strict=True) if x in out]
        kept = [row for row, x in zip(train, digests, strict=True) if x not in out]
        return {"train": kept, "eval": test}

    @property
    def has_test(self) -> bool:
        return self.test is not None or has_split(self.path, "test")


class Custom(Task):
    """Prompts and columns of any data sets.

    Rows to hold out are divided by the weights of the sets. If one prompt is a chat, prompts that
    are texts become messages of the user.

    Raises:
        ValueError: a source is missing, a row is malformed (the message has file and line), or
            two sets have the same name.
    """

    name = "custom"  # the config must name a reward
    has_chat = True

    def __init__(self, settings: Any, data_path: str = "") -> None:
        super().__init__(settings)
        sets, num_held_out = data_sets(data_path or settings.data_path), settings.num_eval_prompts
        self._chat = bool(settings.chat)
        if len(sets) > 1:
            ends = (os.path.basename(path.rstrip("/")) for path in sets)
            self.data_sets = tuple(os.path.splitext(name)[0] for name in ends)
        if len({*self.data_sets}) < len(self.data_sets):
            raise ValueError(
                f"task.data_path: data sets are named {', '.join(self.data_sets)} in metrics, and "
                "two have the same name. Rename a file"
            )
        total, least = sum(sets.values()), min(1, num_held_out)
        self._is_weighted = bool(total)
        self._shares = [weight / total if total else 1 / len(sets) for weight in sets.values()]
        pairs = (pair.split("=") for pair in settings.columns.split(",") if pair)
        self._names = {old.strip(): new.strip() for new, old in pairs}
        self._sets = [
            _DataSet(path, max(least, round(share * num_held_out)), self._read)
            for path, share in zip(sets, self._shares, strict=True)
        ]

    def _read(self, row: dict[str, Any], where: str) -> Problem:
        """Return the prompt and the columns of a row; raise ValueError if they cannot be used."""
        columns = {self._names.get(name, name): value for name, value in row.items()}
        usual = next((name for name in PROMPT_COLUMNS if name in columns), "")
        if "prompt" not in columns and isinstance(columns.get("messages"), list):
            *before, last = columns.pop("messages") or [{}]
            columns["prompt"] = [*before, last]
            if isinstance(last, dict) and last.get("role") == "assistant":
                columns |= {"prompt": before, "reference_answer": last.get("content")}
        elif "prompt" not in columns and "messages" not in columns and usual:
            columns["prompt"] = columns.pop(usual)
        missing = [old for old in self._names if old not in row]
        if missing or "prompt" not in columns:
            example = f"prompt={min(map(str, row), default='question')}"
            column = f"{missing[0]!r}, which task.columns names" if missing else "'prompt'"
            raise ValueError(
                f"{where}: no column {column}; got {', '.join(sorted(map(str, row)))}. Set "
                f'--config.task.columns="{example}"'
            )
        prompt = columns.pop("prompt")
        columns = {name: value for name, value in columns.items() if name not in DROPPED_COLUMNS}
        for name, value in columns.items():
            if name in RESERVED_COLUMNS or (self.data_sets and name == COLUMN):
                raise ValueError(
                    f"{where}: column {name!r} has the name of a reward function's argument. "
                    f"Rename it, for example --config.task.columns=my_{name}={name}"
                )
            if not _is_plain(value):
                raise ValueError(
                    f"{where}: column {name!r} holds {value!r:.80}, a {type(value).__name__}; "
                    "wanted text, finite numbers, true, false, null, and lists or objects of them. "
                    "Convert it or remove the column"
                )
        if not (is_chat(prompt) or (prompt and isinstance(prompt, str))):
            raise ValueError(
                f"{where}: 'prompt' is {prompt!r:.80}; wanted text, or a list of chat messages, "
                "objects with the texts 'role' and 'content'. Convert it"
            )
        return prompt, columns

    @functools.cached_property
    def _rows(self) -> dict[Split, list[tuple[str, Problem]]]:
        """Place and problem of each row of an epoch, set by set, and of each held-out row."""
        whole = [row[1] for each in self._sets for rows in each.rows.values() for row in rows]
        absent = {name: None for _, columns in whole for name in columns}
        in_template = self._chat or any(isinstance(prompt, list) for prompt, _ in whole)

        def finished(where: str, problem: Problem, data_set: str) -> tuple[str, Problem]:
            prompt, columns = problem
            if data_set:
                columns = {**absent, **columns, COLUMN: data_set}
            return where, chat(prompt, columns) if in_template else (prompt, columns)

        named = [*zip(self._sets, self.data_sets or ("",), strict=True)]
        train, held_out = (
            [[finished(*row, name) for row in each.rows[split]] for each, name in named]
            for split in ("train", "eval")
        )
        sizes = [len(own) for own in train]
        if self._is_weighted:
            most = max(n / share for n, share in zip(sizes, self._shares, strict=True))
            sizes = [max(n, round(x * most)) for n, x in zip(sizes, self._shares, strict=True)]
        return {
            "train": [
                own[i % len(own)] for own, n in zip(train, sizes, strict=True) for i in range(n)
            ],
            # The sets alternate.
            "eval": [x for turn in itertools.zip_longest(*held_out) for x in turn if x],
        }

    def most_held_out(self, share: float) -> int:
        """Return the most rows that can be held out without using more than `share` of any set.

        0 if every set has a test split.
        """
        if all(each.has_test for each in self._sets):
            return 0
        sizes = [len(each.rows["train"]) + len(each.rows["eval"]) for each in self._sets]
        return max(1, min(int(n * share / of) for n, of in zip(sizes, self._shares, strict=True)))

    def size(self, split: Split) -> int:
        return len(self._rows[split])

    def problem(self, split: Split, index: int) -> Problem:
        return self._rows[split][index][1]

    def place(self, split: Split, index: int) -> str:
        return self._rows[split][index][0]


def data_sets(data_path: str) -> dict[str, float]:
    """Return path -> weight of the data sets that `task.data_path` names; 0: by number of rows.

        data_sets("a.jsonl:0.7,b.jsonl:0.3") == {"a.jsonl": 0.7, "b.jsonl": 0.3}

    Raises:
        ValueError: only some data sets have a weight above 0.
    """
    if os.path.exists(data_path) or "," not in data_path:
        return {data_path: 0.0}
    found: dict[str, float] = {}
    for part in data_path.split(","):
        path, weight = re.findall(r"(.*?)(?::([\d.]+))?$", part.strip())[0]
        found[path] = float(weight or 0.0)
    if len({weight > 0 for weight in found.values()}) > 1:
        raise ValueError(
            f"task.data_path={data_path}: some data sets have a weight and some have none. Write "
            'for example --config.task.data_path="a.jsonl:0.7,b.jsonl:0.3"'
        )
    return found


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of chat messages, and not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict) and isinstance(message.get(name), str)
            for message in value
            for name in ("role", "content")
        )
    )


def _is_plain(value: Any) -> bool:
    """Return whether JSON stores and restores the value unchanged; checkpoints need that."""
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        return False


def _same_columns(where: str, problem: Problem, first_where: str, first: Problem) -> None:
    for name in sorted(problem[1].keys() ^ first[1].keys()):
        here, there = (where, first_where) if name in first[1] else (first_where, where)
        raise ValueError(
            f"{here}: no column {name!r}, which {there} has. Write null in rows without a value"
        )


def _digest(prompt: PromptContent) -> bytes:
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()


def _held_out(digests: Sequence[bytes], num_held_out: int, source: str) -> set[bytes]:
    """Return the digests of held-out prompts, from those of all prompts."""
    bound = max(sorted(digests)[:num_held_out], default=b"")
    if bound in (b"", max(digests)):
        raise ValueError(
            f"task.num_eval_prompts={num_held_out}: {source} has {len(digests)} rows and no test "
            "split, so no row is held out, or none is left to train on. Set a smaller number, but "
            "at least 1, or give a folder with train.jsonl and test.jsonl"
        )
    return {digest for digest in digests if digest <= bound}
