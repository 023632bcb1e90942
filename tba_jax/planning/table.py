# SPDX-License-Identifier: Apache-2.0
"""Printed table and JSON object of a plan. Both have the same figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.planning.verdict import GIB, Occupancy, Program

# column -> kinds of memory that it adds up
_COLUMNS = {
    "params": ("parameters", "frozen parameters", "adapters", "reference parameters"),
    "optimiser": ("optimiser state",),
    "KV cache": ("KV cache", "prefilled prompts"),
    "in/out": ("inputs", "outputs", "next weights"),
    "temps": ("temporaries",),
    "code": ("code",),
}


def heading(facts: Mapping[str, Any], model: str, where: str) -> str:
    """Return the lines about model, slice, chip and placement."""
    chip, groups = facts["chip"], facts["groups"]
    trainer, searcher, hosts = groups["trainer"], groups["searcher"], facts["num_hosts"]
    lines = [
        f"model      {model}: {facts['num_params'] / 1e6:,.4g} M parameters",
        f"slice      {where}: {facts['num_devices']} x {chip['name']}, {hosts} "
        f"host{'s' if hosts > 1 else ''} of {facts['num_devices'] // hosts}",
        f"chip       {chip['hbm_bytes'] / GIB:.2f} GiB, {chip['flops_per_s'] / 1e12:,.3g} TFLOP/s, "
        f"{chip['bytes_per_s'] / 1e9:,.0f} GB/s "
        f"({'measured on this machine' if chip['is_measured'] else 'published peaks'})",
        f"placement  {facts['layout']}: trainer on {trainer['devices']} ({trainer['mesh']}), "
        f"{searcher['count']} searcher groups of {searcher['devices']}"
        f"{', on the devices of the trainer' if facts['shares_devices'] else ''}",
    ]
    if facts["changed_fields"]:
        flags = " ".join(f"--config.{k}={v}" for k, v in facts["changed_fields"].items())
        lines.append(f"chosen     {flags}")
    return "\n".join(lines)


def program_table(programs: Sequence[Program]) -> str:
    """Return one line per program: memory in GiB by the compiler, time by arithmetic."""
    header = [
        "program", "group", *_COLUMNS, "GiB", "TFLOP", "GB", "roofline", "bound", "compile s"
    ]  # fmt: skip
    rows, failures = [header], []
    for p in programs:
        if p.failure:
            rows.append([p.name, p.group, *["-"] * (len(header) - 2)])
            failures.append(f"{p.name}: {p.failure}")
            continue
        sizes = [sum(p.hbm.get(k, 0.0) for k in kinds) for kinds in _COLUMNS.values()]
        work = [f"{p.flops / 1e12:.3g}", f"{p.num_bytes / 1e9:.3g}", seconds(p.roofline_s)]
        total = gib(sum(sizes))
        compiled = f"{p.compile_s:.0f}"
        rows.append([p.name, p.group, *map(gib, sizes), total, *work, p.bound, compiled])
    note = "GiB: memory of a device, by the compiler. Roofline: least time, by arithmetic."
    return "\n".join([_align(rows), note, *failures])


def occupancy_table(found: Sequence[Occupancy]) -> str:
    """Return the peak memory of each device group, by kind."""
    lines = []
    for o in found:
        verdict = f"over by {gib(o.over_bytes)} GiB" if o.over_bytes else "fits"
        lines.append(
            f"each {o.group} device{'' if o.group != 'both' else ' (both parts)'}: "
            f"{gib(o.peak_bytes)} of {gib(o.capacity_bytes)} GiB, {verdict}"
        )
        lines += [f"  {gib(size):>8}  {what}" for what, size in o.parts]
    return "\n".join(lines)


def as_json(
    facts: Mapping[str, Any],
    programs: Sequence[Program],
    found: Sequence[Occupancy],
    advice: Sequence[str],
    fits: bool,
) -> dict[str, Any]:
    """Return the JSON object that --json prints."""
    trainer, searcher = facts["groups"]["trainer"], facts["groups"]["searcher"]
    return {
        "fits": fits,
        "chip": facts["chip"]["name"],
        "num_devices": facts["num_devices"],
        "num_hosts": facts["num_hosts"],
        "placement": {
            "layout": facts["layout"],
            "trainer_devices": trainer["devices"],
            "trainer_mesh": trainer["mesh"],
            "searcher_groups": searcher["count"],
            "searcher_devices": searcher["devices"],
            "fields": facts["changed_fields"],
        },
        "programs": {
            p.name: {
                "group": p.group,
                "hbm_gib": {kind: size / GIB for kind, size in p.hbm.items()},
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
        "advice": list(advice),
    }


def gib(size: float) -> str:
    """Return a number of bytes in GiB."""
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
