# SPDX-License-Identifier: Apache-2.0
"""Conclusions from compiled programs: memory in use, fit, advice.

The peak memory of a device is its resident memory (`residents`) plus arguments, results and
temporaries of the largest program. If trainer and searchers share devices, the residents of both
count, and during a trainer program also the caches that an asynchronous searcher holds between two
of its programs. This module imports no JAX.

Memory is the compiler's figure. Times are arithmetic: FLOPs and bytes that no program can avoid,
over the peak rates of the chip. They are lower bounds.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
_CODE = "program code, all length buckets"


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program of one device group, with figures per device.

    Attributes:
        name: train_step, publish, prefill, admit, decode_chunk, ...
        group: trainer or searcher.
        hbm: kind of memory -> bytes. Arguments that stay in memory between programs, such as
            parameters, have their own kinds; other arguments are "inputs".
        compile_s: time of the compiler alone.
        flops, num_bytes: unavoidable work of one execution.
        roofline_s: lower bound of the time of one execution.
        bound: resource that limits `roofline_s`: compute or memory.
        variants: number of programs of this kind that a run may load, one per shape.
        with_cache: whether the KV cache is in memory while the program runs.
        failure: reason why the program did not compile; "" on success.
        is_too_large: whether the compiler reported too little device memory.
        needed_bytes: memory that the compiler asked for if the device has less.
    """

    name: str
    group: str
    hbm: Mapping[str, float] = dataclasses.field(default_factory=dict)
    compile_s: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0
    roofline_s: float = 0.0
    bound: str = ""
    variants: int = 1
    with_cache: bool = False
    failure: str = ""
    is_too_large: bool = False
    needed_bytes: float = 0.0

    @property
    def own_bytes(self) -> float:
        """Return the memory beyond resident arrays: inputs, new results, temporaries."""
        return sum(self.hbm.get(kind, 0.0) for kind in ("inputs", "outputs", "temporaries"))


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


def occupancies(facts: Mapping[str, Any], programs: Sequence[Program]) -> list[Occupancy]:
    """Return the memory of each device group.

    Args:
        facts: description of the run, as of `compile_one.describe`.
        programs: compiled programs; programs that failed are ignored.
    """
    groups = facts["groups"]
    names = {name: (name,) for name in groups}
    if facts["shares_devices"]:
        names = {"both": ("trainer", "searcher")}
    out = []
    for label, members in names.items():
        parts = [part for m in members for part in groups[m]["residents"].items()]
        own = [p for p in programs if p.group in members and not p.failure]
        parts.append((_CODE, sum(p.hbm.get("code", 0.0) * p.variants for p in own)))
        cache = groups["searcher"]["transients"] if "searcher" in members else {}
        stays = bool(cache) and facts["config"]["driver"] == "async"  # between two of its programs
        besides = {
            p.name: cache if p.with_cache or (stays and p.group == "trainer") else {} for p in own
        }
        largest = max(own, key=lambda p: p.own_bytes + sum(besides[p.name].values()), default=None)
        if largest is not None:
            parts += besides[largest.name].items()
            parts.append((f"inputs, results, temporaries of {largest.name}", largest.own_bytes))
        parts += facts["chip"]["overheads"].items()
        of = largest.group if largest is not None else ""
        out.append(Occupancy(label, tuple(parts), of, facts["chip"]["hbm_bytes"]))
    return out


def advice(
    facts: Mapping[str, Any], programs: Sequence[Program], found: Sequence[Occupancy]
) -> list[str]:
    """Return lines of advice, the most urgent first; [] for a plan that fits."""
    lines = [
        f"{p.name} does not compile: {p.failure}"
        for p in programs
        if p.failure and not p.is_too_large
    ]
    lines += [
        f"{p.name} needs more memory than a device has ({p.needed_bytes / GIB:.1f} GiB with its "
        f"arguments): {_remedies(facts, p.group)}"
        for p in programs
        if p.is_too_large
    ]
    for o in found:
        if o.over_bytes:
            group = "trainer" if o.group == "trainer" or o.largest == "trainer" else "searcher"
            lines.append(
                f"{o.over_bytes / GIB:.2g} GiB are missing on each {o.group} device: "
                f"{_remedies(facts, group)}"
            )
    return lines


def _remedies(facts: Mapping[str, Any], group: str) -> str:
    """Return the settings that free memory of a group, with what each frees on a device."""
    config, held = facts["config"], facts["groups"][group]["residents"]
    frees: dict[str, float] = {}
    if group == "trainer":
        moments = held.get("optimiser state", 0.0)
        if config["optimizer"]["name"] == "adamw":
            frees["--config.optimizer.name=adafactor"] = moments
        if config["model"]["param_dtype"] == "float32":
            kinds = ("parameters", "reference parameters", "frozen parameters")
            stored = sum(held.get(kind, 0.0) for kind in kinds) + moments
            frees["--config.model.param_dtype=bfloat16"] = stored / 2
        if not config["lora"]["rank"]:
            frees["--config.lora.rank=16"] = moments
    elif config["search"]["quantization"] == "none":
        weights = held.get("weights in use", 0.0) + held.get("next weights", 0.0)
        frees["--config.search.quantization=int8"] = 0.45 * weights
    named = [
        f"{flag} ({size / GIB:.1f} GiB)"
        for flag, size in sorted(frees.items(), key=lambda item: -item[1])
        if size
    ]
    more = "a larger slice, or chips with more memory"
    if group == "searcher":
        more = f"a larger --config.search.num_devices, {more}"
    return f"set a smaller --config.search.max_new_tokens, {', '.join([*named, more])}"
