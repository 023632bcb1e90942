# SPDX-License-Identifier: Apache-2.0
"""Writer of docs/config.md: default, range and meaning of every setting.

python -m tba_jax.config.document FILE
"""

import sys
from collections.abc import Iterator, Mapping
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

_HEADER = "| setting | default | allowed | meaning |\n|---|---|---|---|\n"


def page() -> str:
    """Return the page as Markdown. Loads JAX."""
    parts = [_HEAD]
    for section in ["", *Config().sections()]:
        own = [s for s in SETTINGS.values() if s.name.rpartition(".")[0] == section]
        rows = [
            _row(f"`{s.name}`{' *' * s.on_resume}", f"`{s.default}`" if s.default != "" else "", s)
            for s in own
        ]
        parts.append(f"## `{section}`\n" if section else "## The run\n")
        parts.append(_HEADER + "".join(rows))
        if section == "objective":
            parts.append("### Settings of single objectives\n\n" + _HEADER + "".join(_own_rows()))
    return "\n".join(parts)


def _own_rows() -> Iterator[str]:
    """Yield one row for each name of an objective's own setting."""
    found: dict[str, dict[str, Setting]] = {}
    for objective in objective_names():
        for setting in own_settings(objective):
            found.setdefault(setting.name, {})[objective] = setting
    for name, settings in found.items():
        defaults = _joined({objective: f"`{s.default}`" for objective, s in settings.items()})
        meaning = _joined({objective: s.meaning for objective, s in settings.items()})
        first = next(iter(settings.values()))
        yield _row(f"`{name}`, of {', '.join(settings)}", defaults, first, meaning)


def _joined(texts: Mapping[str, str]) -> str:
    """Return the text of all objectives, or each text with the objectives that it belongs to."""
    names: dict[str, list[str]] = {}
    for objective, text in texts.items():
        names.setdefault(text, []).append(objective)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{', '.join(own)}: {text}" for text, own in names.items())


def _row(name: str, default: str, setting: Setting, meaning: str = "") -> str:
    rule = setting.rule.removeprefix("must be ").removeprefix("must lie ").removeprefix("one of ")
    allowed = "schedule" if setting.type is Schedule else rule or setting.kind
    return f"| {name} | {default} | {allowed} | {meaning or setting.meaning} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
