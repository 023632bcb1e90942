# SPDX-License-Identifier: Apache-2.0
"""Writer of docs/config.md: default, range and meaning of every setting.

python -m tba_jax.config.document [FILE]
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tba_jax.config.schema import SETTINGS, Config
from tba_jax.settings import Schedule, Setting
from tba_jax.train.objectives import objective_names, own_settings

_HEAD = """\
# Configuration

Every setting. Set one with `--config.NAME=VALUE` or in a preset. `--dry_run` prints the settings of
a run and stops. A resumed run may change the settings marked `*`.

A *schedule* is a number, `linear(START, FINAL, STEPS)` (a straight line) or
`cosine(START, FINAL, STEPS)` (half a wave); without STEPS they end at the last step. Options:
`warmup=W` rises to START over W steps, `hold=H` then stays there for H steps, `jump=J` goes to
FINAL at step J. For example
`--config.optimizer.learning_rate="cosine(1e-5, 0, 600, warmup=50, hold=350)"`.

`python -m tba_jax.config.document docs/config.md` writes this page.
"""

_OWN = """\
### Settings of single objectives

"""
_HEADER = "| setting | default | allowed | meaning |\n|---|---|---|---|\n"


def page() -> str:
    """Return the page as Markdown. Loads JAX."""
    config = Config()
    sections = ["", *config.sections()]
    parts = [_HEAD]
    for section in sections:
        rows = [s for s in SETTINGS.values() if s.name.rpartition(".")[0] == section]
        parts.append(f"## `{section}`\n" if section else "## The run\n")
        parts.append(_table(rows))
        if section == "objective":
            parts.append(_OWN + _own_table())
    return "\n".join(parts)


def _own_table() -> str:
    """Return the table of the objectives' own settings, one row for each name."""
    found: dict[str, dict[str, Setting]] = {}
    for objective in objective_names():
        for setting in own_settings(objective):
            found.setdefault(setting.name, {})[objective] = setting
    return _HEADER + "".join(map(_own_row, found.values()))


def _own_row(settings: Mapping[str, Setting]) -> str:
    """Return one row for a setting that several objectives declare.

    Args:
        settings: objective -> its declaration.
    """
    first = next(iter(settings.values()))
    defaults = _joined({name: f"`{setting.default}`" for name, setting in settings.items()})
    meaning = _joined({name: setting.meaning for name, setting in settings.items()})
    name = f"`{first.name}`, of {', '.join(settings)}"
    return f"| {' | '.join((name, defaults, _allowed(first), meaning))} |\n"


def _joined(texts: Mapping[str, str]) -> str:
    """Return the text of all objectives, or each text with the objectives that it belongs to."""
    names: dict[str, list[str]] = {}
    for objective, text in texts.items():
        names.setdefault(text, []).append(objective)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{', '.join(own)}: {text}" for text, own in names.items())


def _table(rows: Sequence[Setting]) -> str:
    return _HEADER + "".join(map(_row, rows))


def _row(setting: Setting) -> str:
    default = "" if setting.default == "" else f"`{setting.default}`"
    name = f"`{setting.name}`{' *' if setting.on_resume else ''}"
    return f"| {' | '.join((name, default, _allowed(setting), setting.meaning))} |\n"


def _allowed(setting: Setting) -> str:
    rule = setting.rule.removeprefix("must be ").removeprefix("must lie ")
    rule = rule.removeprefix("one of ")
    return "schedule" if setting.type is Schedule else rule or setting.kind


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or write it to the given file."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments:
        Path(arguments[0]).write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
