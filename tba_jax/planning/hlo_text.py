# SPDX-License-Identifier: Apache-2.0
"""Parser of the text of an optimised HLO module: computations, instructions, shapes, attributes.

Invariant: the parsed fields are the same for every dialect of XLA's backends (JSON with and without
blanks).
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
FREE_CALLS = frozenset(
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
        "ZeroCrop",
    )
)
"""Calls that neither move nor compute data: markers of compilers, and host-side bookkeeping."""
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")


class Array(NamedTuple):
    """Shape and dtype; `is_on_chip` marks arrays in fast memory (VMEM of a TPU)."""

    dtype: str
    dims: tuple[int, ...]
    is_on_chip: bool

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> float:
        """Return the bytes in device memory; 0 for an array in fast memory."""
        bits = _BITS.get(self.dtype, 8)  # other dtypes are float8
        return 0.0 if self.is_on_chip else self.num_elements * bits / 8


class Instruction(NamedTuple):
    """One instruction: `arrays` are its results, `operands` are names of instructions."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    literal: str  # text between the parentheses; the value of a constant


Computations = Mapping[str, Mapping[str, Instruction]]
"""Name of a computation -> name of an instruction -> the instruction."""


class Module(NamedTuple):
    """All computations of a module, and the name of the entry computation."""

    entry: str | None
    computations: Computations


def target(x: Instruction) -> str:
    """Return the target of a custom call."""
    found = re.search(r'custom_call_target="([^"]*)"', x.attributes)
    return found[1] if found else "custom-call"


def called(x: Instruction, *keys: str) -> list[str]:
    """Return the computations in attributes such as `calls=%a`, `branch_computations={%a, %b}`."""
    names = []
    for key in keys:
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", x.attributes)
        if found:
            names += [name.strip().lstrip("%") for name in found[1].strip("{}").split(",")]
    return names


def numbers(x: Instruction, key: str) -> list[int]:
    """Return the integers of an attribute such as `dimensions={0,1}`."""
    found = re.search(rf"\b{key}=\{{([\d,]*)\}}", x.attributes)
    return [int(n) for n in found[1].split(",") if n] if found else []


def braces(text: str, key: str) -> str:
    """Return the text after a key, up to its closing brace."""
    start = text.find(key)
    return "" if start < 0 else text[start + len(key) : text.index("}", start)]


def parse(text: str) -> Module:
    """Return the module of `jax.stages.Compiled.as_text()`."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = None, None
    for line in _whole_lines(text):
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
    return Module(entry, computations)


def _whole_lines(text: str) -> Iterator[str]:
    """Yield one line for each instruction: the metadata of a Pallas kernel spans several lines."""
    begun = ""
    for line in text.splitlines():
        if begun or line.endswith("={"):
            begun += line
            if not line.startswith("}"):
                continue
            line, begun = begun, ""
        yield line


def _parse_instruction(line: str) -> Instruction:
    is_root = line.startswith("ROOT ")
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _matching(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    at = rest.index("(")
    close = _matching(rest, at)
    inner = rest[at + 1 : close]
    return Instruction(
        name=name.lstrip("%"),
        arrays=tuple(
            Array(
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
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    raise ValueError(f"unbalanced parentheses in HLO text: {text[:120]!r}")
