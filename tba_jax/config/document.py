# SPDX-License-Identifier: Apache-2.0
"""Writer of docs/config.md: default, range and meaning of every setting.

python -m tba_jax.config.document [FILE]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tba_jax.config.schema import SETTINGS, Config
from tba_jax.settings import Setting
from tba_jax.train.objectives.registry import objective_names, own_settings

_HEAD = """\
# Configuration

Every setting. Set one with `--config.NAME=VALUE` or in a preset of `configs/`. `--dry_run` prints
the settings of a run and stops. A resumed run may change the settings marked `*`: they concern
logs, storage, devices and limits, not the training.

`objective.beta`, `objective.reference_temperature`, `objective.reward_temperature` and
`optimizer.learning_rate` are schedules. A number is a constant. `linear(START, FINAL, STEPS)` moves
on a straight line and `cosine(START, FINAL, STEPS)` on half a cosine wave; without STEPS they end
at the last step of the run. Options: `warmup=W` rises linearly to START over W steps, `hold=H` then
stays there for H steps, `jump=J` goes to FINAL at step J. For example
`--config.optimizer.learning_rate="cosine(1e-5, 0, 600, warmup=50, hold=350)"`.

`python -m tba_jax.config.document docs/config.md` writes this page from the declarations.
"""


def page() -> str:
    """Return the page as Markdown. Loads JAX."""
    config = Config()
    sections = {"": "The run", **{n: s.__doc__ or "" for n, s in config.sections().items()}}
    parts = [_HEAD]
    for section, title in sections.items():
        rows = [s for s in SETTINGS.values() if s.name.rpartition(".")[0] == section]
        parts.append(f"## `{section}`\n\n{title}\n" if section else f"## {title}\n")
        parts.append(_table(rows))
        if section == "objective":
            parts += [_own(name) for name in objective_names() if own_settings(name)]
    return "\n".join(parts)


def _own(objective: str) -> str:
    """Return the part of the page with an objective's own settings."""
    return f"### `objective.name={objective}`\n\n{_table(own_settings(objective))}"


def _table(rows: Sequence[Setting]) -> str:
    head = "| setting | default | allowed | meaning |\n|---|---|---|---|\n"
    return head + "".join(map(_row, rows))


def _row(setting: Setting) -> str:
    default = "" if setting.default == "" else f"`{setting.default}`"
    allowed = setting.rule.removeprefix("must be ").removeprefix("must lie ")
    allowed = allowed.removeprefix("one of ") or setting.kind
    name = f"`{setting.name}`{' *' if setting.on_resume else ''}"
    return f"| {' | '.join((name, default, allowed, setting.meaning))} |\n"


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
