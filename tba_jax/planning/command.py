# SPDX-License-Identifier: Apache-2.0
"""Command: memory and speed of a run on devices that need not be attached.

python -m tba_jax.plan --config=math[:PRESET] [--topology=v5p:2x2x4] [--search] [--json]
    [--keep_placement] [--compare] [--programs=NAME,...] [--write_cache=DIR] [--timeout_s=N]
    [--config.FIELD=VALUE ...]

The command compiles every device program of the run at its largest shapes, each in its own process.
It prints memory by kind, work, roofline times, peak memory, the balance of searchers and trainer,
and advice. It needs only the model's config.json, no weights. The exit code is 0 if the run fits, 1
if the run does not fit or compile, and 2 if the command or the config is invalid.

Hosts of a slice have four chips; v5e:2x4@8 is one host of eight. For a slice, the plan chooses the
placement and prints it as config flags; --keep_placement keeps the placement of the config. With
--config.placement=fleet the whole slice trains and searchers run on other devices. With
--config.placement=whole_hosts half of the hosts train.

--compare plans a slice of several hosts in two ways: every host trains and searches, or some hosts
train while the others search. It prints both rates and the faster placement that fits. --search
finds the fastest micro-batch and the largest number of slots that fit. --write_cache fills a
persistent compilation cache for runs with JAX_COMPILATION_CACHE_DIR=DIR. --page=FILE writes a table
of plans: of some presets on some slices, or of the given --config and --topology.
"""

import argparse
import copy
import functools
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.config.command_line import override
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, ConfigError, plain
from tba_jax.devices.placement import MODES
from tba_jax.planning import page, table
from tba_jax.planning.children import Answer, ask
from tba_jax.planning.verdict import Balance, Occupancy, Program, advice, balance, occupancies

Ask = Callable[..., Answer]


_FIXED = ("name", "group", "variants", "with_cache", "calls_per_round")  # known before compiling

_ROWS, _SLOTS, _REMAT = "batch.micro_batch_rows", "search.num_slots", "model.remat"
_PROGRAMS = {_ROWS: "train_step", _SLOTS: "decode_chunk"}  # whose memory the size decides
_OF_SLOTS = ("prefill", "extend", "admit", "decode_chunk")  # all programs whose shapes it decides


class Planner:
    """Descriptions of configs and compilation of their programs for one slice.

    Child processes describe and compile.

    Args:
        request: entries that all requests to child processes share.
        timeout_s: timeout of each child process.
        ask: sends a request to a child process and returns its answer.
    """

    def __init__(self, request: Mapping[str, Any], timeout_s: float, ask: Ask = ask) -> None:
        self._request = dict(request)
        self._timeout_s = timeout_s
        self._ask = ask
        self._compiled: dict[str, Program] = {}

    def describe(
        self, config: Mapping[str, Any], *, chooses: bool, trainer_devices: float = 0.0
    ) -> dict[str, Any]:
        """Return placement, resident memory and programs of a config.

        Args:
            chooses: whether to choose the placement for the slice.
            trainer_devices: as in `layouts.choose`, if the placement is chosen.

        Raises:
            ValueError: the config does not fit the slice, or the child failed.
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
        """Return the compiled program `name`; each program is compiled only once.

        Args:
            facts: return value of `describe`.

        Raises:
            ValueError: the child refused the request.
        """
        config, sizes = facts["config"], facts["sizes"]
        # A size that the config leaves open gives the same programs as its value.
        for field in (_ROWS, _SLOTS):
            config = with_field(config, field, sizes[field.split(".")[1]])
        key = json.dumps([config, name], sort_keys=True, default=str)
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
    """Return a description with the requested micro-batch, if the mesh divides it.

    Args:
        rows: micro-batch rows that the command line requests.
    """
    chosen = facts["changed_fields"]
    if chosen.get(_ROWS, rows) == rows:
        return facts
    if rows not in facts["sizes"]["micro_batch_options"]:
        note = f"batch.micro_batch_rows={rows} is changed: the trainer's mesh does not divide it"
        return {**facts, "notes": [*facts["notes"], note]}
    changed = with_field(facts["config"], _ROWS, rows)
    kept = {name: value for name, value in chosen.items() if name != _ROWS}
    described = planner.describe(changed, chooses=False)
    return {**described, "changed_fields": kept, "notes": facts["notes"]}


def search(
    planner: Planner, config: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, int]:
    """Return the nested fields with the largest micro-batch and number of slots that fit.

    Args:
        say: receives a line for each trial.

    Raises:
        ValueError: the smallest size of a setting does not fit.
    """
    found = {}
    facts = planner.describe(config, chooses=False)
    sizes = facts["sizes"]
    for name, candidates in (
        (_ROWS, sizes["useful_rows"]),
        (_SLOTS, _slot_options(facts)),
    ):
        program = _PROGRAMS[name]
        best = largest(candidates, _fits(planner, config, name, program, say))
        if best is None:
            raise ValueError(
                f"{program} does not fit even with --config.{name}={candidates[0]}; give its "
                "devices a larger mesh, or set a smaller --config.search.max_new_tokens"
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
    """Return a function (value of a setting) -> whether the program compiled with it fits."""

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
    """Return a copy of nested fields with a new value of SECTION.FIELD."""
    changed = copy.deepcopy(dict(config))
    section, field = name.split(".")
    changed[section][field] = value
    return changed


def confirm(
    planner: Planner,
    facts: dict[str, Any],
    say: Callable[[str], None],
    *,
    names: Collection[str] = (_ROWS, _SLOTS),
) -> dict[str, Any]:
    """Return a description with sizes for which the compiled programs fit.

    The given sizes are estimated from shapes. If a compiled program needs more memory than the
    device has, the function looks for the largest smaller size that fits. For rows with
    `model.remat=dots` it looks down to `fitting.least_rows`, and then at all sizes with
    `model.remat=layers`. If no size fits, it is the smallest, whose missing memory the verdict
    reports.

    Args:
        names: settings whose sizes were chosen.
    """
    if _ROWS in names:
        facts = _lowered(planner, facts, say, _ROWS, facts["sizes"]["useful_rows"])
    if _SLOTS in names:
        facts = _lowered(planner, facts, say, _SLOTS, _slot_options(facts))
    return facts


def _lowered(
    planner: Planner,
    facts: dict[str, Any],
    say: Callable[[str], None],
    name: str,
    options: Sequence[int],
) -> dict[str, Any]:
    """Return a description with the largest value of one size that fits, up to the current one."""
    config, now = facts["config"], facts["sizes"][name.split(".")[1]]
    fits = _fits(planner, config, name, _PROGRAMS[name], say)
    smaller = [n for n in options if n < now]
    is_lighter = name == _ROWS and facts["changed_fields"].get(_REMAT) == "dots"
    if fits(now) or not (smaller or is_lighter):
        return facts
    least = facts["sizes"]["least_rows"] if is_lighter else 0
    best = largest([n for n in smaller if n >= least], fits)
    if best is None and is_lighter:
        layers = {_REMAT: "layers", _ROWS: options[-1]}
        for field, value in layers.items():
            config = with_field(config, field, value)
        described = planner.describe(config, chooses=False)
        described |= {"changed_fields": facts["changed_fields"] | layers, "notes": facts["notes"]}
        return _lowered(planner, described, say, name, options)
    note = f"{name}={best or smaller[0]}: the compiled {_PROGRAMS[name]} does not fit with {now}"
    if best is None:
        best, note = smaller[0], f"{note}, nor with any smaller value"
    described = planner.describe(with_field(config, name, best), chooses=False)
    fields = facts["changed_fields"] | {name: best}
    return {**described, "changed_fields": fields, "notes": [*facts["notes"], note]}


def _slot_options(facts: Mapping[str, Any]) -> list[int]:
    rows = facts["sizes"]["round_rows"]
    return [*(2**i for i in range(rows.bit_length()) if 2**i < rows), rows]


class Plan(NamedTuple):
    """Plan of a run: its description, compiled programs and conclusions.

    Attributes:
        found: memory of each device group.
        weighed: balance of trainer and searchers; None if a program did not compile.
    """

    facts: Mapping[str, Any]
    programs: list[Program]
    found: list[Occupancy]
    weighed: Balance | None

    @property
    def fits(self) -> bool:
        """Return whether every program compiles and the memory of each group suffices."""
        return not any(p.failure for p in self.programs) and not any(
            o.over_bytes for o in self.found
        )

    @property
    def advice(self) -> list[str]:
        """Return advice, most urgent first."""
        return advice(self.facts, self.programs, self.found, self.weighed)

    @property
    def rate(self) -> float:
        """Return the steps per hour; 0 if the run does not fit."""
        return self.weighed.steps_per_hour if self.fits and self.weighed is not None else 0.0

    @property
    def summary(self) -> str:
        """Return a text with layout, trainer devices and rate."""
        trainer = self.facts["groups"]["trainer"]["devices"]
        what = f"{self.facts['layout']} with {trainer} trainer devices"
        if not self.fits:
            return f"{what} does not fit"
        return f"{what}: {self.rate:,.0f} steps per hour"


def plan(
    planner: Planner,
    facts: Mapping[str, Any],
    names: Sequence[str],
    say: Callable[[str], None],
) -> Plan:
    """Compile some programs of a described run; `say` receives a line for each program."""
    programs = []
    for name in names:
        say(f"compiling {name} of {facts['layout']}")
        programs.append(planner.compile(facts, name))
    return Plan(facts, programs, occupancies(facts, programs), balance(facts, programs))


def with_fewer_slots(planner: Planner, done: Plan, say: Callable[[str], None]) -> Plan:
    """Return a plan with fewer decode slots if its programs fit and those of `done` do not.

    `confirm` compares one program at a time with the memory. A device also holds the code of all
    programs, and the train state if trainer and searchers share devices. The function tries the two
    largest numbers of slots that free the missing memory.
    """
    facts, now = done.facts, done.facts["sizes"]["num_slots"]
    missing = [o.over_bytes for o in done.found if o.group != "trainer"]
    if any(p.failure for p in done.programs) or not any(missing):
        return done
    cache = sum(facts["groups"]["searcher"]["transients"].values())
    options = [n for n in _slot_options(facts) if (1 - n / now) * cache >= max(missing)]
    for n in reversed(options[-2:]):
        note = f"set --config.{_SLOTS}={n}: with {now} the programs fit one by one, not together"
        trial = planner.describe(with_field(facts["config"], _SLOTS, n), chooses=False)
        trial["changed_fields"] = facts["changed_fields"] | {_SLOTS: n}
        trial["notes"] = [*facts["notes"], note]
        kept = {p.name: p for p in done.programs if p.name not in _OF_SLOTS}
        say(f"{_SLOTS}={n}: tried, because all programs together do not fit with {now}")
        programs = [kept.get(p.name) or planner.compile(trial, p.name) for p in done.programs]
        found = Plan(trial, programs, occupancies(trial, programs), balance(trial, programs))
        if found.fits:
            return found
    return done


def compare(
    planner: Planner,
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
    say: Callable[[str], None],
) -> tuple[Mapping[str, Any], str]:
    """Compare two placements on a slice of several hosts; return (faster one, sentence on both).

    Args:
        facts: description of the placement in which every host trains and searches.
    """

    def whole(facts: Mapping[str, Any]) -> Plan:
        return plan(planner, facts, [p["name"] for p in facts["programs"]], say)

    plans = [whole(facts)]
    weighed = plans[0].weighed
    wanted = weighed.trainer_devices if weighed is not None else facts["num_devices"] / 2
    plans.append(whole(planner.describe(config, chooses=True, trainer_devices=max(1.0, wanted))))
    best = max(plans, key=lambda plan: plan.rate)
    words = "; ".join(plan.summary for plan in plans)
    if not best.rate:
        return facts, f"{words}"
    return best.facts, f"{words}: {best.facts['layout']} is faster by these rooflines"


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
        "--search",
        action="store_true",
        help="find the fastest batch.micro_batch_rows and the largest search.num_slots that fit",
    )
    parser.add_argument(
        "--keep_placement",
        action="store_true",
        help="keep the config's placement instead of choosing one for the slice",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="for several hosts: also plan a placement in which some hosts only train, and print "
        "the faster placement",
    )
    parser.add_argument(
        "--programs",
        default="",
        help="names of the programs to compile, separated by commas; default: all",
    )
    parser.add_argument("--page", default="", help="write a table of plans to this file")
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
    if args.page:
        configs = [args.config] if args.config else page.CONFIGS
        topologies = [args.topology] if args.topology else page.TOPOLOGIES
        return page.write(Path(args.page), configs, topologies, main)
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
    if not config.task.max_prompt_tokens:
        from tba_jax.planning.lengths import with_lengths

        config, line = with_lengths(config)
        _say(f"lengths {line}")
    return config


def _plan(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Plan and print; return the exit code.

    Raises:
        ValueError: the flags contradict each other, or the config is invalid.
    """
    config = _config_of(args, overrides)
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
        functools.partial(ask, say=_say),
    )
    chooses = bool(args.topology) and not args.keep_placement
    if args.compare and MODES[config.placement].has_remote_searchers:
        raise ConfigError(
            "--compare needs a slice that trains and searches, but with placement=fleet the "
            "whole slice trains; remove --compare, or set another --config.placement"
        )
    given = plain(config)
    if args.compare and chooses:
        given["placement"] = "auto"  # The user asked for neither placement.
    facts = planner.describe(given, chooses=chooses)
    if args.compare and facts["num_hosts"] > 1 and chooses:
        facts, words = compare(planner, given, facts, _say)
        facts = {**facts, "notes": [*facts["notes"], words]}
    is_given = any(o.startswith(f"--config.{_ROWS}") for o in overrides)
    if chooses and is_given:
        facts = keep_rows(planner, facts, config.batch.micro_batch_rows)
    wanted = [n for n in args.programs.split(",") if n]
    if chooses and not args.search:
        left = {_ROWS: not is_given, _SLOTS: not config.search.num_slots}
        names = [n for n, x in left.items() if x and (not wanted or _PROGRAMS[n] in wanted)]
        facts = confirm(planner, facts, _say, names=names)
    chosen, notes = facts["changed_fields"], facts["notes"]
    if args.search:
        found_fields = search(planner, facts["config"], _say)
        changed = facts["config"]
        for name, value in found_fields.items():
            changed = with_field(changed, name, value)
        chosen = chosen | found_fields
        facts = planner.describe(changed, chooses=False)
    facts = {**facts, "changed_fields": chosen}
    known = [p["name"] for p in facts["programs"]]
    names = wanted or known
    if strays := [n for n in names if n not in known]:
        raise ConfigError(f"--programs={strays[0]}: no such program; programs: {', '.join(known)}")
    print(table.heading(facts, model_path(config), source, args.topology or "attached"))
    for role, path in paths.items():
        print(f"{role:<10} {path}; shape from {judges[role][1]}")
    done = plan(planner, facts, names, _say)
    if chooses and not (args.search or wanted or config.search.num_slots):
        done = with_fewer_slots(planner, done, _say)
        facts, notes = done.facts, done.facts["notes"]
    print(f"\n{table.program_table(done.programs)}\n\n{table.occupancy_table(done.found)}")
    if done.weighed:
        print(f"\n{table.balance_text(facts, done.weighed)}")
    print(f"\n{'fits' if done.fits else 'does NOT fit'}")
    lines = [*notes, *done.advice]
    for line in lines:
        print(f"- {line}")
    if args.json:
        out = table.as_json(facts, done.programs, done.found, done.weighed, lines, done.fits)
        print(json.dumps(out))
    return 0 if done.fits else 1


if __name__ == "__main__":
    sys.exit(main())
