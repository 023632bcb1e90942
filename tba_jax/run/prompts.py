# SPDX-License-Identifier: Apache-2.0
"""The training prompts of a run, looked through once before its first step.

What was found is kept in the work directory as prompts.json, under a name for the data, the
tokenizer and the settings that it depends on: a run that is resumed does not tokenize all again.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping

from tba_jax.run.shared import Shared
from tba_jax.search import prompt_survey
from tba_jax.storage import sealed
from tba_jax.tasks.registry import entry_of


def check_prompts(
    shared: Shared,
    fingerprints: Mapping[str, str],
    phase: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    """Refuse prompts that the run would refuse later; say what it will leave out or lose.

    Args:
        shared: what it stands on; one process of the run looks.
        fingerprints: of data and tokenizer.
        phase: told what takes long.
        note: told what was found.

    Raises:
        ValueError: prompts that are too long, or cannot be read.
    """
    task = shared.config.task
    if entry_of(task.name).makes_problems or not shared.cluster.is_primary:
        return
    about = [task.name, task.chat, task.max_prompt_tokens, task.num_eval_prompts]
    about += [fingerprints["data"], fingerprints["tokenizer"]]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    path = shared.workdir / "prompts.json"
    found: prompt_survey.Survey | None = None
    # None there, or another's: it is made again.
    with contextlib.suppress(OSError, ValueError, TypeError):
        facts = sealed.read(path)
        found = prompt_survey.Survey.of(facts["survey"]) if facts.get("of") == name else None
    if found is None:
        phase(f"looking through {shared.task.train_size():,} prompts")
        found = prompt_survey.survey(shared.task, shared.tokenizer, task.max_prompt_tokens)
        sealed.write(path, {"of": name, "survey": dataclasses.asdict(found)})
    lines = prompt_survey.judge(found, task.name, task.max_prompt_tokens, task.long_prompts)
    for line in lines:
        note(line)
