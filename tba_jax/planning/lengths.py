# SPDX-License-Identifier: Apache-2.0
"""Choice of the lengths of prompts and responses that a config does not set."""

from tba_jax.config.schema import Config, replace
from tba_jax.run.model_parts import describe_model
from tba_jax.search.prompts import text_of
from tba_jax.tasks.mixture import Mixture, data_sets
from tba_jax.tasks.registry import get_task
from tba_jax.tasks.rows import has_split

_LOOKED_AT = 2000  # number of prompts whose length is measured, evenly spaced
_MULTIPLE = 32  # programs are compiled for few lengths
_HELD_OUT_SHARE = 5  # at most one in five rows is held out


def with_lengths(config: Config) -> tuple[Config, str]:
    """Return a config with all lengths, and a text with the facts from which they were chosen.

    If `task.max_prompt_tokens` is 0, the function sets three limits: prompts are at most as long as
    the longest prompt of the data, responses fit the rest of the model's context, and at most a
    fifth of the rows is held out. The choice depends only on data, model and config, so a resumed
    run makes the same choice.

    Raises:
        ValueError: the data or the model cannot be used.
    """
    if config.task.max_prompt_tokens:
        return config, ""
    task_settings = config.task
    task = get_task(
        task_settings.name,
        task_settings.data_path,
        num_held_out=1,
        chat=task_settings.chat,
        columns=task_settings.columns,
    )
    size = task.train_size()
    model = describe_model(config, with_weights=False)
    tokenizer = model.load_tokenizer()
    step = max(1, size // _LOOKED_AT)
    texts = (text_of(task, tokenizer, "train", i) for i in range(0, size, step))
    longest = max(len(tokenizer.encode(text, add_bos)) for text, add_bos, _ in texts)
    context = model.config.max_positions
    response = min(config.search.max_new_tokens, context // 2)
    prompt = min(-(-longest // _MULTIPLE) * _MULTIPLE, context - response)
    fields = {
        "task.max_prompt_tokens": prompt,
        "search.max_new_tokens": response,
    }
    sets = [path for path, _ in data_sets(task_settings.data_path) if path]
    if not sets or not all(has_split(path, "test") for path in sets):
        most = max(1, (size + 1) // _HELD_OUT_SHARE)
        if isinstance(task, Mixture):
            most = task.most_held_out(1 / _HELD_OUT_SHARE)
        fields["task.num_eval_prompts"] = min(task_settings.num_eval_prompts, most)
    return replace(config, fields), (
        f"prompts of up to {longest} tokens, and a context of {context}"
    )
