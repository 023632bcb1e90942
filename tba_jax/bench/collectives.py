# SPDX-License-Identifier: Apache-2.0
"""Bytes that the devices of a mesh exchange in one train step, from the compiled program.

    python -m tba_jax.bench.collectives [--chips=8,64,256] [--kind=v5e] [--fsdp=8] [--json]

Weak scaling: the batch grows with the mesh, so that every device keeps the same rows. The train
step of a run is compiled for TPUs that need not be there (libtpu), and the collectives of the
compiled text are added up, those inside a loop as often as it runs. Beside them stands the model
they should follow. Nothing is executed, and no time is claimed.

The model, per device: with P bytes of parameters that are divided, in the compute dtype, and a mesh
of `data` x `fsdp` devices, every weight of a layer is gathered twice (forward, and again in the
backward pass, where layers are recomputed), the tables at both ends, T bytes of P, once; gradients
are scattered once, and summed over `data`:

    bytes = (2 P - T + P) (fsdp - 1) / fsdp  +  2 (P / fsdp) (data - 1) / data

A ring moves these bytes; a collective over n devices with r bytes of result moves r (n - 1) / n
for a gather, the same of its operand for a scatter, and twice that for an all-reduce.
"""

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

TOPOLOGIES = {
    "v5e": {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v5p": {8: "2x2x2", 16: "2x2x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"},
}
"""Slices by number of chips."""


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
        kind: all-gather, reduce-scatter, all-reduce, all-to-all or collective-permute.
        result_bytes: of its result on one device.
        group: devices that take part.
        times: how often it runs in a step.
    """

    kind: str
    result_bytes: int
    group: int
    times: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends for it in a ring, over all its runs."""
        share = (self.group - 1) / self.group
        factor = {
            "all-gather": share,
            "all-reduce": 2 * share,
            "reduce-scatter": self.group - 1,  # of the result, which is one part of the operand
            "all-to-all": share,
            "collective-permute": 1.0,
        }[self.kind]
        return factor * self.result_bytes * self.times


class Case(NamedTuple):
    """What is compiled: a mesh and the shapes of a model and a batch."""

    kind: str = "v5e"
    data: int = 1
    fsdp: int = 8
    num_layers: int = 4
    hidden_size: int = 512
    mlp_size: int = 1408
    vocab_size: int = 8192
    group_size: int = 4
    prompt_tokens: int = 128
    response_tokens: int = 128


def parse(text: str) -> list[Collective]:
    """The collectives of a compiled program, in the text of `Compiled.as_text()`.

    Those in the body of a loop run as often as the loop does: the number is the largest constant of
    the loop's condition, as XLA writes loops that count from 0. A collective that TPU programs
    overlap with several products is written down once with each, on one channel; it counts once.
    """
    computations = _computations(text)
    found: list[Collective] = []
    seen: set[tuple[str, str]] = set()
    entry = next(name for name, (is_entry, _) in computations.items() if is_entry)

    def visit(name: str, times: int) -> None:
        for line in computations[name][1]:
            instruction = _INSTRUCTION.search(line)
            if instruction:
                x = _collective(line, instruction, name, times)
                channel = re.search(r"channel_id=(\d+)", line)
                if channel is None or (x.kind, channel[1]) not in seen:
                    found.append(x)
                seen.add((x.kind, channel[1] if channel else ""))
            loop = re.search(r"condition=%([\w.\-]+), body=%([\w.\-]+)", line)
            if loop:
                visit(loop[2], times * _trip_count(computations, loop[1]))
                continue
            for called in re.findall(r"calls=%([\w.\-]+)", line):
                visit(called, times)

    visit(entry, 1)
    return found


_KINDS = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
_INSTRUCTION = re.compile(rf" = (\(.*?\)|\S+) ({_KINDS})(-start)?\(")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def _computations(text: str) -> dict[str, tuple[bool, list[str]]]:
    out: dict[str, tuple[bool, list[str]]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if head:
            lines = []
            out[head[2]] = (head[1] is not None, lines)
        else:
            lines.append(line)
    return out


def _trip_count(computations: dict[str, tuple[bool, list[str]]], condition: str) -> int:
    constants = [
        int(n)
        for line in computations[condition][1]
        for n in re.findall(r"[su]32\[\]\S* constant\((\d+)\)", line)
    ]
    if not constants:
        raise ValueError(f"the condition {condition} of a loop has no constant to count to")
    return max(constants)


def _collective(line: str, found: re.Match[str], computation: str, times: int) -> Collective:
    sizes = [
        _SIZES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", found[1])
    ]
    kind, group = found[2], _group_size(line)
    # An asynchronous start returns its operands too, and an all-reduce may sum several arrays.
    result = max(sizes) if found[3] else sum(sizes)
    if computation.startswith("all-reduce-scatter"):  # how TPU programs write a reduce-scatter
        kind, result = "reduce-scatter", result // group
    return Collective(kind, result, group, times)


def _group_size(line: str) -> int:
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", named[2]))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if counted:
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if listed:
        return len(listed[1].split(","))
    return 2  # a permutation: one sender and one receiver


def model_bytes(case: Case) -> float:
    """Bytes that each device sends in a step, as the module's docstring derives them."""
    d, f, n = case.hidden_size, case.fsdp, case.data
    layer = 4 * d * d + 3 * d * case.mlp_size
    weights = 2 * (case.num_layers * layer + 2 * case.vocab_size * d)  # bfloat16
    # The tables at the ends are gathered once: the backward pass finds them in memory.
    tables = 2 * 2 * case.vocab_size * d
    gathered = 2 * weights - tables
    return (gathered + weights) * (f - 1) / f + 2 * weights / f * (n - 1) / n


def compiled_step(case: Case) -> Any:
    """The train step of a run, compiled for a slice that need not be there."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from tba_jax.devices.sharding import MESH_AXES, placed_shapes
    from tba_jax.flow.batch import Batch
    from tba_jax.models import transformer
    from tba_jax.models.scoring import Scoring
    from tba_jax.train.objectives.tb import TrajectoryBalance
    from tba_jax.train.schedules import Schedule
    from tba_jax.train.state import init_state, step_shardings
    from tba_jax.train.step import make_train_step
    from tba_jax.train.step_settings import StepSettings
    from tba_jax.train.target import Target

    config = transformer.TransformerConfig(
        vocab_size=case.vocab_size,
        hidden_size=case.hidden_size,
        num_layers=case.num_layers,
        num_heads=case.hidden_size // 128,
        num_kv_heads=case.hidden_size // 128,
        head_dim=128,
        mlp_size=case.mlp_size,
        max_positions=4096,
        tie_embeddings=False,
    )
    num = case.data * case.fsdp
    name = f"{case.kind}:{TOPOLOGIES[case.kind][num]}"
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    mesh = Mesh(np.array(devices).reshape(case.data, case.fsdp, 1), MESH_AXES)
    schedule = optax.constant_schedule(1e-5)
    optimizer = optax.adamw(schedule)
    settings = StepSettings(
        TrajectoryBalance(),
        Target(Schedule(0.05)),
        Scoring(
            chunk_tokens=num * case.group_size * case.response_tokens, compute_dtype="bfloat16"
        ),
        remat="layers",
    )
    params = transformer.abstract_params(config)
    state = jax.eval_shape(
        functools.partial(init_state, optimizer=optimizer, keep_reference=False), params
    )
    p, k, t = num, case.group_size, case.response_tokens

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    batch = Batch(
        tokens=array(p * k, case.prompt_tokens + t),
        slots=array(p * k, 1),
        behavior_token_logprobs=array(p * k, 1, t, dtype=jnp.float32),
        prompt_lengths=array(p, k),
        response_lengths=array(p, k),
        rewards=array(p, k, dtype=jnp.float32),
        reference_logprob=array(p, k, dtype=jnp.float32),
        versions=array(p, k),
        weights=array(p, k, dtype=jnp.float32),
    )
    shardings = step_shardings(config, optimizer, mesh, keep_reference=False)
    batch = placed_shapes(batch, shardings.of_batch(batch))
    step: Any = make_train_step(config, optimizer, schedule, settings, shardings)
    # Whole products: cut into windows, a gather becomes permutations in a loop, of as many bytes.
    whole = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
    return step.lower(state, batch).compile(compiler_options=whole)


def measure(case: Case) -> dict[str, Any]:
    """Bytes that each device sends in a step, by kind of collective, and what the model says."""
    by_kind: dict[str, float] = {}
    for x in parse(compiled_step(case).as_text()):
        by_kind[x.kind] = by_kind.get(x.kind, 0.0) + x.sent_bytes
    return {
        "chips": case.data * case.fsdp,
        "mesh": f"{case.data} x {case.fsdp} x 1",
        "sent_mib": sum(by_kind.values()) / 2**20,
        "model_mib": model_bytes(case) / 2**20,
        "by_kind_mib": {kind: value / 2**20 for kind, value in sorted(by_kind.items())},
    }


def _measure_apart(case: Case) -> dict[str, Any]:
    """`measure` in a process of its own: the compiler ends the process on what it dislikes."""
    command = [sys.executable, "-m", "tba_jax.bench.collectives", "--case", json.dumps(case)]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, env=environment, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["(no message)"])[-1]
        raise RuntimeError(f"compiling for {case.data * case.fsdp} chips failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.bench.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--chips", default="8,64,256", help="slice sizes, separated by commas")
    parser.add_argument("--kind", default="v5e", choices=sorted(TOPOLOGIES))
    parser.add_argument("--fsdp", type=int, default=8, help="mesh.fsdp; the rest is mesh.data")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        print(json.dumps(measure(Case(*json.loads(args.case)))))
        return 0
    sizes = [int(n) for n in args.chips.split(",")]
    rows = []
    print("| chips | mesh | sent per device, MiB | model, MiB | ratio | by kind, MiB |")
    print("|---|---|---|---|---|---|")
    for num in sizes:
        if num not in TOPOLOGIES[args.kind] or num % args.fsdp:
            known = [n for n in TOPOLOGIES[args.kind] if n % args.fsdp == 0]
            print(f"error: --chips={num}: want some of {known}", file=sys.stderr)
            return 2
        row = _measure_apart(Case(kind=args.kind, data=num // args.fsdp, fsdp=args.fsdp))
        rows.append(row)
        kinds = ", ".join(f"{k} {v:.1f}" for k, v in row["by_kind_mib"].items())
        ratio = row["sent_mib"] / row["model_mib"]
        print(
            f"| {row['chips']} | {row['mesh']} | {row['sent_mib']:.1f} | {row['model_mib']:.1f} "
            f"| {ratio:.2f} | {kinds} |",
            flush=True,
        )
    if args.json:
        print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
