# SPDX-License-Identifier: Apache-2.0
"""Cost of one execution of a compiled program on one device, read from its optimised HLO text.

XLA's own `cost_analysis` counts the body of a loop once, so a model scanned over 28 layers looks
like a model of one layer. Here the cost of the body and the condition of a loop is multiplied by
the trip count, which is the first of these that exists:

- XLA's `known_trip_count`;
- the constant that the condition compares the counter with, less the counter's first value, divided
  by its step (1 in JAX's scan and fori_loop, 2 in some loops that XLA:TPU generates);
- `unknown_trips` of the caller, for loops whose end depends on data.

The more expensive branch of a conditional counts. FLOPs are those of matrix products (dot and
convolution, two per multiply-add), as usual for the MFU. Bytes are those read and written in device
memory: a fusion counts as one instruction, a slice costs its result, and an update in place costs
the update. On TPU, buffers in VMEM cost nothing. All figures are per device, because the text is
the program of one device of a partitioned program.

Invariant: nothing is counted twice, and custom calls that cannot be counted are in `uncounted`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tba_jax.planning.hlo_flops import flops_of
from tba_jax.planning.hlo_text import (
    FREE_CALLS,
    Array,
    Computations,
    Instruction,
    Module,
    called,
    parse,
    target,
)

# These opcodes only rename their operands, or write nothing to memory.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id "
    "opt-barrier add-dependency domain get-dimension-size".split()
)
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_VIEWS = frozenset(("bitcast", "reshape"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
# Opcode that writes a part of its first operand -> index of the operand that is written.
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one execution on one device.

    Attributes:
        flops: FLOPs of matrix products.
        num_bytes: bytes read and written in device memory.
        collective_bytes: bytes sent to other devices with ring algorithms. Of n devices, each sends
            (n - 1) / n of the result of an all-gather, (n - 1) / n of the operand of a
            reduce-scatter, and twice as much for an all-reduce.
        network_bytes: bytes that a device sends to other hosts. The members of a group on one host
            share the outgoing bytes, with one network adapter each, as in NCCL's rings.
        launches: number of kernels, calls and collectives that are executed one after the other; on
            TPU without scalar instructions and prefetches into fast memory.
        unknown_loops: number of loops that use the caller's trip count.
        uncounted: targets of custom calls with unknown FLOPs, sorted.
    """

    flops: float = 0.0
    num_bytes: float = 0.0
    collective_bytes: float = 0.0
    network_bytes: float = 0.0
    launches: int = 0
    unknown_loops: int = 0
    uncounted: tuple[str, ...] = ()

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.num_bytes + other.num_bytes,
            self.collective_bytes + other.collective_bytes,
            self.network_bytes + other.network_bytes,
            self.launches + other.launches,
            self.unknown_loops + other.unknown_loops,
            tuple(sorted({*self.uncounted, *other.uncounted})),
        )

    def times(self, trips: int) -> "Cost":
        """Return the cost of `trips` executions; names and unknown loops are counted once."""
        return dataclasses.replace(
            self,
            flops=self.flops * trips,
            num_bytes=self.num_bytes * trips,
            collective_bytes=self.collective_bytes * trips,
            network_bytes=self.network_bytes * trips,
            launches=self.launches * trips,
        )


def program_cost(hlo_text: str, *, unknown_trips: int = 1, devices_per_host: int = 0) -> Cost:
    """Return the cost of the entry computation.

    Args:
        hlo_text: text of `jax.stages.Compiled.as_text()`.
        unknown_trips: trip count of a loop whose end depends on data.
        devices_per_host: number of the program's devices on each host; 0: all are on one host.

    Raises:
        ValueError: the text has no entry computation.
    """
    module = parse(hlo_text)
    if module.entry is None:
        raise ValueError("not the text of an HLO module: it has no ENTRY computation")
    return _Counter(module, unknown_trips, devices_per_host).computation(module.entry)


class _Counter:
    def __init__(self, module: Module, unknown_trips: int, devices_per_host: int) -> None:
        self._module = module
        self._devices_per_host = devices_per_host
        self._unknown_trips = unknown_trips
        self.computation = functools.cache(self._computation)

    def _computation(self, name: str) -> Cost:
        body = self._module.computations[name]
        return sum((self._instruction(x, body) for x in body.values()), Cost())

    def _instruction(self, x: Instruction, body: Mapping[str, Instruction]) -> Cost:
        opcode = x.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return Cost()
        if opcode == "while":
            condition, loop = called(x, "condition"), called(x, "body")
            trips = self._trips(x, body)
            once = self.computation(loop[0]) + self.computation(condition[0])
            if trips is None:
                return once.times(self._unknown_trips) + Cost(unknown_loops=1)
            return once.times(trips)
        if opcode == "conditional":
            names = called(x, "branch_computations", "true_computation", "false_computation")
            return max((self.computation(n) for n in names), key=lambda c: (c.flops, c.num_bytes))
        if opcode == "call" or (opcode == "async-start" and called(x, "calls")):
            return sum((self.computation(n) for n in called(x, "to_apply", "calls")), Cost())
        if opcode == "fusion":
            return self._fusion(x, body)
        # A fusion on its own stream has the results ((operands), results, context).
        if opcode == "fusion-start":
            num_operands = sum(1 for _ in _operand_arrays(x, body))
            return self._fusion(x._replace(arrays=x.arrays[num_operands:-1]), body)
        flops, uncounted = flops_of(x, body)
        sent = _sent(x, body)
        return Cost(
            flops=flops,
            num_bytes=_traffic(x, body),
            collective_bytes=sent,
            network_bytes=_leaving(x, sent, self._devices_per_host) if sent else 0.0,
            launches=int(_is_launch(x)),
            uncounted=uncounted,
        )

    def _fusion(self, x: Instruction, body: Mapping[str, Instruction]) -> Cost:
        # Traffic inside a fusion stays in registers.
        inner = self.computation(called(x, "calls")[0])
        traffic = _fusion_traffic(x, body, self._module.computations)
        return dataclasses.replace(inner, num_bytes=traffic, launches=1)

    def _trips(self, x: Instruction, body: Mapping[str, Instruction]) -> int | None:
        """Return the trip count of a loop whose counter stays below a constant, else None."""
        known = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', x.attributes)
        if known:
            return int(known[1])
        condition = self._module.computations[called(x, "condition")[0]]
        test, operands = self._unfused(_root(condition), condition)
        is_below = test.opcode == "compare" and "direction=LT" in test.attributes
        if not is_below or operands[1].opcode != "constant":
            return None
        limit, counter = int(operands[1].literal), _index(operands[0])
        if counter is None:
            return limit
        first = _copied(body[x.operands[0]], counter, body)
        start = int(first.literal) if first is not None and first.opcode == "constant" else 0
        return -(-(limit - start) // self._step(called(x, "body")[0], counter))

    def _step(self, loop: str, counter: int) -> int:
        """Return the increment of a loop counter, which is a tuple element; 1 if it is unknown."""
        body = self._module.computations[loop]
        following = _copied(_root(body), counter, body)
        if following is None:
            return 1
        added, operands = self._unfused(following, body)
        constants = [int(i.literal) for i in operands if i.opcode == "constant"]
        return constants[0] if added.opcode == "add" and constants else 1

    def _unfused(
        self, x: Instruction, body: Mapping[str, Instruction]
    ) -> tuple[Instruction, list[Instruction]]:
        """Return an instruction and its operands; for a fusion, the root and its operands."""
        operands = [body[name] for name in x.operands]
        if x.opcode != "fusion":
            return x, operands
        inside = self._module.computations[called(x, "calls")[0]]
        root = _root(inside)
        return root, [
            operands[int(i.literal)] if (i := inside[name]).opcode == "parameter" else i
            for name in root.operands
        ]


def _root(body: Mapping[str, Instruction]) -> Instruction:
    return next(x for x in body.values() if x.is_root)


def _index(x: Instruction) -> int | None:
    """Return the index of a get-tuple-element; None for other instructions."""
    found = re.search(r"\bindex=(\d+)", x.attributes)
    return int(found[1]) if found and x.opcode == "get-tuple-element" else None


def _copied(x: Instruction, element: int, body: Mapping[str, Instruction]) -> Instruction | None:
    """Return the instruction that `element` of a tuple copies; None if `x` is not a tuple."""
    if x.opcode != "tuple":
        return None
    found = body[x.operands[element]]
    while found.opcode in ("copy", "bitcast"):
        found = body[found.operands[0]]
    return found


def _is_launch(x: Instruction) -> bool:
    """Return whether an unfused instruction launches a kernel or a call; a prefetch does not."""
    if x.opcode == "custom-call":
        return target(x) not in FREE_CALLS
    is_prefetch = x.opcode in ("copy-start", "slice-start")
    return not is_prefetch and any(array.dims for array in x.arrays)


def _operand_arrays(x: Instruction, body: Mapping[str, Instruction]) -> Iterator[Array]:
    for name in x.operands:
        yield from body[name].arrays


def _total(arrays: Sequence[Array] | Iterator[Array]) -> float:
    return sum(array.num_bytes for array in arrays)


def _logical(array: Array) -> float:
    """Return the bytes of an array, whether it is in device memory or in fast memory."""
    return array._replace(is_on_chip=False).num_bytes


def _traffic(x: Instruction, body: Mapping[str, Instruction]) -> float:
    """Return the bytes that an instruction outside fusions reads and writes."""
    written = _total(x.arrays)
    if x.opcode == "custom-call" and target(x) in FREE_CALLS:
        return 0.0
    if x.opcode.endswith("-start"):  # The results of an asynchronous start include its operands.
        source = _total(_operand_arrays(x, body))
        read = source
        if "slice" in x.opcode and source:
            read = min(_logical(a) for a in x.arrays if a.dims)
        return read + max(0.0, written - source)
    if x.opcode in _SLICES:
        return 2 * written
    if x.opcode in _UPDATES:
        update = body[x.operands[_UPDATES[x.opcode]]].arrays
        # An update from fast memory is written to device memory too. A scatter also reads the old
        # values.
        times = 1 if x.opcode == "dynamic-update-slice" else 2
        return _total(update) + times * sum(map(_logical, update)) * bool(written)
    return written + _total(_operand_arrays(x, body))


def _fusion_traffic(
    x: Instruction, body: Mapping[str, Instruction], computations: Computations
) -> float:
    """Return the bytes that a fusion reads and writes."""
    inside = computations[called(x, "calls")[0]]
    read = 0.0
    for i in inside.values():
        if i.opcode == "parameter":
            whole = _total(body[x.operands[int(i.literal)]].arrays)
            read += _read_of(i, whole, inside, computations) if whole else 0.0

    def origin(name: str) -> Instruction:
        i = inside[name]
        return origin(i.operands[0]) if _is_view(i) else i

    root = next(i for i in inside.values() if i.is_root)
    outputs = root.operands if root.opcode == "tuple" else (root.name,)
    written = 0.0
    for name, array in zip(outputs, x.arrays, strict=False):
        made = origin(name)
        if made.opcode in _UPDATES and array.num_bytes:
            written += sum(map(_logical, inside[made.operands[_UPDATES[made.opcode]]].arrays))
        else:
            written += array.num_bytes
    return read + written


def _is_view(x: Instruction) -> bool:
    """Return whether a fused instruction only changes shape or layout of its operand.

    A nested fusion that aliases its operand changes only the tiling (8-bit types on TPU).
    """
    retiles = x.opcode == "fusion" and "output_to_operand_aliasing={{}: (0, {})}" in x.attributes
    return x.opcode in _VIEWS or retiles


def _read_of(
    x: Instruction,
    whole: float,
    inside: Mapping[str, Instruction],
    computations: Computations,
) -> float:
    """Return how many of the `whole` bytes of an operand a fused computation reads."""
    parts = 0.0
    for user in inside.values():
        for index, name in enumerate(user.operands):
            if name != x.name:
                continue
            if _is_view(user) and not user.is_root:
                parts += _read_of(user, whole, inside, computations)
            elif user.opcode in _SLICES and index == 0:
                parts += sum(map(_logical, user.arrays))
            elif user.opcode == "fusion":
                inner = computations[called(user, "calls")[0]]
                parameter = next(
                    i for i in inner.values() if i.opcode == "parameter" and int(i.literal) == index
                )
                parts += _read_of(parameter, whole, inner, computations)
            elif user.opcode not in _UPDATES or index != 0:
                return whole
    return min(whole, parts)


def _sent(x: Instruction, body: Mapping[str, Instruction]) -> float:
    """Return the bytes that a device sends in a collective with ring algorithms."""
    opcode = x.opcode.removesuffix("-start")
    if opcode not in _COLLECTIVES:
        return 0.0
    operand = sum(map(_logical, _operand_arrays(x, body)))
    if opcode in ("collective-permute", "collective-broadcast"):
        return operand
    n = len(_group(x.attributes))
    if opcode == "all-gather":
        return operand * max(0, n - 1)
    share = (n - 1) / n if n else 1.0
    return operand * share * (2 if opcode == "all-reduce" else 1)


def _leaving(x: Instruction, sent: float, devices_per_host: int) -> float:
    """Return the bytes that a device sends to other hosts in a collective."""
    if not devices_per_host:
        return 0.0
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", x.attributes)
    if pairs:
        ends = re.findall(r"(\d+),(\d+)", pairs[1])
        crosses = any(int(a) // devices_per_host != int(b) // devices_per_host for a, b in ends)
        return sent if crosses else 0.0
    hosts = [i // devices_per_host for i in _group(x.attributes)]
    return sent / hosts.count(hosts[0]) if len(set(hosts)) > 1 else 0.0


def _group(attributes: str) -> list[int]:
    """Return the positions of the first group of devices; empty if the text names no groups."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        grid = np.arange(int(iota[1]) * int(iota[2])).reshape(_integers(iota[3]))
        return (
            grid.transpose(_integers(iota[4]) if iota[4] else None)
            .reshape(-1)[: int(iota[2])]
            .tolist()
        )
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if mesh:
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        taking_part = re.findall(r"'(\w+)'", mesh[2])
        grid = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
        index = tuple(slice(None) if name in taking_part else 0 for name in axes)
        return grid[index].reshape(-1).tolist()
    first = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return _integers(first[1]) if first else []


def _integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
