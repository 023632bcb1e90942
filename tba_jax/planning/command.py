# SPDX-License-Identifier: Apache-2.0
"""Command: memory and speed of a run on devices that need not be attached.

python -m tba_jax.plan --config=math[:PRESET] [--topology=v5p:2x2x4] [--json]
    [--keep_placement] [--programs=NAME,...] [--write_cache=DIR]
    [--config.FIELD=VALUE ...]

The command compiles every device program of the run at its largest shapes, each in its own process.
It prints memory by kind (of the compiler), least times (by arithmetic), peak memory and advice. It
needs only the model's config.json, no weights. The exit code is 0 if the run fits, 1 if the run
does not fit or compile, and 2 if the command or the config is invalid.

Hosts of a slice have four chips; v5e:2x4@8 is one host of eight. For a slice, the plan chooses the
placement, the rows of a micro-batch and the decode slots, as a run does, makes the rows and slots
smaller until the compiled programs fit, and prints all as config flags. --keep_placement keeps the
placement of the config. --write_cache fills a persistent compilation cache for runs with
JAX_COMPILATION_CACHE_DIR=DIR.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, ConfigError, replace
from tba_jax.planning.child import REMAT, ROWS, SLOTS, Request, ask
from tba_jax.planning.verdict import Facts, Plan, Program, flags

_DECIDES = {  # programs whose shapes a setting decides
    ROWS: ("train_step",),
    REMAT: ("train_step",),
    SLOTS: ("prefill", "extend", "copy", "decode_chunk"),
}


def plan(
    request: Request,
    facts: Facts,
    names: Sequence[str],
    ask: Callable[[Request], Facts | Program] = ask,
) -> Plan:
    """Compile programs; make sizes that the plan chose smaller until all programs fit.

    Args:
        request: request of the description.
        facts: description of the run.
        names: programs to compile.
        ask: sends a request to a child process and returns its answer.
    """
    compiled: dict[str, Program] = {}
    while True:
        described = {p.name: p for p in facts.programs}
        for name in names:
            if name not in compiled:
                _say(f"compiling {name} of {facts.layout}")
                program = ask(request._replace(config=facts.config, program=described[name]))
                assert isinstance(program, Program)
                compiled[name] = program
        done = Plan(facts, [compiled[name] for name in names])
        fields = done.smaller()
        if not fields:
            return done
        _say(f"does not fit; trying {flags(fields)}")
        chosen = {**facts.changed_fields, **fields}
        found = ask(request._replace(config=replace(facts.config, fields), chooses=False))
        assert isinstance(found, Facts)
        facts = dataclasses.replace(found, changed_fields=chosen)
        for name in fields:
            for program in _DECIDES[name]:
                compiled.pop(program, None)


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, print, and return the exit code.

    Raises:
        ValueError: the flags or the config are invalid.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", default="", help="preset math[:PRESET], or file FILE.py[:PRESET]")
    slices = "v5e:2x4, v5p:2x2x4, h100:8 or h100:2x8"
    add("--topology", default="", help=f"slice, such as {slices}; default: the attached devices")
    add("--keep_placement", action="store_true", help="keep the placement of the config")
    add("--programs", default="", help="programs to compile, separated by commas; default: all")
    add("--write_cache", default="", help="write compiled programs into this folder")
    add("--json", action="store_true", help="print one JSON object as the last line")
    args, overrides = parser.parse_known_args(argv)
    if not args.config:
        raise ConfigError("no --config given; try --config=math")
    config = _config_of(args.config, overrides)
    from tba_jax.planning.shapes import config_of, judge_paths
    from tba_jax.run.model_parts import model_path

    chooses = bool(args.topology) and not args.keep_placement
    # A plan for a slice replaces the rows of a preset; those of the command line stay.
    keeps_rows = config.batch.micro_batch_rows and (
        not chooses or any(text.startswith(f"--config.{ROWS}") for text in overrides)
    )
    keeps = {ROWS: keeps_rows, SLOTS: config.search.num_slots, REMAT: config.model.remat != "auto"}
    request = Request(
        topology=args.topology,
        model=config_of(model_path(config)),
        judges={role: config_of(path) for role, path in judge_paths(config).items()},
        cache=args.write_cache,
        fixed=[name for name, is_kept in keeps.items() if is_kept],
        config=config,
        chooses=chooses,
    )
    facts = ask(request)
    assert isinstance(facts, Facts)
    known = [p.name for p in facts.programs]
    names = [n for n in args.programs.split(",") if n] or known
    if strays := [n for n in names if n not in known]:
        raise ConfigError(f"--programs={strays[0]}: no such program; programs: {', '.join(known)}")
    done = plan(request, facts, names)
    print(done.as_text(model_path(config), args.topology or "attached"))
    if args.json:
        print(json.dumps(done.as_json()))
    return 0 if done.fits else 1


def _config_of(name: str, overrides: Sequence[str]) -> Config:
    """Return the validated config of a command; missing length limits are measured."""
    config = override(None, [f"--config={name}", *overrides])
    validate(config)
    if config.placement == "fleet":
        raise ConfigError(
            f"config.placement = {config.placement!r}: a plan is for the devices of one slice. Set "
            "--config.placement=auto"
        )
    from tba_jax.planning.choices import with_lengths

    config, line = with_lengths(config)
    if line:
        _say(f"lengths {line}")
    return config


def _say(line: str) -> None:
    """Print progress to standard error; standard output has the plan."""
    print(line, file=sys.stderr, flush=True)
