# SPDX-License-Identifier: Apache-2.0
"""The HTML pages of the package: jinja2 templates, one style sheet, one script.

Invariant: a page fetches nothing and runs only its own script, and every text is escaped, because
model outputs may contain anything.
"""

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tba_jax.report import words

FOLDER = Path(__file__).parent / "templates"


def _shown(value: Any) -> Any:
    """Return text with control characters escaped; jinja2 then escapes the markup."""
    return value if isinstance(value, Markup) else words.shown(str(value))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("plain", "metric_label", "is_share", "held_out"):
        environment.filters[name] = getattr(words, name)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _digest(text: str) -> str:
    """Return the source expression of a Content-Security-Policy that allows this text only."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render(template: str, script: str = "", **values: Any) -> str:
    """Return a page as HTML text.

    Args:
        template: file of `templates/`; it extends base.html.
        script: file of `templates/` that the page runs; "": none.
        values: variables of the template.
    """
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    code = (FOLDER / script).read_text(encoding="utf-8") if script else ""
    policy = f"default-src 'none'; img-src data:; style-src {_digest(style)}"
    if code:
        policy += f"; script-src {_digest(code)}"
    trusted = {"policy": Markup(policy), "style": Markup(style), "script": Markup(code)}
    return _environment().get_template(template).render(**trusted, **values)


def picture(png: bytes) -> str:
    """Return the address of a picture that the page contains."""
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
