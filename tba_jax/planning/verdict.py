# SPDX-License-Identifier: Apache-2.0
"""What the compiled programs mean for the run: memory in use at a time, fit, balance, advice.

Figures in, statements out: it knows neither JAX nor processes. Memory of a device is what is there
all the time (`residents`) plus the hungriest program's own arguments, results and temporaries; in a
placement whose parts take turns, both parts' residents count, and beside a program of the trainer
also what an asynchronous searcher holds between two of its own. The invariant it owns: a plan that
fits has every program compiled, and every device group's sum below the chip's memory.

Predicted times are rooflines, so times are lower bounds; a ratio of two of them is fair only as far
as both parts come equally near to theirs.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
ROLES = ("reward model", "gold reward model", "victim", "classifier", "sentence embedder")
"""Kinds of bytes: the parameters of models beside the policy."""
_CODE = "program code, all length buckets"
# Of what is left of the memory: the compiler's figures leave out fragmentation.
_HEADROOM = 0.95


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program of one device group; all figures per device.

    Attributes:
        name: train_step, publish, score_reference, prefill, admit, decode_chunk, ...
        group: trainer or searcher.
        hbm: bytes by kind; `arguments` kinds that are resident are counted there, not here.
        flops, num_bytes, collective_bytes, network_bytes, launches: of one execution.
        compile_s: of the compiler alone.
        roofline_s: of one execution.
        bound: what decides that: compute, memory, links or network.
        variants: programs of this kind a run may load, one per shape.
        with_cache: it runs while the KV cache is there.
        calls_per_round: how often a round of a searcher runs it.
        failure: why it did not compile; "" where it did.
        needed_bytes: what the compiler wanted where that was too much.
        uncounted: custom calls whose FLOPs are unknown.
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
        """What it takes beyond residents: its inputs, new results, temporaries."""
        return sum(self.hbm.get(kind, 0.0) for kind in ("inputs", "outputs", "temporaries"))


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Memory of each device of a group, at its fullest.

    Attributes:
        group: trainer, searcher, or both where they take turns.
        parts: (what, bytes), in the order they are printed.
        peak_bytes: their sum.
        capacity_bytes: of the chip.
    """

    group: str
    parts: tuple[tuple[str, float], ...]
    peak_bytes: float
    capacity_bytes: float

    @property
    def over_bytes(self) -> float:
        """How much too much; 0 where it fits."""
        return max(0.0, self.peak_bytes - self.capacity_bytes)


def occupancies(facts: Mapping[str, Any], programs: Sequence[Program]) -> list[Occupancy]:
    """Memory of each device group.

    Args:
        facts: what `compile_one` describes.
        programs: compiled ones; those that failed count nothing here.
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
    """Return the memory that a searcher holds on a device during a program of the trainer."""
    is_beside = facts["shares_devices"] and not facts["searches_elsewhere"]
    if not is_beside or facts["config"]["driver"] != "async":
        return {}
    slots = max((p.hbm.get("inputs", 0.0) for p in programs if p.group == "searcher"), default=0.0)
    cache = facts["groups"]["searcher"]["transients"]
    return {"the victim's slots": slots} if slots > sum(cache.values()) else dict(cache)


@dataclasses.dataclass(frozen=True)
class Balance:
    """Predicted speed of trainer and searchers against each other.

    Attributes:
        step_s: one train step.
        round_s: one round of one searcher group.
        made_per_trained: responses that all searchers make while the trainer trains on one.
        wanted: the ratio the config asks for: recency_prob * S / K.
        trainer_devices: how many of all devices would balance the two.
        searchers: how many of them keep this trainer busy.
        steps_per_hour: what the slower part allows, as placed.
    """

    step_s: float
    round_s: float
    made_per_trained: float
    wanted: float
    trainer_devices: float
    searchers: float
    steps_per_hour: float


def balance(facts: Mapping[str, Any], programs: Sequence[Program]) -> Balance | None:
    """Return the balance of searchers and trainer; None if a needed program does not compile."""
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
    # Device-seconds of each part for one step.
    of_trainer = step_s * trainer["devices"]
    of_searchers = wanted * trained / rate * searcher["count"] * searcher["devices"]
    share = of_trainer / (of_trainer + of_searchers)
    search_s = wanted * trained / rate
    in_turns = facts["shares_devices"] and not facts["searches_elsewhere"]
    period = step_s + search_s if in_turns else max(step_s, search_s)
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
    """Return advice, most urgent first; each line says what it improves."""
    lines = []
    capacity = facts["chip"]["hbm_bytes"] - sum(facts["chip"]["overheads"].values())
    over = {o.group: o for o in found if o.over_bytes}
    for p in programs:
        if p.failure and not p.is_too_large:
            lines.append(f"{p.name} does not compile here: {p.failure}. {_OTHER_PLACEMENT}")
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
    "Choose other sizes of the mesh or another --config.placement; docs/plan.md lists what each "
    "chip accepts"
)


_GATHER_LESS = (
    "train_step waits for its links: parameters are gathered over mesh.fsdp for every micro-batch, "
    "so fewer and larger ones (batch.micro_batch_rows; --search finds the largest) send less"
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
    """Options that make one program smaller, with the size at which it should fit."""
    sizes = facts["sizes"]
    free = max(0.0, capacity - resident) * _HEADROOM
    # A program that did not compile said how much it wanted in all, arguments included.
    own = p.own_bytes or max(0.0, p.needed_bytes)
    share = free / own if own else 0.0
    too_much = f"{p.name} wants {own / GIB:.1f} GiB where {free / GIB:.1f} GiB are free"
    if p.name == "train_step":
        now = sizes["micro_batch_rows"]
        fitting = [n for n in sizes["micro_batch_options"] if n < now and n <= now * share]
        if fitting:
            return [
                f"{too_much}: set --config.batch.micro_batch_rows={max(fitting)} (now "
                f"{now}; temporaries shrink, though by less than that; --search checks)"
            ]
        return [
            f"{too_much}, and no smaller micro-batch divides over the mesh: store parameters in "
            "bfloat16 (--config.model.param_dtype=bfloat16) where they are not, shorten "
            "--config.search.max_new_tokens, or give the trainer more devices (mesh.fsdp, "
            "mesh.model)"
        ]
    if p.with_cache:
        cache = sum(facts["groups"]["searcher"]["transients"].values())
        slots = int(sizes["num_slots"] * max(0.0, free) / (cache + own)) if cache + own else 0
        slots = 2 ** (slots.bit_length() - 1) if slots else 0
        if 0 < slots < sizes["num_slots"]:
            return [
                f"{p.name} and its cache want {(cache + own) / GIB:.1f} GiB where "
                f"{free / GIB:.1f} GiB are free: set --config.search.num_slots={slots} (now "
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
        return [f"{too_much}: train adapters (--config.lora.rank), which alone are published"]
    return [f"{too_much}: keep less on its devices, or take more of them or larger ones"]


def _savings(
    facts: Mapping[str, Any], programs: Sequence[Program], group: str, occupancy: Occupancy
) -> list[str]:
    """Return further options for devices without enough memory, with the bytes they free."""
    config, frees = facts["config"], {}
    members = ("trainer", "searcher") if group == "both" else (group,)
    code = sum((p.variants - 1) * p.hbm.get("code", 0.0) for p in programs if p.group in members)
    if config["batch"]["num_length_buckets"] > 1:
        frees["--config.batch.num_length_buckets=1 up to {} GiB of code (for more padding)"] = code
    held = facts["groups"]["trainer"]["residents"] if "trainer" in members else {}
    if "searcher" in members and config["search"]["cache_dtype"] != "int8":
        # Of two bytes or four one is left, and the scales.
        cache = facts["groups"]["searcher"]["transients"].get("KV cache", 0.0)
        dtype = config["search"]["cache_dtype"] or config["model"]["rollout_dtype"]
        frees["--config.search.cache_dtype=int8 {} GiB of KV cache"] = cache * (
            0.7 if dtype == "float32" else 0.45
        )
    if "searcher" in members and config["search"]["quantization"] == "none":
        # What is read from files stays as it is; tables and norms too.
        kept = facts["groups"]["searcher"]["residents"]
        weights = kept.get("weights in use", 0.0) + kept.get("next weights", 0.0)
        wide = config["model"]["rollout_dtype"] == "float32"
        frees["--config.search.quantization=int8 {} GiB of weights"] = weights * (
            0.7 if wide else 0.45
        )
    moments = held.get("optimiser state", 0.0)
    if config["optimizer"]["name"] == "adamw":
        frees["--config.optimizer.name=adafactor {} GiB"] = moments
        frees["--config.optimizer.offload=True {} GiB (to the host and back in each step)"] = (
            moments
        )
    if config["model"]["param_dtype"] == "float32":
        kinds = ("parameters", "reference parameters", "frozen parameters")
        stored = sum(held.get(kind, 0.0) for kind in kinds) + moments
        what = "--config.model.param_dtype=bfloat16 {} GiB (small updates round away)"
        frees[what] = stored / 2
    named = [
        what.format(f"{size / GIB:.1f}")
        for what, size in sorted(frees.items(), key=lambda item: -item[1])
        if size >= occupancy.over_bytes / 10
    ]
    over = f"{occupancy.over_bytes / GIB:.2g} GiB"
    return [f"{over} could also be found so: {'; '.join(named)}"] if named else []


def _larger_group(sizes: Mapping[str, Any]) -> str:
    if sizes["next_group"]:
        return f"set --config.search.num_devices={sizes['next_group']}"
    return "take chips of more memory: a searcher has as many as its host has for it"


def _spread(facts: Mapping[str, Any], group: str, occupancy: Occupancy) -> str:
    residents = _resident_bytes(facts, group)
    start = (
        f"what the {group} keeps takes {residents / GIB:.1f} GiB of each device, more than the "
        f"{occupancy.capacity_bytes / GIB:.1f} GiB there are"
    )
    held = facts["groups"]["searcher"]
    judges = {name: held["residents"][name] for name in held["judges"]}
    if group != "trainer" and sum(judges.values()) > occupancy.capacity_bytes / 2:
        names, sizes = " and ".join(judges), facts["sizes"]
        return (
            f"{start}, {sum(judges.values()) / GIB:.1f} GiB of it {names}: store them in bfloat16 "
            "(reward.dtype, eval.gold_dtype, victim.dtype, classifier.dtype) where they are not; "
            f"or {_larger_group(sizes)} (victims and classifiers stay whole on one device)"
        )
    if group == "searcher":
        once = ", or train adapters (--config.lora.rank), under which it has the weights once"
        return f"{start}: {_larger_group(facts['sizes'])}{'' if _has_adapters(facts) else once}"
    return (
        f"{start}: make mesh.fsdp or mesh.model larger, store parameters in bfloat16 "
        "(--config.model.param_dtype=bfloat16), or take a larger slice"
    )


def _has_adapters(facts: Mapping[str, Any]) -> bool:
    return facts["config"]["lora"]["rank"] > 0


def _rebalance(facts: Mapping[str, Any], weighed: Balance) -> list[str]:
    if facts["searches_elsewhere"]:
        there, each = facts["groups"]["searcher"]["count"], facts["config"]["num_searchers"]
        wanted = math.ceil(weighed.searchers / each) * each
        slow = "the trainer" if wanted < there else "searchers"
        if wanted == there:
            return [f"the fleet is balanced: {there} searchers keep the trainer busy"]
        return [
            f"{slow} would be waited for: {weighed.searchers:.1f} searchers keep the trainer busy; "
            f"set --config.fleet.max_searchers={wanted} (now {there})"
        ]
    if facts["shares_devices"] or not facts["trainer_options"]:
        return []
    now = facts["groups"]["trainer"]["devices"]
    nearest = min(facts["trainer_options"], key=lambda n: abs(n - weighed.trainer_devices))
    if nearest == now:
        return [f"the split is balanced: {now} trainer devices are the nearest that this slice has"]
    slow = "trainer" if nearest > now else "searchers"
    return [
        f"the {slow} would be waited for: {nearest} trainer devices (now {now}) of "
        f"{facts['num_devices']} come nearest to balance"
    ]
