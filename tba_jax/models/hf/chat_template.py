# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages to text by the Jinja template of a model folder, by transformers."""

import os
from collections.abc import Mapping, Sequence
from typing import Any


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    continues: bool,
    variables: Mapping[str, Any],
) -> str:
    """Return the text of a conversation up to the start of the response.

    Args:
        template: Jinja source.
        messages: each with "role" and "content".
        continues: the last message begins the response, and the text ends with its content.
            Otherwise the template adds the header of the response.
        variables: further variables of the template: special tokens and a user's options.

    Raises:
        ValueError: the template is not valid, refuses the messages, or does not write the content
            of the last message, which begins the response.
    """
    # Suppress the advice on standard error to install torch, which is not used.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Imported here, as the import takes a second and most prompts are no chats.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    conversations: list[Any] = [list(messages)]
    try:
        texts, _ = render_jinja_template(
            conversations,
            chat_template=template,
            continue_final_message=continues,
            add_generation_prompt=not continues,
            **variables,
        )
    except (TemplateError, ValueError) as error:
        raise ValueError(
            f"the chat template of this tokenizer refuses the messages ({error}). Change the "
            "roles or their order, or use another template"
        ) from error
    return texts[0]
