# SPDX-License-Identifier: Apache-2.0
"""Conclusions from compiled programs: memory in use, fit, balance of trainer and searchers, advice.

The peak memory of a device is its resident memory (`residents`) plus arguments, results and
temporaries of the largest program. If trainer and searchers share devices, the residents of both
count, and during a trainer program also the memory that an asynchronous searcher holds between two
of its programs. This module imports no JAX.

Predicted times are rooflines and therefore lower bounds. A ratio of two times is fair only if both
parts come equally near to their rooflines.

Invariant: in a plan that fits, every program compiled and the memory of each group is below the
chip's.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
ROLES = ("reward model", "gold reward model", "victim", "classifier", "sentence embedder")
"""Kinds of bytes: the parameters of models beside the policy."""
_CODE = "program code, all length buckets"
# Usable share of the remaining memory: figures of the compiler do not include fragmentation.
_HEADROOM = 0.95


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program of one device group, with figures per device.

    Attributes:
        name: train_step, publish, score_reference, prefill, admit, decode_chunk, ...
        group: trainer or searcher.
        hbm: kind of memory -> bytes. Arguments that stay in memory between programs, such as
            parameters, have their own kinds; other arguments are "inputs".
        flops, num_bytes, collective_bytes, network_bytes, launches: cost of one execution.
        compile_s: time of the compiler alone.
        roofline_s: lower bound of the time of one execution.
        bound: resource that limits `roofline_s`: compute, memory, links or network.
        variants: number of programs of this kind that a run may load, one per shape.
        with_cache: whether the KV cache is in memory while the program runs.
        calls_per_round: number of executions in one round of a searcher.
        failure: reason why the program did not compile; "" on success.
        needed_bytes: memory that the compiler asked for if the device has less.
        uncounted: custom calls with unknown FLOPs.
    """

    name: str
    group: str
    hbm: Mapping[str, float] = dataclasses.field(default_factory=dict)
    flops: float = 0.0
    num_bytes: float = 0.0
    collective_bytes: float = 0.0
    network_bytes: float = 0.0
    launches: int = 0
    compile_s: float = 0.0
    roofline_s: float = 0.0
    bound: str = ""
    variants: int = 1
    with_cache: bool = False
    calls_per_round: float = 0.0
    failure: str = ""
    is_too_large: bool = False
    needed_bytes: float = 0.0
    uncounted: Sequence[str] = ()

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
        peak_bytes: sum of the parts.
        capacity_bytes: memory of the chip.
    """

    group: str
    parts: tuple[tuple[str, float], ...]
    peak_bytes: float
    capacity_bytes: float

    @property
    def over_bytes(self) -> float:
        """Return the missing memory in bytes; 0 if the memory suffices."""
        return max(0.0, self.peak_bytes - self.capacity_bytes)


def occupancies(facts: Mapping[str, Any], programs: Sequence[Program]) -> list[Occupancy]:
    """Return the memory of each device group.

    Args:
        programs: compiled programs; programs that failed are ignored.
    """
    groups = facts["groups"]
    names = (
        {"both": ("trainer", "searcher")} if facts["shares_devices"] else {n: (n,) for n in groups}
    )
    out = []
    for label, members in names.items():
        parts: list[tuple[str, float]] = []
        for member in members:
            parts += [(what, size) for what, size in groups[member]["residents"].items()]
        own = [p for p in programs if p.group in members and not p.failure]
        code = sum(p.hbm.get("code", 0.0) * p.variants for p in own)
        parts.append((_CODE, code))
        cache = groups["searcher"]["transients"] if "searcher" in members else {}
        held = _held_between(facts, own)
        besides = {
            p.name: cache if p.with_cache else held if p.group == "trainer" else {} for p in own
        }
        hungriest = max(
            own, key=lambda p: p.own_bytes + sum(besides[p.name].values()), default=None
        )
        if hungriest is not None:
            parts += list(besides[hungriest.name].items())
            parts.append((f"inputs, results, temporaries of {hungriest.name}", hungriest.own_bytes))
        parts += facts["chip"]["overheads"].items()
        peak = sum(size for _, size in parts)
        out.append(Occupancy(label, tuple(parts), peak, facts["chip"]["hbm_bytes"]))
    return out


def _held_between(facts: Mapping[str, Any], programs: Sequence[Program]) -> dict[str, float]:
    """Return the memory of a device that searchers hold while a program of the trainer runs."""
    if not facts["shares_devices"] or facts["config"]["driver"] != "async":
        return {}
    slots = max((p.hbm.get("inputs", 0.0) for p in programs if p.group == "searcher"), default=0.0)
    cache = facts["groups"]["searcher"]["transients"]
    return {"decode slots of the victim": slots} if slots > sum(cache.values()) else dict(cache)


@dataclasses.dataclass(frozen=True)
class Balance:
    """Predicted speeds of trainer and searchers, compared with each other.

    Attributes:
        step_s: time of a train step.
        round_s: time of a round of one searcher group.
        made_per_trained: generated responses of all searchers per trained response.
        wanted: `made_per_trained` that the config asks for: recency_prob * S / K.
        trainer_devices: number of trainer devices that would balance the two.
        searchers: number of searchers that would keep this trainer busy.
        steps_per_hour: rate of the slower part with the planned devices.
    """

    step_s: float
    round_s: float
    made_per_trained: float
    wanted: float
    trainer_devices: float
    searchers: float
    steps_per_hour: float


def balance(facts: Mapping[str, Any], programs: Sequence[Program]) -> Balance | None:
    """Return the balance of searchers and trainer; None if a program of theirs does not compile."""
    by_name = {p.name: p for p in programs if not p.failure}
    if not {"train_step", "prefill", "decode_chunk"} <= by_name.keys():
        return None
    sizes = facts["sizes"]
    step_s = by_name["train_step"].roofline_s
    rows = sizes["round_rows"]
    round_s = sum(p.calls_per_round * p.roofline_s for p in by_name.values())
    trainer, searcher = facts["groups"]["trainer"], facts["groups"]["searcher"]
    trained = sizes["batch_rows"]
    rate = searcher["count"] * rows / round_s
    wanted = sizes["wanted_ratio"]
    # device-seconds of each part for one step
    of_trainer = step_s * trainer["devices"]
    of_searchers = wanted * trained / rate * searcher["count"] * searcher["devices"]
    share = of_trainer / (of_trainer + of_searchers)
    search_s = wanted * trained / rate
    period = step_s + search_s if facts["shares_devices"] else max(step_s, search_s)
    return Balance(
        step_s=step_s,
        round_s=round_s,
        made_per_trained=rate * step_s / trained,
        wanted=wanted,
        trainer_devices=share * facts["num_devices"],
        searchers=searcher["count"] * search_s / step_s,
        steps_per_hour=3600 / period,
    )


def advice(
    facts: Mapping[str, Any],
    programs: Sequence[Program],
    found: Sequence[Occupancy],
    weighed: Balance | None,
) -> list[str]:
    """Return lines of advice, the most urgent first; each line names its benefit."""
    lines = []
    capacity = facts["chip"]["hbm_bytes"] - sum(facts["chip"]["overheads"].values())
    over = {o.group: o for o in found if o.over_bytes}
    for p in programs:
        if p.failure and not p.is_too_large:
            lines.append(f"{p.name} does not compile: {p.failure}. {_OTHER_PLACEMENT}")
    for p in programs:
        group = "both" if facts["shares_devices"] else p.group
        occupancy = next((o for o in found if o.group == group), None)
        resident = 0.0
        if occupancy is not None:
            resident = _resident_bytes(facts, group) + dict(occupancy.parts)[_CODE]
            if p.group == "trainer":
                resident += sum(_held_between(facts, programs).values())
        if p.is_too_large or (group in over and _is_named(over[group], p)):
            lines += _shrink(facts, p, resident, capacity)
    for group, occupancy in over.items():
        if _resident_bytes(facts, group) > capacity:
            lines.append(_spread(facts, group, occupancy))
        lines += _savings(facts, programs, group, occupancy)
    if not lines and weighed is not None:
        lines += _rebalance(facts, weighed)
        lines += [_GATHER_LESS for p in programs if p.name == "train_step" and _gathers(facts, p)]
    return list(dict.fromkeys(lines))


_OTHER_PLACEMENT = (
    "Set other mesh sizes or another --config.placement; docs/plan.md lists what each chip accepts"
)


_GATHER_LESS = (
    "train_step is limited by its links: every micro-batch gathers the parameters over "
    "mesh.fsdp. Set a larger --config.batch.micro_batch_rows; --search finds the largest"
)


def _gathers(facts: Mapping[str, Any], p: Program) -> bool:
    sizes = facts["sizes"]
    is_sent = p.bound in ("links", "network")
    return is_sent and sizes["micro_batch_rows"] < sizes["batch_rows"]


def _is_named(occupancy: Occupancy, p: Program) -> bool:
    return any(what.endswith(f" of {p.name}") for what, _ in occupancy.parts)


def _resident_bytes(facts: Mapping[str, Any], group: str) -> float:
    members = ("trainer", "searcher") if group == "both" else (group,)
    return sum(sum(facts["groups"][m]["residents"].values()) for m in members)


def _shrink(facts: Mapping[str, Any], p: Program, resident: float, capacity: float) -> list[str]:
    """Return advice on settings that reduce a program's memory, with the value that should fit."""
    sizes = facts["sizes"]
    free = max(0.0, capacity - resident) * _HEADROOM
    # If the program did not compile, the figure is the compiler's total, which includes arguments.
    own = p.own_bytes or max(0.0, p.needed_bytes)
    share = free / own if own else 0.0
    too_much = f"{p.name} needs {own / GIB:.1f} GiB and {free / GIB:.1f} GiB are free"
    if p.name == "train_step":
        now = sizes["micro_batch_rows"]
        fitting = [n for n in sizes["useful_rows"] if n < now and n <= now * share]
        if fitting:
            return [
                f"{too_much}: set --config.batch.micro_batch_rows={max(fitting)} (now {now}; "
                "temporaries shrink less than in proportion; check with --search)"
            ]
        return [
            f"{too_much}, and the mesh divides no smaller micro-batch: set "
            "--config.model.param_dtype=bfloat16, a smaller --config.search.max_new_tokens, or "
            "give the trainer more devices (mesh.fsdp, mesh.model)"
        ]
    if p.with_cache:
        cache = sum(facts["groups"]["searcher"]["transients"].values())
        slots = int(sizes["num_slots"] * max(0.0, free) / (cache + own)) if cache + own else 0
        slots = 2 ** (slots.bit_length() - 1) if slots else 0
        if 0 < slots < sizes["num_slots"]:
            return [
                f"{p.name} and its cache need {(cache + own) / GIB:.1f} GiB and {free / GIB:.1f} "
                f"GiB are free: set --config.search.num_slots={slots} (now "
                f"{sizes['num_slots']}), or {_larger_group(sizes)}"
            ]
        return [f"{too_much}: {_larger_group(sizes)}"]
    if p.name == "score_reference":
        rows = max(1, int(sizes["prompts_per_round"] * share))
        return [
            f"{too_much}: set --config.search.prompts_per_round={rows} (now "
            f"{sizes['prompts_per_round']}), or --config.reference.placement=trainer"
        ]
    if p.name == "publish":
        return [
            f"{too_much}: train adapters (--config.lora.rank=16); only adapters are then published"
        ]
    return [f"{too_much}: reduce its resident memory, or use more or larger devices"]


def _savings(
    facts: Mapping[str, Any], programs: Sequence[Program], group: str, occupancy: Occupancy
) -> list[str]:
    """Return advice on other settings that free memory, with the bytes that each frees."""
    config, frees = facts["config"], {}
    members = ("trainer", "searcher") if group == "both" else (group,)
    held = facts["groups"]["trainer"]["residents"] if "trainer" in members else {}
    if "searcher" in members and config["search"]["quantization"] == "none":
        # Weights read from files keep their dtype; tables and norms too.
        kept = facts["groups"]["searcher"]["residents"]
        weights = kept.get("weights in use", 0.0) + kept.get("next weights", 0.0)
        wide = config["model"]["rollout_dtype"] == "float32"
        frees["--config.search.quantization=int8 {} GiB of weights"] = weights * (
            0.7 if wide else 0.45
        )
    moments = held.get("optimiser state", 0.0)
    if config["optimizer"]["name"] == "adamw":
        frees["--config.optimizer.name=adafactor {} GiB"] = moments
    if config["model"]["param_dtype"] == "float32":
        kinds = ("parameters", "reference parameters", "frozen parameters")
        stored = sum(held.get(kind, 0.0) for kind in kinds) + moments
        what = "--config.model.param_dtype=bfloat16 {} GiB (rounding loses small updates)"
        frees[what] = stored / 2
    named = [
        what.format(f"{size / GIB:.1f}")
        for what, size in sorted(frees.items(), key=lambda item: -item[1])
        if size >= occupancy.over_bytes / 10
    ]
    over = f"{occupancy.over_bytes / GIB:.2g} GiB"
    return [f"missing {over}; these settings also free memory: {'; '.join(named)}"] if named else []


def _larger_group(sizes: Mapping[str, Any]) -> str:
    if sizes["next_group"]:
        return f"set --config.search.num_devices={sizes['next_group']}"
    return "use chips with more memory: a searcher already has all devices of its host"


def _spread(facts: Mapping[str, Any], group: str, occupancy: Occupancy) -> str:
    residents = _resident_bytes(facts, group)
    start = (
        f"resident memory of the {group} is {residents / GIB:.1f} GiB per device, and the device "
        f"has {occupancy.capacity_bytes / GIB:.1f} GiB"
    )
    held = facts["groups"]["searcher"]
    judges = {name: held["residents"][name] for name in held["judges"]}
    if group != "trainer" and sum(judges.values()) > occupancy.capacity_bytes / 2:
        names, sizes = " and ".join(judges), facts["sizes"]
        return (
            f"{start}, {sum(judges.values()) / GIB:.1f} GiB of it for {names}: store them in "
            "bfloat16 (reward.dtype); or "
            f"{_larger_group(sizes)} (victims and classifiers stay whole on one device)"
        )
    if group == "searcher":
        once = ", or train adapters (--config.lora.rank=16), with one copy of the weights"
        return f"{start}: {_larger_group(facts['sizes'])}{'' if _has_adapters(facts) else once}"
    return (
        f"{start}: set a larger mesh.fsdp or mesh.model, --config.model.param_dtype=bfloat16, or "
        "use a larger slice"
    )


def _has_adapters(facts: Mapping[str, Any]) -> bool:
    return facts["config"]["lora"]["rank"] > 0


def _rebalance(facts: Mapping[str, Any], weighed: Balance) -> list[str]:
    if facts["has_remote_searchers"]:
        there, each = facts["groups"]["searcher"]["count"], facts["config"]["num_searchers"]
        wanted = math.ceil(weighed.searchers / each) * each
        slow = "the trainer" if wanted < there else "searchers"
        if wanted == there:
            return [f"the fleet is balanced: {there} searchers keep the trainer busy"]
        return [
            f"{slow} would be the bottleneck: {weighed.searchers:.1f} searchers keep the trainer "
            f"busy; set --config.fleet.max_searchers={wanted} (now {there})"
        ]
    if facts["shares_devices"] or not facts["trainer_options"]:
        return []
    now = facts["groups"]["trainer"]["devices"]
    nearest = min(facts["trainer_options"], key=lambda n: abs(n - weighed.trainer_devices))
    if nearest == now:
        return [f"the split is balanced: {now} trainer devices are the best that this slice allows"]
    slow = "trainer" if nearest > now else "searchers"
    return [
        f"the {slow} would be the bottleneck: {nearest} trainer devices (now {now}) of "
        f"{facts['num_devices']} are the best balance"
    ]
