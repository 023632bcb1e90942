# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages to text by the Jinja template of a model folder, as in transformers."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

# Marks the end of the last message while a template renders it. A template that strips messages
# removes the space at the end of the mark.
_END = "\ue000END\ue000 "


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
            of the last message.
    """
    from jinja2 import TemplateError

    shown = [dict(message) for message in messages]
    if continues:
        shown[-1]["content"] += _END
    try:
        text = _compiled(template).render(
            messages=shown,
            tools=None,
            documents=None,
            add_generation_prompt=not continues,
            **variables,
        )
    except TemplateError as error:
        raise ValueError(
            f"the chat template of this tokenizer refuses the messages ({error}). Change the "
            "roles or their order"
        ) from error
    if not continues:
        return text
    before, mark, after = text.rpartition(_END.strip())
    if not mark:
        raise ValueError(
            "the chat template of this tokenizer does not write the last message, which begins the "
            "response. Remove this message, or use another template"
        )
    return before if after.startswith(" ") else before.rstrip()


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """Return the compiled template, with the functions that transformers gives to templates."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks the assistant's text for training, changes no text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

        def _unchanged(self, caller: Any) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        # Jinja's own filter would escape HTML characters.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)
