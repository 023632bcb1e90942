# SPDX-License-Identifier: Apache-2.0
"""Command: what a run needs on a TPU slice that is not rented yet, or on the attached devices.

python -m tba_jax.plan --config=math[:PRESET] [--topology=v5p:2x2x4] [--search] [--json]
    [--keep_placement] [--compare] [--programs=NAME,...] [--write_cache=DIR] [--timeout_s=N]
    [--config.FIELD=VALUE ...]

Compiles every device program of the run at its largest shapes, each in a process of its own, and
prints memory by kind, work, roofline time, what is resident at a time, the balance of searchers to
trainer, and what to change. No weights are needed, of the model only its config.json. Exit code 0:
it fits; 1: it does not, or does not compile; 2: the command makes no sense.

Hosts of a slice have four chips; v5e:2x4@8 is one host of eight. For a slice the placement is
chosen and printed as config flags, unless --keep_placement asks for the config's own; with
--config.placement=fleet the slice is the trainer's, and searchers are elsewhere, and with
whole_hosts half of its hosts are. --compare
plans a slice of several hosts in both ways, every host training and searching, and some hosts
training while others search; it prints the faster that fits, and both rates. --search
finds the largest micro-batch and number of slots that fit. --write_cache fills a persistent
compilation cache, which a run with JAX_COMPILATION_CACHE_DIR=DIR reads.
"""

import argparse
import copy
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.config.schema import ConfigError, plain
from tba_jax.devices.placement import MODES
from tba_jax.planning import table
from tba_jax.planning.children import Answer, ask
from tba_jax.planning.verdict import Balance, Occupancy, Program, advice, balance, occupancies

Ask = Callable[..., Answer]


_FIXED = ("name", "group", "variants", "with_cache", "calls_per_round")  # known before compiling

_ROWS = "batch.micro_batch_rows"


class Planner:
    """Questions about one config on one slice; each is answered by a child process.

    Args:
        request: the part of every question that stays the same.
        timeout_s: of each child.
        ask: who answers.
    """

    def __init__(self, request: Mapping[str, Any], timeout_s: float, ask: Ask = ask) -> None:
        self._request = dict(request)
        self._timeout_s = timeout_s
        self._ask = ask
        self._compiled: dict[str, Program] = {}

    def describe(
        self, config: Mapping[str, Any], *, chooses: bool, trainer_devices: float = 0.0
    ) -> dict[str, Any]:
        """Placement, residents and programs of a config.

        Args:
            config: nested fields.
            chooses: the placement is chosen for the slice.
            trainer_devices: then as in `layouts.choose`.

        Raises:
            ValueError: the config does not suit the slice, or the child failed; says why.
        """
        question = self._request | {
            "config": config,
            "program": "",
            "chooses": chooses,
            "trainer_devices": trainer_devices,
        }
        answer = self._ask(question, timeout_s=self._timeout_s)
        if answer.value is None:
            raise ValueError(answer.failure)
        return answer.value

    def compile(self, facts: Mapping[str, Any], name: str) -> Program:
        """One program of a description, compiled once.

        Raises:
            ValueError: the child refused the question.
        """
        key = json.dumps([facts["config"], name], sort_keys=True, default=str)
        if key not in self._compiled:
            self._compiled[key] = self._compile(facts, name)
        return self._compiled[key]

    def _compile(self, facts: Mapping[str, Any], name: str) -> Program:
        planned = next(p for p in facts["programs"] if p["name"] == name)
        question = self._request | {"config": facts["config"], "program": name, "chooses": False}
        answer = self._ask(question, timeout_s=self._timeout_s)
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
        chip, work = facts["chip"], answer.value
        times = {
            "compute": work["flops"] / chip["flops_per_s"],
            "memory": work["num_bytes"] / chip["bytes_per_s"],
        }
        if chip["link_bytes_per_s"]:
            times["links"] = work["collective_bytes"] / chip["link_bytes_per_s"]
        if chip["network_bytes_per_s"]:
            times["network"] = work["network_bytes"] / chip["network_bytes_per_s"]
        bound = max(times, key=lambda name: times[name])
        return Program(**fixed, **work, roofline_s=times[bound], bound=bound)


def largest(candidates: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ascending candidates that fits, by bisection; None: none fits."""
    low, high = -1, len(candidates)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            low = middle
        else:
            high = middle
    return candidates[low] if low >= 0 else None


def keep_rows(planner: Planner, facts: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return a chosen placement with the requested micro-batch, if the mesh divides it.

    Args:
        planner: describes the other config.
        facts: of the placement, with rows that were chosen for it.
        rows: that the command asks for.
    """
    chosen = facts["changed_fields"]
    if chosen.get(_ROWS, rows) == rows:
        return facts
    if rows not in facts["sizes"]["micro_batch_options"]:
        note = f"batch.micro_batch_rows={rows} is not divided by the trainer's mesh; it is changed"
        return {**facts, "notes": [*facts["notes"], note]}
    changed = with_field(facts["config"], _ROWS, rows)
    kept = {name: value for name, value in chosen.items() if name != _ROWS}
    described = planner.describe(changed, chooses=False)
    return {**described, "changed_fields": kept, "notes": facts["notes"]}


def search(
    planner: Planner, config: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, int]:
    """Config fields with the largest micro-batch and number of slots that fit.

    Args:
        planner: asks the compiler.
        config: nested fields, placement included.
        say: told of each trial.

    Raises:
        ValueError: not even the smallest sizes fit; says of what.
    """
    found = {}
    facts = planner.describe(config, chooses=False)
    sizes = facts["sizes"]
    slots = [2**i for i in range(sizes["round_rows"].bit_length()) if 2**i < sizes["round_rows"]]
    for name, program, candidates in (
        (_ROWS, "train_step", sizes["micro_batch_options"]),
        ("search.num_slots", "decode_chunk", [*slots, sizes["round_rows"]]),
    ):
        best = largest(candidates, _fits(planner, config, name, program, say))
        if best is None:
            raise ValueError(
                f"{program} does not fit even with --config.{name}={candidates[0]}; "
                "give its devices a larger mesh, or shorten the responses"
            )
        found[name] = best
    return found


def _fits(
    planner: Planner,
    config: Mapping[str, Any],
    name: str,
    program: str,
    say: Callable[[str], None],
) -> Callable[[int], bool]:
    """Return a function that compiles a program with a value of a setting: whether it fits."""

    def fits(value: int) -> bool:
        asked = planner.describe(with_field(config, name, value), chooses=False)
        compiled = planner.compile(asked, program)
        is_good = not compiled.failure and not any(
            o.over_bytes for o in occupancies(asked, [compiled])
        )
        say(f"{name}={value}: {'fits' if is_good else 'does not fit'}")
        return is_good

    return fits


def with_field(config: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a copy of nested fields with another value of SECTION.FIELD."""
    changed = copy.deepcopy(dict(config))
    section, field = name.split(".")
    changed[section][field] = value
    return changed


def confirm_rows(
    planner: Planner, facts: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Return a chosen placement with a micro-batch of which the compiled train step fits.

    The rows were chosen by an estimate from shapes. Where the compiler needs more memory, the
    largest smaller micro-batch that fits takes their place; where none fits, the estimate stays.

    Args:
        planner: compiles.
        facts: of the placement, with rows that were chosen for it.
        say: receives a line for each trial.
    """
    config, rows = facts["config"], facts["sizes"]["micro_batch_rows"]
    fits = _fits(planner, config, _ROWS, "train_step", say)
    smaller = [n for n in facts["sizes"]["micro_batch_options"] if n < rows]
    if fits(rows) or (best := largest(smaller, fits)) is None:
        return facts
    described = planner.describe(with_field(config, _ROWS, best), chooses=False)
    note = (
        f"batch.micro_batch_rows={best}: with {rows}, which the shapes allow, the compiled train "
        "step does not fit"
    )
    fields = facts["changed_fields"] | {_ROWS: best}
    return {**described, "changed_fields": fields, "notes": [*facts["notes"], note]}


def plan(
    planner: Planner,
    facts: Mapping[str, Any],
    names: Sequence[str],
    say: Callable[[str], None],
) -> tuple[list[Program], list[Occupancy], Balance | None, list[str], bool]:
    """(programs, memory, balance, advice, whether it fits) of a described run."""
    programs = []
    for name in names:
        say(f"compiling {name}")
        programs.append(planner.compile(facts, name))
    found = occupancies(facts, programs)
    weighed = balance(facts, programs)
    fits = not any(p.failure for p in programs) and not any(o.over_bytes for o in found)
    return programs, found, weighed, advice(facts, programs, found, weighed), fits


class Way(NamedTuple):
    """A way to lay a run on a slice of several hosts, as planned.

    Attributes:
        facts: its description.
        programs: compiled.
        weighed: its balance, None where something did not compile.
        fits: whether it does.
    """

    facts: Mapping[str, Any]
    programs: list[Program]
    weighed: Balance | None
    fits: bool

    @property
    def rate(self) -> float:
        """Steps an hour, 0 where it does not fit."""
        return self.weighed.steps_per_hour if self.fits and self.weighed is not None else 0.0

    @property
    def words(self) -> str:
        """A clause about it."""
        trainer = self.facts["groups"]["trainer"]["devices"]
        what = f"{self.facts['layout']} with {trainer} trainer devices"
        if not self.fits:
            return f"{what} does not fit"
        return f"{what} makes {self.rate:,.0f} steps an hour"


def compare(
    planner: Planner,
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
    say: Callable[[str], None],
) -> tuple[Mapping[str, Any], str]:
    """Return (the faster placement, a sentence on both) for a slice of several hosts.

    Args:
        planner: asks the compiler.
        config: nested fields, as the user gave them.
        facts: of the way in which every host trains and searches.
        say: told of what is compiled.
    """
    ways = [_way(planner, facts, say)]
    weighed = ways[0].weighed
    wanted = weighed.trainer_devices if weighed is not None else facts["num_devices"] / 2
    apart = planner.describe(config, chooses=True, trainer_devices=max(1.0, wanted))
    ways.append(_way(planner, apart, say))
    best = max(ways, key=lambda way: way.rate)
    words = "; ".join(way.words for way in ways)
    if not best.rate:
        return facts, f"{words}"
    return best.facts, f"{words}: {best.facts['layout']} is the faster by these rooflines"


def _way(planner: Planner, facts: Mapping[str, Any], say: Callable[[str], None]) -> Way:
    programs = []
    for each in facts["programs"]:
        say(f"compiling {each['name']} of {facts['layout']}")
        programs.append(planner.compile(facts, each["name"]))
    found = occupancies(facts, programs)
    fits = not any(p.failure for p in programs) and not any(o.over_bytes for o in found)
    return Way(facts, programs, balance(facts, programs), fits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", required=True, help="a preset, math[:PRESET], or a file, FILE.py[:PRESET]"
    )
    parser.add_argument(
        "--topology",
        default="",
        help="TPU slice or GPU hosts, as v5e:2x4, v5p:2x2x4, h100:8, h100:2x8; none: the attached",
    )
    parser.add_argument("--search", action="store_true", help="find the largest sizes that fit")
    parser.add_argument(
        "--keep_placement", action="store_true", help="the config's own, not one for the slice"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="several hosts: also whole hosts, and which is faster",
    )
    parser.add_argument("--programs", default="", help="only these, separated by commas")
    parser.add_argument("--write_cache", default="", help="folder for compiled programs")
    parser.add_argument(
        "--timeout_s", type=float, default=1800.0, help="of each compilation (1800)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    args, overrides = _parser().parse_known_args(argv)

    def say(line: str) -> None:
        # Standard output is for the plan.
        print(line, file=sys.stderr, flush=True)

    try:
        config = override(None, [f"--config={args.config}", *overrides])
        validate(config)
        from tba_jax.planning.judges import judge_paths
        from tba_jax.planning.model_shapes import published_config
        from tba_jax.run.model_parts import model_path

        model, source = published_config(model_path(config))
        paths = judge_paths(config)
        judges = {role: published_config(path) for role, path in paths.items()}
        planner = Planner(
            {
                "topology": args.topology,
                "model": model,
                "judges": {role: shape for role, (shape, _) in judges.items()},
                "cache": args.write_cache,
            },
            args.timeout_s,
            functools.partial(ask, say=say),
        )
        chooses = bool(args.topology) and not args.keep_placement
        if args.compare and MODES[config.placement].searches_elsewhere:
            raise ConfigError(
                "--compare weighs two ways to divide a slice, and with placement=fleet all of it "
                "trains; leave it out, or give another --config.placement"
            )
        given = plain(config)
        if args.compare and chooses:
            given["placement"] = "auto"  # neither way is asked for
        facts = planner.describe(given, chooses=chooses)
        if args.compare and facts["num_hosts"] > 1 and chooses:
            facts, words = compare(planner, given, facts, say)
            facts = {**facts, "notes": [*facts["notes"], words]}
        is_given = any(o.startswith(f"--config.{_ROWS}") for o in overrides)
        if chooses and is_given:
            facts = keep_rows(planner, facts, config.batch.micro_batch_rows)
        wanted = [n for n in args.programs.split(",") if n]
        if chooses and not is_given and not args.search and (not wanted or "train_step" in wanted):
            facts = confirm_rows(planner, facts, say)
        chosen, notes = facts["changed_fields"], facts["notes"]
        if args.search:
            found_fields = search(planner, facts["config"], say)
            changed = facts["config"]
            for name, value in found_fields.items():
                changed = with_field(changed, name, value)
            chosen = chosen | found_fields
            facts = planner.describe(changed, chooses=False)
        facts = {**facts, "changed_fields": chosen}
        known = [p["name"] for p in facts["programs"]]
        names = wanted or known
        if strays := [n for n in names if n not in known]:
            raise ConfigError(f"--programs: no program {strays[0]!r}; there are {', '.join(known)}")
        print(table.heading(facts, model_path(config), source, args.topology or "attached"))
        for role, path in paths.items():
            print(f"{role:<10} {path}; shape from {judges[role][1]}")
        programs, found, weighed, lines, fits = plan(planner, facts, names, say)
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    print(f"\n{table.program_table(programs)}\n\n{table.occupancy_table(found)}")
    if weighed:
        print(f"\n{table.balance_text(facts, weighed)}")
    print(f"\n{'fits' if fits else 'does NOT fit'}")
    lines = [*notes, *lines]
    for line in lines:
        print(f"- {line}")
    if args.json:
        print(json.dumps(table.as_json(facts, programs, found, weighed, lines, fits)))
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
