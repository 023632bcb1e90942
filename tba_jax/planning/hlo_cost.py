# SPDX-License-Identifier: Apache-2.0
"""What one execution of a compiled program costs a device, read from its optimised HLO text.

XLA's own `cost_analysis` counts the body of a loop once, whatever its number of trips: a model
scanned over 28 layers looks like one of a single layer. Here every computation is costed by itself
and a loop's body and condition are multiplied by its trips. These are, in this order: XLA's
`known_trip_count`; the constant that the condition compares the counter with (how JAX lowers scan
and fori_loop, counted from 0 by 1); what the caller says, for loops whose end depends on data. The
larger branch of a conditional counts.

FLOPs are those of matrix products (dot and convolution, two per multiply-add), as in every MFU.
Bytes are what instructions read and write in device memory; a fusion is one instruction, a slice
costs its result and an update in place costs the update. On TPU, buffers in VMEM cost nothing.
Custom calls without a cost estimate are named in `uncounted`. The text is that of one device of a
partitioned program, so all figures are per device. The invariant it owns: nothing is counted twice,
and what is not counted is named.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
# Name their operands, or make nothing in memory.
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
# Markers of the TPU compiler, and host-side bookkeeping.
_FREE_CALLS = frozenset(
    (
        "AllocateBuffer",
        "AsyncCollectiveDone",
        "AsyncCollectiveStart",
        "AssumeGatherIndicesInBound",
        "ConcatBitcast",
        "GatherScatterIndicesBitpacked",
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
    )
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one device, for one execution.

    Attributes:
        flops: of matrix products.
        num_bytes: read and written in device memory.
        collective_bytes: sent to other devices, by rings: an all-gather of n devices sends
            (n - 1) / n of its result, a reduce-scatter of its operand, an all-reduce twice that.
        unknown_loops: loops whose trips the caller's number stands for.
        uncounted: targets of custom calls whose FLOPs are unknown, sorted.
    """

    flops: float = 0.0
    num_bytes: float = 0.0
    collective_bytes: float = 0.0
    unknown_loops: int = 0
    uncounted: tuple[str, ...] = ()

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.num_bytes + other.num_bytes,
            self.collective_bytes + other.collective_bytes,
            self.unknown_loops + other.unknown_loops,
            tuple(sorted({*self.uncounted, *other.uncounted})),
        )

    def times(self, trips: int) -> "Cost":
        """Of so many executions; loops and names are counted once."""
        return dataclasses.replace(
            self,
            flops=self.flops * trips,
            num_bytes=self.num_bytes * trips,
            collective_bytes=self.collective_bytes * trips,
        )


def program_cost(hlo_text: str, *, unknown_trips: int = 1) -> Cost:
    """Cost of the entry computation.

    Args:
        hlo_text: `jax.stages.Compiled.as_text()`.
        unknown_trips: trips of a loop that ends when its data says so.

    Raises:
        ValueError: the text has no entry computation.
    """
    module = _parse(hlo_text)
    if module.entry is None:
        raise ValueError("this is not the text of an HLO module: it has no ENTRY computation")
    return _Counter(module, unknown_trips).computation(module.entry)


class _Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]
    is_on_chip: bool

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> float:
        bits = _BITS.get(self.dtype, 8)  # float8 and its kin
        return 0.0 if self.is_on_chip else self.num_elements * bits / 8


class _Instruction(NamedTuple):
    name: str
    arrays: tuple[_Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    literal: str  # between the parentheses: of a constant, its value


_Computations = Mapping[str, Mapping[str, _Instruction]]


class _Module(NamedTuple):
    entry: str | None
    computations: _Computations


class _Counter:
    def __init__(self, module: _Module, unknown_trips: int) -> None:
        self._module = module
        self._unknown_trips = unknown_trips
        self.computation = functools.cache(self._computation)

    def _computation(self, name: str) -> Cost:
        body = self._module.computations[name]
        return sum((self._instruction(x, body) for x in body.values()), Cost())

    def _instruction(self, x: _Instruction, body: Mapping[str, _Instruction]) -> Cost:
        opcode = x.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return Cost()
        if opcode == "while":
            condition, loop = _called(x, "condition"), _called(x, "body")
            trips = self._trips(x, condition[0])
            once = self.computation(loop[0]) + self.computation(condition[0])
            if trips is None:
                return once.times(self._unknown_trips) + Cost(unknown_loops=1)
            return once.times(trips)
        if opcode == "conditional":
            names = _called(x, "branch_computations", "true_computation", "false_computation")
            return max((self.computation(n) for n in names), key=lambda c: (c.flops, c.num_bytes))
        if opcode == "call" or (opcode == "async-start" and _called(x, "calls")):
            return sum((self.computation(n) for n in _called(x, "to_apply", "calls")), Cost())
        if opcode == "fusion":
            return self._fusion(x, body)
        flops, uncounted = _flops(x, body)
        return Cost(
            flops=flops,
            num_bytes=_traffic(x, body),
            collective_bytes=_sent(x, body),
            uncounted=uncounted,
        )

    def _fusion(self, x: _Instruction, body: Mapping[str, _Instruction]) -> Cost:
        inner = self.computation(_called(x, "calls")[0])  # its traffic stays in registers
        traffic = _fusion_traffic(x, body, self._module.computations)
        return dataclasses.replace(inner, num_bytes=traffic)

    def _trips(self, x: _Instruction, condition: str) -> int | None:
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', x.attributes)
        return int(known[1]) if known else self._compared_with(condition)

    def _compared_with(self, condition: str) -> int | None:
        """The constant that a loop's counter has to stay below, where that is the condition."""
        body = self._module.computations[condition]
        root = next(i for i in body.values() if i.is_root)
        operands = [body[name] for name in root.operands]
        if root.opcode == "fusion":  # of a comparison whose constant may be outside
            inside = self._module.computations[_called(root, "calls")[0]]
            root = next(i for i in inside.values() if i.is_root)
            operands = [
                operands[int(i.literal)] if (i := inside[name]).opcode == "parameter" else i
                for name in root.operands
            ]
        is_below = root.opcode == "compare" and "direction=LT" in root.attributes
        if not is_below or operands[1].opcode != "constant":
            return None
        return int(operands[1].literal)


def _operand_arrays(x: _Instruction, body: Mapping[str, _Instruction]) -> Iterator[_Array]:
    for name in x.operands:
        yield from body[name].arrays


def _total(arrays: Sequence[_Array] | Iterator[_Array]) -> float:
    return sum(array.num_bytes for array in arrays)


def _logical(array: _Array) -> float:
    """Bytes of an array wherever it lies."""
    return array._replace(is_on_chip=False).num_bytes


def _traffic(x: _Instruction, body: Mapping[str, _Instruction]) -> float:
    """Bytes that an instruction outside fusions reads and writes."""
    written = _total(x.arrays)
    if x.opcode == "custom-call" and _target(x) in _FREE_CALLS:
        return 0.0
    if x.opcode.endswith("-start"):  # its results list the operands beside the destination
        source = _total(_operand_arrays(x, body))
        read = source
        if "slice" in x.opcode and source:
            read = min(_logical(a) for a in x.arrays if a.dims)
        return read + max(0.0, written - source)
    if x.opcode in _SLICES:
        return 2 * written
    if x.opcode == "dynamic-update-slice":
        return 2 * _total(body[x.operands[1]].arrays)
    if x.opcode == "scatter":
        return 3 * _total(body[x.operands[-1]].arrays)
    return written + _total(_operand_arrays(x, body))


def _fusion_traffic(
    x: _Instruction, body: Mapping[str, _Instruction], computations: _Computations
) -> float:
    """Bytes that cross the boundary of a fusion."""
    inside = computations[_called(x, "calls")[0]]
    read = 0.0
    for i in inside.values():
        if i.opcode == "parameter":
            whole = _total(body[x.operands[int(i.literal)]].arrays)
            read += _read_of(i, whole, inside, computations) if whole else 0.0

    def origin(name: str) -> _Instruction:
        i = inside[name]
        return origin(i.operands[0]) if i.opcode in _VIEWS else i

    root = next(i for i in inside.values() if i.is_root)
    outputs = root.operands if root.opcode == "tuple" else (root.name,)
    written = 0.0
    for name, array in zip(outputs, x.arrays, strict=False):
        made = origin(name)
        if made.opcode == "dynamic-update-slice" and array.num_bytes:
            written += sum(map(_logical, inside[made.operands[1]].arrays))
        else:
            written += array.num_bytes
    return read + written


def _read_of(
    x: _Instruction,
    whole: float,
    inside: Mapping[str, _Instruction],
    computations: _Computations,
) -> float:
    """Bytes of a value of `whole` bytes that a fused computation reads: slices, or all of it."""
    parts = 0.0
    for user in inside.values():
        for index, name in enumerate(user.operands):
            if name != x.name:
                continue
            if user.opcode in _VIEWS and not user.is_root:
                parts += _read_of(user, whole, inside, computations)
            elif user.opcode in _SLICES and index == 0:
                parts += sum(map(_logical, user.arrays))
            elif user.opcode == "fusion":
                inner = computations[_called(user, "calls")[0]]
                parameter = next(
                    i for i in inner.values() if i.opcode == "parameter" and int(i.literal) == index
                )
                parts += _read_of(parameter, whole, inner, computations)
            elif user.opcode != "dynamic-update-slice" or index != 0:
                return whole
    return min(whole, parts)


def _flops(x: _Instruction, body: Mapping[str, _Instruction]) -> tuple[float, tuple[str, ...]]:
    """(FLOPs, names of what could not be counted)."""
    if x.opcode == "dot":
        lhs = body[x.operands[0]].arrays[0]
        contracted = math.prod(lhs.dims[i] for i in _numbers(x, "lhs_contracting_dims"))
        return 2.0 * x.arrays[0].num_elements * contracted, ()
    if x.opcode == "convolution":
        return _convolution_flops(x, body), ()
    if x.opcode == "custom-call":
        target = _target(x)
        if target in _FREE_CALLS:
            return 0.0, ()
        estimate = re.search(r'"cost_estimate":\{"flops":"?(\d+)', x.attributes)
        if estimate:
            return float(estimate[1]), ()
        contracting = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', x.attributes)
        if contracting:  # a product by cuBLAS
            lhs = body[x.operands[0]].arrays[0]
            axes = [int(n) for n in re.findall(r"\d+", contracting[1])]
            return 2.0 * x.arrays[0].num_elements * math.prod(lhs.dims[i] for i in axes), ()
        return 0.0, (target,)
    return 0.0, ()


def _convolution_flops(x: _Instruction, body: Mapping[str, _Instruction]) -> float:
    """TPU writes every product as a convolution; batch axes are dilated or padded windows."""
    lhs, rhs = (body[name].arrays[0] for name in x.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    assert labels is not None, x
    left, right, out = labels[1], labels[2], labels[3]
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", _braces(x.attributes, "window=")))
    spatial = sorted(label for label in out if label.isdigit())

    def per_axis(key: str, default: str) -> list[str]:
        return window[key].split("x") if key in window else [default] * len(spatial)

    positions = 1
    for n, size, stride, pad, left_dilation, right_dilation in zip(
        spatial,
        per_axis("size", "1"),
        per_axis("stride", "1"),
        per_axis("pad", "0_0"),
        per_axis("lhs_dilate", "1"),
        per_axis("rhs_dilate", "1"),
        strict=True,
    ):
        low, hole = int(pad.split("_")[0]), int(left_dilation)
        at_out = np.arange(x.arrays[0].dims[out.index(n)])[:, None] * int(stride)
        at = at_out + np.arange(int(size)) * int(right_dilation) - low
        last = (lhs.dims[left.index(n)] - 1) * hole
        positions *= int(np.sum((at >= 0) & (at <= last) & (at % hole == 0)))
    batch_groups = re.search(r"batch_group_count=(\d+)", x.attributes)
    batch = lhs.dims[left.index("b")] // (int(batch_groups[1]) if batch_groups else 1)
    # The kernel's input features are already those of one feature group.
    return 2.0 * batch * rhs.dims[right.index("i")] * rhs.dims[right.index("o")] * positions


def _sent(x: _Instruction, body: Mapping[str, _Instruction]) -> float:
    """Bytes that a device sends in a collective, over rings."""
    opcode = x.opcode.removesuffix("-start")
    if opcode not in _COLLECTIVES:
        return 0.0
    operand = sum(map(_logical, _operand_arrays(x, body)))
    if opcode in ("collective-permute", "collective-broadcast"):
        return operand
    n = _group_size(x.attributes)
    if opcode == "all-gather":
        return operand * max(0, n - 1)
    share = (n - 1) / n if n else 1.0
    return operand * share * (2 if opcode == "all-reduce" else 1)


def _group_size(attributes: str) -> int:
    """Devices that take part together; 0 where the text does not say."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes)
    if iota:
        return int(iota[2])
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if mesh:
        axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", mesh[2]))
    first = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(first[1].split(",")) if first else 0


def _target(x: _Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', x.attributes)
    return found[1] if found else "custom-call"


def _called(x: _Instruction, *keys: str) -> list[str]:
    """Computations that attributes name, as `calls=%a` or `branch_computations={%a, %b}`."""
    names = []
    for key in keys:
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", x.attributes)
        if found:
            names += [name.strip().lstrip("%") for name in found[1].strip("{}").split(",")]
    return names


def _numbers(x: _Instruction, key: str) -> list[int]:
    found = re.search(rf"\b{key}=\{{([\d,]*)\}}", x.attributes)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _braces(text: str, key: str) -> str:
    start = text.find(key)
    return "" if start < 0 else text[start + len(key) : text.index("}", start)]


def _parse(text: str) -> _Module:
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY ")) and line.rstrip().endswith("{"):
            is_entry = line.startswith("ENTRY ")
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            entry = name if is_entry else entry
            current = computations.setdefault(name, {})
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            instruction = _parse_instruction(line.strip())
            current[instruction.name] = instruction
    return _Module(entry, computations)


def _parse_instruction(line: str) -> _Instruction:
    is_root = line.startswith("ROOT ")
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _matching(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    at = rest.index("(")
    close = _matching(rest, at)
    inner = rest[at + 1 : close]
    return _Instruction(
        name=name.lstrip("%"),
        arrays=tuple(
            _Array(
                dtype,
                tuple(int(n) for n in dims.split(",") if n),
                re.search(r"S\([1-9]", layout) is not None,
            )
            for dtype, dims, layout in _ARRAY.findall(kind)
        ),
        opcode=rest[:at],
        operands=tuple(re.findall(r"%([\w.\-]+)", inner)),
        attributes=rest[close + 1 :],
        is_root=is_root,
        literal=inner,
    )


def _matching(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    raise ValueError(f"unbalanced parentheses in HLO text: {text[:120]!r}")
