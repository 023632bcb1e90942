# SPDX-License-Identifier: Apache-2.0
"""Printed table and JSON object of a plan.

Invariant: both forms contain the same figures, and a program that did not compile has a line too.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.planning.verdict import GIB, ROLES, Balance, Occupancy, Program

# column -> kinds of memory that it adds up
_COLUMNS = {
    "params": (
        "parameters",
        "frozen parameters",
        "adapters",
        "reference parameters",
        *ROLES,
    ),
    "optimiser": ("optimiser state",),
    "KV cache": ("KV cache", "prefilled prompts"),
    "in/out": ("inputs", "outputs", "next weights"),
    "temps": ("temporaries",),
    "code": ("code",),
}


def heading(facts: Mapping[str, Any], model: str, source: str, where: str) -> str:
    """Return the lines about model, slice, chip and placement."""
    chip, groups = facts["chip"], facts["groups"]
    rates = (
        f"{chip['hbm_bytes'] / GIB:.2f} GiB, {chip['flops_per_s'] / 1e12:,.3g} TFLOP/s, "
        f"{chip['bytes_per_s'] / 1e9:,.0f} GB/s"
    )
    for what in ("link", "network"):
        if rate := chip[f"{what}_bytes_per_s"]:
            rates += f", {what} {rate / 1e9:,.0f} GB/s"
    rates += " (measured on this machine)" if chip["is_measured"] else " (published peaks)"
    hosts = facts["num_hosts"]
    per_host = facts["num_devices"] // hosts
    trainer, searcher = groups["trainer"], groups["searcher"]
    turns = ", on the trainer's devices" if facts["shares_devices"] else ""
    if facts["has_remote_searchers"]:
        turns = ", on other devices like these"
    lines = [
        f"model      {model}: {facts['num_params'] / 1e6:,.4g} M parameters; shape from {source}",
        f"slice      {where}: {facts['num_devices']} x {chip['name']}, {hosts} "
        f"host{'s' if hosts > 1 else ''} of {per_host}",
        f"chip       {rates}",
        f"placement  {facts['layout']}: trainer on {trainer['devices']} ({trainer['mesh']}), "
        f"{searcher['count']} searcher groups of {searcher['devices']}{turns}",
    ]
    if facts["changed_fields"]:
        flags = " ".join(f"--config.{k}={v}" for k, v in facts["changed_fields"].items())
        lines.append(f"chosen     {flags}")
    return "\n".join(lines)


def program_table(programs: Sequence[Program]) -> str:
    """Return one line per program: memory in GiB and cost of one execution, per device."""
    header = [
        "program", "group", *_COLUMNS, "GiB", "TFLOP", "GB", "GB sent", "roofline", "bound",
        "compile s",
    ]  # fmt: skip
    rows = [header]
    failures = []
    for p in programs:
        if p.failure:
            rows.append([p.name, p.group, *["-"] * (len(header) - 2)])
            failures.append(f"{p.name}: {p.failure}")
            continue
        sizes = [sum(p.hbm.get(k, 0.0) for k in kinds) for kinds in _COLUMNS.values()]
        rows.append(
            [
                p.name,
                p.group,
                *map(_gib, sizes),
                _gib(sum(sizes)),
                f"{p.flops / 1e12:.3g}",
                f"{p.num_bytes / 1e9:.3g}",
                f"{p.collective_bytes / 1e9:.3g}",
                seconds(p.roofline_s),
                p.bound,
                f"{p.compile_s:.0f}",
            ]
        )
    uncounted = sorted({name for p in programs for name in p.uncounted})
    if uncounted:
        failures.append(f"FLOPs of these custom calls are not counted: {', '.join(uncounted)}")
    return "\n".join([_align(rows), *failures])


def occupancy_table(found: Sequence[Occupancy]) -> str:
    """Return the peak memory of each device group, by kind."""
    lines = []
    for o in found:
        verdict = f"over by {_gib(o.over_bytes)} GiB" if o.over_bytes else "fits"
        lines.append(
            f"each {o.group} device{'' if o.group != 'both' else ' (both parts)'}: "
            f"{_gib(o.peak_bytes)} of {_gib(o.capacity_bytes)} GiB, {verdict}"
        )
        lines += [f"  {_gib(size):>8}  {what}" for what, size in o.parts]
    return "\n".join(lines)


def balance_text(facts: Mapping[str, Any], weighed: Balance) -> str:
    """Return a text with the predicted speeds; times are lower bounds."""
    sizes = facts["sizes"]
    balanced = f"at {weighed.trainer_devices:.1f} trainer devices of {facts['num_devices']}"
    if facts["has_remote_searchers"]:
        balanced = f"with {weighed.searchers:.1f} searchers"
    return "\n".join(
        [
            f"train step {seconds(weighed.step_s)}, search round {seconds(weighed.round_s)} "
            f"({sizes['round_rows']} responses, {sizes['response_tokens']:.0f} tokens each)",
            f"{weighed.made_per_trained:.2f} responses are generated for each trained response; "
            f"the config asks for {weighed.wanted:.2f} (recency_prob x S / K)",
            f"trainer and searchers are equally fast {balanced}; this placement makes at most "
            f"{weighed.steps_per_hour:,.0f} steps an hour",
        ]
    )


def as_json(
    facts: Mapping[str, Any],
    programs: Sequence[Program],
    found: Sequence[Occupancy],
    weighed: Balance | None,
    advice: Sequence[str],
    fits: bool,
) -> dict[str, Any]:
    """Return the JSON object that --json prints."""
    return {
        "fits": fits,
        "chip": facts["chip"]["name"],
        "num_devices": facts["num_devices"],
        "num_hosts": facts["num_hosts"],
        "placement": {
            "layout": facts["layout"],
            "trainer_devices": facts["groups"]["trainer"]["devices"],
            "trainer_mesh": facts["groups"]["trainer"]["mesh"],
            "searcher_groups": facts["groups"]["searcher"]["count"],
            "searcher_devices": facts["groups"]["searcher"]["devices"],
            "fields": facts["changed_fields"],
        },
        "programs": {
            p.name: {
                "group": p.group,
                "hbm_gib": {kind: size / GIB for kind, size in p.hbm.items()},
                "flops": p.flops,
                "bytes": p.num_bytes,
                "collective_bytes": p.collective_bytes,
                "network_bytes": p.network_bytes,
                "launches": p.launches,
                "compile_s": p.compile_s,
                "roofline_s": p.roofline_s,
                "bound": p.bound,
                "failure": p.failure,
            }
            for p in programs
        },
        "memory": {
            o.group: {
                "gib": {what: size / GIB for what, size in o.parts},
                "peak_gib": o.peak_bytes / GIB,
                "capacity_gib": o.capacity_bytes / GIB,
                "over_gib": o.over_bytes / GIB,
            }
            for o in found
        },
        "balance": dataclasses.asdict(weighed) if weighed else None,
        "advice": list(advice),
    }


def _gib(size: float) -> str:
    value = size / GIB
    return f"{value:.2f}" if value >= 1 or not value else f"{value:.2g}"


def seconds(s: float) -> str:
    """Return a time in seconds or milliseconds."""
    return f"{s:.3g} s" if s >= 1 else f"{s * 1e3:.3g} ms"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
