# SPDX-License-Identifier: Apache-2.0
"""Settings of the task: data, prompts and reward functions."""

import ast
import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

from tba_jax.rewards.functions import VICTIM
from tba_jax.settings import ConfigError, Section, check_all, field, need
from tba_jax.tasks.custom import Custom
from tba_jax.tasks.registry import NAMES, TASKS, task_class
from tba_jax.tasks.rows import FILE_SUFFIXES, TASKSET_PREFIX
from tba_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class TaskSettings(Section):
    """Settings of the task."""

    name: str = field("arithmetic", f"one of {NAMES}")
    data_path: str = field(
        "",
        "a folder with train.jsonl and test.jsonl (or .parquet), or hf://NAME[:CONFIGURATION]; "
        "task custom needs no test split, and takes one .jsonl, .json or .parquet file, or several "
        "sets with their shares of the prompts, a.jsonl:0.7,b.jsonl:0.3; empty: the task's own "
        "source",
    )
    start_path: str = field(
        "",
        "a .jsonl, .json or .parquet file of responses to score and put into the replay buffer "
        'before the first step: rows {"response"}, or with several prompts '
        '{"prompt_id", "response"}; empty: none',
    )
    chat: bool | str = field(
        False,
        "True: text prompts are user messages in the model's chat template; also options of the "
        "template, such as enable_thinking=False, for all chats; special_tokens=False: texts of "
        "special tokens in them stay text",
    )
    reward: str = field(
        "",
        "package.module:function or path/to/file.py:function, several separated by commas: their "
        f"weighted sum; or a learned reward: {VICTIM}; with reward.model_path, that "
        "model's reward is added; empty: the task's own reward, else that of task.environment",
    )
    reward_weights: tuple[float, ...] = field(
        (),
        "one weight per function of task.reward, then one for reward.model_path if both are set; "
        "empty: 1 for each",
    )
    environment: str = field(
        "",
        "package.module:CLASS or path/to/file.py:CLASS that answers the policy's turns; or typed "
        "functions, separated by commas, that the policy may call; or a function run(base_url, "
        "row) that requests the turns over HTTP; or verifiers:TASKSET, which is also the data, or "
        "openenv:URL; empty: a response is one turn",
    )
    renderer: str = field(
        "",
        "with task.environment: format of the library renderers, such as qwen3, for the tool calls "
        "of chats (pip install 'tba_jax[chat-tools]'); empty: the tokenizer's chat template, "
        "which has no tools",
    )
    columns: str = field(
        "",
        "task custom: new names of columns, for example prompt=asked,answer=solution; a column "
        "question, problem, instruction or query is the prompt by default",
    )
    max_prompt_tokens: int = field(
        32,
        "maximum length of a prompt; longer ones are left out and counted; 0: the longest prompt "
        "of the data, within the model's context",
        at_least=0,
    )
    num_eval_prompts: int = field(
        512,
        "held-out prompts per evaluation, 0: the whole split; task custom without a test split "
        "holds out this many training rows",
        at_least=0,
    )

    def replaced(self, values: Mapping[str, Any]) -> "TaskSettings":
        """Return the section with some values changed; a taskset without other data is the data."""
        found = dataclasses.replace(self, **values)
        is_taskset = found.environment.startswith(TASKSET_PREFIX)
        if not is_taskset or (found.data_path and found.data_path != self.environment):
            return found
        return dataclasses.replace(found, name="custom", data_path=found.environment)

    @property
    def chat_options(self) -> dict[str, Any]:
        """Options of the chat template."""
        return template_options(self.chat)

    def check(self) -> None:
        task, start = task_class(self.name), self.start_path
        makes = task.makes_problems
        chats = [name for name, each in TASKS.items() if each.has_chat]
        pairs = [pair.split("=") for pair in self.columns.split(",")] if self.columns else []
        is_pairs = all(len(pair) == 2 and all(map(str.strip, pair)) for pair in pairs)
        rules = {
            "data_path": (
                bool(self.data_path) if task is Custom else not (self.data_path and makes),
                f"task {self.name} {'generates its own problems' if makes else 'needs data'}",
                "Leave it empty for another task; for task custom, give a folder with train.jsonl, "
                "a .jsonl, .json or .parquet file, or hf://NAME of a data set on the hub.",
            ),
            "chat": (
                not self.chat or task.has_chat,
                f"task {self.name} has no chat prompts: its model reads plain problems",
                f"Leave it False, or choose one of {', '.join(chats)}, reasoning_gym:DATASET.",
            ),
            "start_path": (
                not start or (os.path.isfile(start) and start.endswith(FILE_SUFFIXES)),
                "no such .jsonl, .json or .parquet file",
                'Give a file with one object {"response": text} per line; tasks of several prompts '
                'also need "prompt_id".',
            ),
            "columns": (
                is_pairs and (not pairs or self.name == "custom"),
                "must read NEW=OLD, several separated by commas, and needs task custom",
                'For example --config.task.name=custom --config.task.columns="prompt=question".',
            ),
        }
        checks = [
            functools.partial(need, is_right, f"task.{name}", getattr(self, name), rule, remedy)
            for name, (is_right, rule, remedy) in rules.items()
        ]
        check_all(*checks, functools.partial(template_options, self.chat))

    def open(self) -> Task:
        """Return the task; its data is read at first use."""
        return task_class(self.name)(self)


def template_options(value: bool | str, name: str = "config.task.chat") -> Any:
    """Return the options that a text such as "enable_thinking=False, effort=low" lists.

    Args:
        value: a text, or a truth value, which has no options.
        name: name of the setting or flag, for the error.
    """
    if str(value).lower() in ("true", "false"):
        return {}
    words, found = {"true": True, "false": False, "null": None}, dict[str, Any]()
    with contextlib.suppress(SyntaxError, ValueError, AttributeError):
        call: Any = ast.parse(f"options({value})", mode="eval").body
        for option in call.keywords:
            word = getattr(option.value, "id", None)  # without quotation marks
            given = words.get(word, word) if word else ast.literal_eval(option.value)
            found[str(option.arg)] = given
        if ast.unparse(call) == f"options({', '.join(map(ast.unparse, call.keywords))})":
            return found
    raise ConfigError(
        f"{name} = {value!r}: must be True, False, or options of the chat template. For example "
        "enable_thinking=False"
    )
