# SPDX-License-Identifier: Apache-2.0
"""docs/config.md: every setting with its default, its range and its meaning, as declared.

python -m tba_jax.config.document [FILE]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tba_jax.config.schema import SETTINGS, Config
from tba_jax.settings import Setting

_HEAD = """\
# Configuration

Every setting, as `--config.NAME=VALUE` gives it and a preset of `configs/` changes it. `--dry_run`
prints those of a run and stops. A resumed run may change the settings marked `*`: they decide what
is logged, kept and risked, not what is computed.

This page is generated from the declarations, each in the `config.py` of the part that consumes it:
`python -m tba_jax.config.document docs/config.md`.
"""


def page() -> str:
    """The page as Markdown."""
    config = Config()
    sections = {"": "The run", **{n: s.__doc__ or "" for n, s in config.sections().items()}}
    parts = [_HEAD]
    for section, title in sections.items():
        rows = [s for s in SETTINGS.values() if s.name.rpartition(".")[0] == section]
        head = f"## `{section}`\n\n{title}\n" if section else f"## {title}\n"
        table = "| setting | default | allowed | meaning |\n|---|---|---|---|\n"
        parts.append(head + "\n" + table + "".join(map(_row, rows)))
    return "\n".join(parts)


def _row(setting: Setting) -> str:
    default = "" if setting.default == "" else f"`{setting.default}`"
    allowed = setting.rule.removeprefix("must be ").removeprefix("must lie ")
    allowed = allowed.removeprefix("one of ") or _type(setting)
    name = f"`{setting.name}`{' *' if setting.on_resume else ''}"
    return f"| {' | '.join((name, default, allowed, setting.meaning))} |\n"


def _type(setting: Setting) -> str:
    return {str: "text", int: "whole number", float: "number", bool: "True, False"}.get(
        setting.type, "list"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or write it to the file that is named."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments:
        Path(arguments[0]).write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
