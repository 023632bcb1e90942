# SPDX-License-Identifier: Apache-2.0
"""Settings of the task: data, prompts and reward functions."""

import functools
import os
from dataclasses import dataclass

from tba_jax.rewards.kinds import VICTIM
from tba_jax.settings import ConfigError, Section, check_all, field, need
from tba_jax.tasks.mixture import data_sets
from tba_jax.tasks.registry import NAMES, REASONING_GYM_PREFIX, TASKS, get_task, task_class
from tba_jax.tasks.rows import FILE_SUFFIXES, HUB_PREFIX
from tba_jax.tasks.task import Task


@dataclass(frozen=True)
class TaskSettings(Section):
    """Settings of the task."""

    name: str = field("arithmetic", f"one of {NAMES}")
    data_path: str = field(
        "",
        "a folder with train.jsonl and test.jsonl (or .parquet), or hf://NAME[:CONFIGURATION]; "
        "task custom needs no test split, and also takes one .jsonl or .parquet file, or several "
        "sets with their shares of the prompts, a.jsonl:0.7,b.jsonl:0.3; empty: the task's own "
        "source",
    )
    start_path: str = field(
        "",
        "a .jsonl or .parquet file of responses that are scored and put into the replay buffer "
        'before the first step: rows {"response"}, or with several prompts '
        '{"prompt_id", "response"}; empty: none',
    )
    chat: bool = field(False, "format text prompts as user messages of the model's chat template")
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
        "row) that requests the turns over HTTP; or verifiers:TASKSET or openenv:URL; empty: a "
        "response is one turn",
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

    def check(self) -> None:
        is_known = self.name in TASKS or bool(self.name.partition(REASONING_GYM_PREFIX)[2])
        chats = [name for name, task in TASKS.items() if task.has_chat]
        start = self.start_path
        is_start = not start or (os.path.isfile(start) and start.endswith(FILE_SUFFIXES))
        pairs = [pair.split("=") for pair in self.columns.split(",")] if self.columns else []
        is_pairs = all(len(pair) == 2 and all(map(str.strip, pair)) for pair in pairs)
        rules = {
            "name": (is_known, f"must be one of {NAMES}", "For example --config.task.name=custom."),
            "chat": (
                not self.chat or not is_known or task_class(self.name).has_chat,
                f"task {self.name} has no chat prompts: its model reads plain problems",
                f"Leave it False, or choose one of {', '.join(chats)}, reasoning_gym:DATASET.",
            ),
            "start_path": (
                is_start,
                "no such .jsonl or .parquet file",
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
        check_all(*checks, self._check_data)

    def open(self) -> Task:
        """Return the task; its data is read at first use."""
        count, options = self.num_eval_prompts, {"chat": self.chat, "columns": self.columns}
        return get_task(self.name, self.data_path, count, **options)

    def _check_data(self) -> None:
        is_custom = self.name == "custom"
        try:
            paths = [path for path, _ in data_sets(self.data_path)] if is_custom else []
        except ValueError as error:
            raise ConfigError(str(error)) from error
        for path in paths or [self.data_path]:
            why, is_named = "", path.endswith(FILE_SUFFIXES) or path.startswith(HUB_PREFIX)
            if not path:
                why = "task custom needs data" if is_custom else ""
            elif not os.path.exists(path) and "://" not in path:
                why = "no such folder or file"
            elif not os.path.isdir(path) and not is_named:
                why = "must be a folder, a .jsonl or .parquet file, or hf://NAME"
            remedy = (
                "Give a folder that holds train.jsonl and test.jsonl; task custom also takes one "
                ".jsonl or .parquet file, or hf://NAME of a data set on the hub."
            )
            need(not why, "task.data_path", path, why, remedy)
