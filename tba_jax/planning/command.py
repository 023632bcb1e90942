# SPDX-License-Identifier: Apache-2.0
"""Command: memory and speed of a run on devices that need not be attached.

python -m tba_jax.plan --config=math[:PRESET] [--topology=v5p:2x2x4] [--json]
    [--keep_placement] [--programs=NAME,...] [--write_cache=DIR] [--timeout_s=N]
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
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, ConfigError, plain
from tba_jax.devices.placement import MODES
from tba_jax.planning import table
from tba_jax.planning.children import Answer, ask
from tba_jax.planning.verdict import Occupancy, Program, advice, occupancies

_FIXED = ("name", "group", "variants", "with_cache", "flops", "num_bytes")
_ROWS, _SLOTS, _REMAT = "batch.micro_batch_rows", "search.num_slots", "model.remat"
_DECIDES = {  # programs whose shapes a setting decides
    _ROWS: ("train_step",),
    _REMAT: ("train_step",),
    _SLOTS: ("prefill", "extend", "admit", "decode_chunk"),
}


class Planner:
    """Descriptions of configs and compilation of their programs for one slice.

    Child processes describe and compile.

    Args:
        request: entries that all requests to child processes share.
        timeout_s: timeout of each child process.
        ask: sends a request to a child process and returns its answer.
    """

    def __init__(
        self, request: Mapping[str, Any], timeout_s: float, ask: Callable[..., Answer] = ask
    ) -> None:
        self._request = dict(request)
        self._timeout_s = timeout_s
        self._ask = ask

    def describe(self, config: Mapping[str, Any], *, chooses: bool) -> dict[str, Any]:
        """Return placement, resident memory and programs of a config.

        Args:
            chooses: whether to choose the placement for the slice.

        Raises:
            ValueError: the config does not fit the slice, or the child failed.
        """
        question = {"config": config, "program": "", "chooses": chooses}
        answer = self._ask(self._request | question, timeout_s=self._timeout_s)
        if answer.value is None:
            raise ValueError(answer.failure)
        return answer.value

    def compile(self, facts: Mapping[str, Any], name: str) -> Program:
        """Return the compiled program `name` of a described run.

        Raises:
            ValueError: the child refused the request.
        """
        planned = next(p for p in facts["programs"] if p["name"] == name)
        question = {"config": facts["config"], "program": name, "chooses": False}
        answer = self._ask(self._request | question, timeout_s=self._timeout_s)
        fixed = {key: planned[key] for key in _FIXED}
        if answer.value is None:
            if answer.is_user_error:
                raise ValueError(answer.failure)
            return Program(
                **fixed,
                failure=answer.failure,
                is_too_large=answer.is_too_large,
                needed_bytes=answer.needed_bytes,
            )
        chip = facts["chip"]
        times = {
            "compute": planned["flops"] / chip["flops_per_s"],
            "memory": planned["num_bytes"] / chip["bytes_per_s"],
        }
        bound = max(times, key=lambda name: times[name])
        return Program(**fixed, **answer.value, roofline_s=times[bound], bound=bound)


class Plan(NamedTuple):
    """Plan of a run.

    Attributes:
        facts: description of the run, as of `compile_one.describe`.
        programs: compiled programs.
        found: memory of each device group.
    """

    facts: Mapping[str, Any]
    programs: list[Program]
    found: list[Occupancy]

    @property
    def fits(self) -> bool:
        """Return whether every program compiles and the memory of each group suffices."""
        return not any(p.failure for p in self.programs) and not any(
            o.over_bytes for o in self.found
        )


def plan(
    planner: Planner,
    facts: dict[str, Any],
    names: Sequence[str],
    say: Callable[[str], None],
) -> Plan:
    """Compile programs; make sizes that the plan chose smaller until all programs fit.

    Args:
        facts: description of the run.
        names: programs to compile.
        say: receives a line for each program and each smaller size.
    """
    compiled: dict[str, Program] = {}
    while True:
        for name in names:
            if name not in compiled:
                say(f"compiling {name} of {facts['layout']}")
                compiled[name] = planner.compile(facts, name)
        programs = [compiled[name] for name in names]
        done = Plan(facts, programs, occupancies(facts, programs))
        fields = _smaller(done)
        if not fields:
            return done
        flags = " ".join(f"--config.{name}={value}" for name, value in fields.items())
        say(f"does not fit; trying {flags}")
        config = {section: dict(x) if isinstance(x, dict) else x
                  for section, x in facts["config"].items()}  # fmt: skip
        for name, value in fields.items():
            section, field = name.split(".")
            config[section][field] = value
        chosen = facts["changed_fields"] | fields
        facts = planner.describe(config, chooses=False) | {"changed_fields": chosen}
        for name in fields:
            for program in _DECIDES[name]:
                compiled.pop(program, None)


def _smaller(done: Plan) -> dict[str, Any]:
    """Return the settings to lower, so that a group without enough memory needs less of it."""
    short = [p.group for p in done.programs if p.is_too_large]
    for o in done.found:
        if o.over_bytes:
            others = {"trainer": "searcher", "searcher": "trainer"}
            short += [o.largest, others[o.largest]] if o.group == "both" else [o.group]
    return next((fields for group in short if (fields := done.facts["lower"].get(group))), {})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", default="", help="preset math[:PRESET], or file FILE.py[:PRESET]"
    )
    parser.add_argument(
        "--topology",
        default="",
        help="TPU slice or GPU hosts, such as v5e:2x4, v5p:2x2x4, h100:8, h100:2x8; default: the "
        "attached devices",
    )
    parser.add_argument(
        "--keep_placement",
        action="store_true",
        help="keep the config's placement instead of choosing one for the slice",
    )
    parser.add_argument(
        "--programs",
        default="",
        help="names of the programs to compile, separated by commas; default: all",
    )
    parser.add_argument(
        "--write_cache", default="", help="write compiled programs into this folder"
    )
    parser.add_argument(
        "--timeout_s",
        type=float,
        default=1800.0,
        help="timeout of each compilation in seconds (default 1800)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    args, overrides = _parser().parse_known_args(argv)
    if not args.config:
        print("plan: no --config given; try --config=math", file=sys.stderr)
        return 2
    try:
        return _plan(args, overrides)
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2


def _say(line: str) -> None:
    """Print progress to standard error; standard output has the plan."""
    print(line, file=sys.stderr, flush=True)


def _config_of(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the validated config of a command; missing length limits are measured."""
    config = override(None, [f"--config={args.config}", *overrides])
    validate(config)
    if MODES[config.placement].has_remote_searchers:
        raise ConfigError(
            f"config.placement = {config.placement!r}: a plan is for the devices of one slice. Set "
            "--config.placement=auto"
        )
    if not config.task.max_prompt_tokens:
        from tba_jax.planning.lengths import with_lengths

        config, line = with_lengths(config)
        _say(f"lengths {line}")
    return config


def _plan(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Plan and print; return the exit code.

    Raises:
        ValueError: the flags or the config are invalid.
    """
    config = _config_of(args, overrides)
    from tba_jax.planning.shapes import config_of, judge_paths
    from tba_jax.run.model_parts import model_path

    chooses = bool(args.topology) and not args.keep_placement
    # A plan for a slice replaces the rows of a preset; those of the command line stay.
    keeps_rows = config.batch.micro_batch_rows and (
        not chooses or any(text.startswith(f"--config.{_ROWS}") for text in overrides)
    )
    keeps = {
        _ROWS: keeps_rows,
        _SLOTS: config.search.num_slots,
        _REMAT: config.model.remat != "auto",
    }
    request = {
        "topology": args.topology,
        "model": config_of(model_path(config)),
        "judges": {role: config_of(path) for role, path in judge_paths(config).items()},
        "cache": args.write_cache,
        "fixed": [name for name, is_kept in keeps.items() if is_kept],
    }
    planner = Planner(request, args.timeout_s, ask)
    facts = planner.describe(plain(config), chooses=chooses)
    known = [p["name"] for p in facts["programs"]]
    names = [n for n in args.programs.split(",") if n] or known
    if strays := [n for n in names if n not in known]:
        raise ConfigError(f"--programs={strays[0]}: no such program; programs: {', '.join(known)}")
    done = plan(planner, facts, names, _say)
    facts = done.facts
    print(table.heading(facts, model_path(config), args.topology or "attached"))
    print(f"\n{table.program_table(done.programs)}\n\n{table.occupancy_table(done.found)}")
    print(f"\n{'fits' if done.fits else 'does NOT fit'}")
    lines = advice(facts, done.programs, done.found)
    for line in lines:
        print(f"- {line}")
    if args.json:
        out = table.as_json(facts, done.programs, done.found, lines, done.fits)
        print(json.dumps(out))
    return 0 if done.fits else 1


if __name__ == "__main__":
    sys.exit(main())
