# SPDX-License-Identifier: Apache-2.0
"""A described and compiled run: memory in use, verdict, advice, table and JSON object.

The peak memory of a device is its resident memory plus arguments, results and temporaries of the
largest program. If trainer and searchers share devices, the residents of both count, and during a
trainer program also the caches that an asynchronous searcher holds between two of its programs.

Memory is the compiler's figure. Times are arithmetic: FLOPs and bytes that no program can avoid,
over the peak rates of the chip. They are lower bounds. This module imports no JAX.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax.config.schema import Config
from tba_jax.planning.chips import Chip

GIB = 2**30
_CODE = "program code, all length buckets"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of one device group, with figures per device; the compiler adds its own.

    Attributes:
        name: train_step, publish, prefill, copy, decode_chunk, ...
        group: trainer or searcher.
        flops, num_bytes: unavoidable work of one execution.
        variants: number of programs of this kind that a run may load, one per shape.
        hbm: kind of memory -> bytes. Arguments that stay in memory between programs, such as
            parameters, have their own kinds; other arguments are "inputs".
        compile_s: time of the compiler alone.
        failure: reason why the program did not compile; "" on success.
        is_too_large: whether the compiler reported too little device memory.
    """

    name: str
    group: str
    flops: float = 0.0
    num_bytes: float = 0.0
    variants: int = 1
    hbm: Mapping[str, float] = dataclasses.field(default_factory=dict)
    compile_s: float = 0.0
    failure: str = ""
    is_too_large: bool = False

    @property
    def own_bytes(self) -> float:
        """Return the memory beyond resident arrays: inputs, new results, temporaries."""
        return sum(self.hbm.get(kind, 0.0) for kind in ("inputs", "outputs", "temporaries"))

    def roofline(self, chip: Chip) -> tuple[float, str]:
        """Return the least time of one execution in seconds, and the resource that limits it."""
        times = {
            "compute": self.flops / chip.flops_per_s,
            "memory": self.num_bytes / chip.bytes_per_s,
        }
        bound = max(times, key=lambda name: times[name])
        return times[bound], bound


class Group(NamedTuple):
    """Devices of the trainer, or of each searcher.

    Attributes:
        devices: number of devices of one trainer or searcher.
        residents: kind -> bytes per device that stay in memory for the whole run.
        transients: kind -> bytes per device of caches.
        count: number of trainers or searchers.
        mesh: text of the mesh.
    """

    devices: int
    residents: Mapping[str, float]
    transients: Mapping[str, float] = {}
    count: int = 1
    mesh: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Description of a run on a slice, before its programs are compiled.

    Attributes:
        config: config with all choices.
        changed_fields: settings that the plan chose, with their values.
        layout: name of the layout of devices.
        shares_devices: whether trainer and searchers share devices.
        lower: group -> settings of the next smaller size that a run would choose; {}: none.
        programs: programs of the run, not compiled.
    """

    config: Config
    changed_fields: Mapping[str, Any]
    chip: Chip
    num_devices: int
    num_hosts: int
    layout: str
    shares_devices: bool
    num_params: int
    trainer: Group
    searcher: Group
    lower: Mapping[str, Mapping[str, Any]]
    programs: Sequence[Program]


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Peak memory of each device of a group.

    Attributes:
        group: trainer, searcher, or both if they share devices.
        parts: (kind, bytes), in printed order.
        largest: group of the program that needs the most memory; "" without programs.
        capacity_bytes: memory of the chip.
    """

    group: str
    parts: tuple[tuple[str, float], ...]
    largest: str
    capacity_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Return the sum of the parts."""
        return sum(size for _, size in self.parts)

    @property
    def over_bytes(self) -> float:
        """Return the missing memory in bytes; 0 if the memory suffices."""
        return max(0.0, self.peak_bytes - self.capacity_bytes)


class Plan(NamedTuple):
    """A run whose programs are compiled."""

    facts: Facts
    programs: Sequence[Program]

    @property
    def fits(self) -> bool:
        """Return whether every program compiles and the memory of each group suffices."""
        is_over = any(o.over_bytes for o in self.occupancies())
        return not is_over and not any(p.failure for p in self.programs)

    def occupancies(self) -> list[Occupancy]:
        """Return the memory of each device group; programs that failed do not count."""
        facts, out = self.facts, []
        groups = {"trainer": facts.trainer, "searcher": facts.searcher}
        labels = {"both": [*groups]} if facts.shares_devices else {n: [n] for n in groups}
        for label, members in labels.items():
            parts = [part for m in members for part in groups[m].residents.items()]
            own = [p for p in self.programs if p.group in members and not p.failure]
            parts.append((_CODE, sum(p.hbm.get("code", 0.0) * p.variants for p in own)))
            cache = facts.searcher.transients if "searcher" in members else {}

            def caches(p: Program, cache: Mapping[str, float] = cache) -> Mapping[str, float]:
                # asynchronous searchers keep their caches while the trainer's programs run
                return cache if p.group == "searcher" or facts.config.driver == "async" else {}

            largest = max(own, key=lambda p: p.own_bytes + sum(caches(p).values()), default=None)
            if largest is not None:
                parts += caches(largest).items()
                parts.append((f"inputs, results, temporaries of {largest.name}", largest.own_bytes))
            parts += facts.chip.overheads.items()
            of = largest.group if largest is not None else ""
            out.append(Occupancy(label, tuple(parts), of, facts.chip.hbm_bytes))
        return out

    def smaller(self) -> Mapping[str, Any]:
        """Return the settings to lower, so that a group without enough memory needs less of it."""
        short = [p.group for p in self.programs if p.is_too_large]
        for o in self.occupancies():
            if o.over_bytes:
                others = {"trainer": "searcher", "searcher": "trainer"}
                short += [o.largest, others[o.largest]] if o.group == "both" else [o.group]
        return next((fields for group in short if (fields := self.facts.lower.get(group))), {})

    def advice(self) -> list[str]:
        """Return lines of advice, the most urgent first; [] for a plan that fits."""
        lines = [
            f"{p.name} does not compile: {p.failure}"
            + (f": {_remedies(self.facts, p.group)}" if p.is_too_large else "")
            for p in sorted(self.programs, key=lambda p: p.is_too_large)
            if p.failure
        ]
        for o in self.occupancies():
            if o.over_bytes:
                group = "trainer" if "trainer" in (o.group, o.largest) else "searcher"
                lines.append(
                    f"{o.over_bytes / GIB:.3g} GiB are missing on each device ({o.group}): "
                    f"{_remedies(self.facts, group)}"
                )
        return lines

    def as_text(self, model: str, where: str) -> str:
        """Return the printed plan; `model` and `where` are the names of the model and the slice."""
        facts, chip, hosts = self.facts, self.facts.chip, self.facts.num_hosts
        trainer, searcher = facts.trainer, facts.searcher
        source = "measured on this machine" if chip.is_measured else "published peaks"
        shared = ", on the devices of the trainer" if facts.shares_devices else ""
        lines = [
            f"model      {model}: {facts.num_params / 1e6:,.4g} M parameters",
            f"slice      {where}: {facts.num_devices} x {chip.name}, {hosts} "
            f"host{'s' if hosts > 1 else ''} of {facts.num_devices // hosts}",
            f"chip       {_gib(chip.hbm_bytes)} GiB, {chip.flops_per_s / 1e12:,.3g} TFLOP/s, "
            f"{chip.bytes_per_s / 1e9:,.0f} GB/s ({source})",
            f"placement  {facts.layout}: trainer on {trainer.devices} ({trainer.mesh}), "
            f"{searcher.count} searcher groups of {searcher.devices}{shared}",
        ]
        if facts.changed_fields:
            lines.append(f"chosen     {flags(facts.changed_fields)}")
        lines += ["", *self._program_lines(), ""]
        for o in self.occupancies():
            fit = f"over by {_gib(o.over_bytes)} GiB" if o.over_bytes else "fits"
            lines.append(
                f"each device ({o.group}): {_gib(o.peak_bytes)} of {_gib(o.capacity_bytes)} GiB, "
                f"{fit}"
            )
            lines += [f"  {_gib(size):>8}  {what}" for what, size in o.parts]
        lines += ["", "fits" if self.fits else "does NOT fit", *(f"- {x}" for x in self.advice())]
        return "\n".join(lines)

    def _program_lines(self) -> Iterator[str]:
        """Yield a table of the programs: memory by the compiler, least time by arithmetic."""
        columns = ("GiB", "temporaries", "TFLOP", "GB", "roofline s", "bound", "compile s")
        yield f"{'program':16}{'group':10}" + "".join(f"{name:>13}" for name in columns)
        for p in self.programs:
            least_s, bound = p.roofline(self.facts.chip)
            sizes = (_gib(sum(p.hbm.values())), _gib(p.hbm.get("temporaries", 0.0)))
            work = (f"{x:.3g}" for x in (p.flops / 1e12, p.num_bytes / 1e9, least_s))
            cells = (*sizes, *work, bound, f"{p.compile_s:.0f}")
            shown = f"{p.name:16}{p.group:10}" + "".join(f"{cell:>13}" for cell in cells)
            yield f"{p.name}: {p.failure}" if p.failure else shown
        yield "GiB: memory of a device, by the compiler. Roofline: least time, by arithmetic."

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object that --json prints, with the figures of the text."""
        facts, programs = self.facts, dict[str, Any]()
        for p in self.programs:
            roofline_s, bound = p.roofline(facts.chip)
            programs[p.name] = {
                "group": p.group,
                "hbm_gib": {kind: size / GIB for kind, size in p.hbm.items()},
                "compile_s": p.compile_s,
                "roofline_s": 0.0 if p.failure else roofline_s,
                "bound": "" if p.failure else bound,
                "failure": p.failure,
            }
        return {
            "fits": self.fits,
            "chip": facts.chip.name,
            "num_devices": facts.num_devices,
            "num_hosts": facts.num_hosts,
            "placement": {
                "layout": facts.layout,
                "trainer_devices": facts.trainer.devices,
                "trainer_mesh": facts.trainer.mesh,
                "searcher_groups": facts.searcher.count,
                "searcher_devices": facts.searcher.devices,
                "fields": dict(facts.changed_fields),
            },
            "programs": programs,
            "memory": {
                o.group: {
                    "gib": {what: size / GIB for what, size in o.parts},
                    "peak_gib": o.peak_bytes / GIB,
                    "capacity_gib": o.capacity_bytes / GIB,
                    "over_gib": o.over_bytes / GIB,
                }
                for o in self.occupancies()
            },
            "advice": self.advice(),
        }


def flags(fields: Mapping[str, Any]) -> str:
    """Return settings as flags of the command line."""
    return " ".join(f"--config.{name}={value}" for name, value in fields.items())


def _remedies(facts: Facts, group: str) -> str:
    """Return the settings that free memory of a group."""
    config, named = facts.config, []
    if group == "trainer":
        if not config.lora.rank:
            named.append("--config.lora.rank=16")
        if config.model.param_dtype == "float32":
            named.append("--config.model.param_dtype=bfloat16")
        if config.optimizer.name == "adamw":
            named.append("--config.optimizer.name=adafactor")
    else:
        if config.search.quantization == "none":
            named.append("--config.search.quantization=int8")
        named.append("a larger --config.search.num_devices")
    named.append("a larger slice, or chips with more memory")
    return f"set a smaller --config.search.max_new_tokens, {', '.join(named)}"


def _gib(size: float) -> str:
    value = size / GIB
    return f"{value:.2f}" if value >= 1 or not value else f"{value:.2g}"
