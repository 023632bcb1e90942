# SPDX-License-Identifier: Apache-2.0
"""Command: time and memory of fused log-probs and their gradients, compared with the naive form.

    python -m tba_jax.bench.logprob --d=2048 --vocab_size=152064 --tokens=2048 --json

Naive form: all logits [n v] in float32, their log-softmax, the gradient by autodiff, on flat rows
(its cheapest layout). `memory_ratio` compares the compiler's figures for temporaries; arguments and
results (the table and its gradient) are equal on both sides. `time_ratio` compares medians of
interleaved repeats, `min_time_ratio` their minima; on a busy machine prefer the minima.
--topology=v5e:2x2 adds the memory of both sides compiled for a TPU that is not attached (needs
libtpu).

The naive form has three matrix products. The fused form has four, because it recomputes its logits
unless they fit in --kept_bytes. `roofline_s` is their time at the measured matmul rate, without
memory traffic.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Float32, Int

from tba_jax.bench import reporting
from tba_jax.devices.platform import platform_of
from tba_jax.models.fused_logprobs import fused_logprobs, vocab_block_on
from tba_jax.models.scoring import KEPT_BYTES
from tba_jax.planning import roofline

_MIB = 2**20
_TEMPERATURE = 0.7
# With this setting libtpu does not search for a TPU and takes none from another process.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = reporting.make_parser("logprob", __doc__)
    parser.add_argument("--d", type=int, default=2048, help="width of hidden states")
    parser.add_argument("--vocab_size", type=int, default=152_064)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--vocab_block",
        type=int,
        default=0,
        help="table rows per block; 0: the default of the platform",
    )
    parser.add_argument(
        "--kept_bytes",
        type=int,
        default=KEPT_BYTES,
        help="fused form: maximum bytes of kept logits",
    )
    parser.add_argument(
        "--chunk_tokens", type=int, default=8192, help="fused form: tokens per chunk"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--topology", default="", help="also compile for this TPU slice, such as v5e:2x2"
    )
    return reporting.run_command(
        parser, argv, measure, lambda result: (f"{k:>18}  {v}" for k, v in result.items())
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures by name.

    Raises:
        ValueError: an option is out of range, libtpu is missing, or libtpu has no such topology.
    """
    names = ("d", "vocab_size", "tokens", "chunk_tokens", "repeats")
    reporting.check_least(args, dict.fromkeys(names, 1) | {"vocab_block": 0})
    # This check comes first, because it fails fastest.
    result_of_tpu = {}
    if args.topology:
        memory = temporary_bytes(args, SingleDeviceSharding(tpu_device(args.topology)))
        result_of_tpu = {
            "topology": args.topology,
            "tpu_memory_ratio": _ratio(memory),
            "tpu_temporary_mib": {name: size / _MIB for name, size in memory.items()},
        }
    sides = compile_sides(args, SingleDeviceSharding(jax.devices()[0]))
    memory = {name: _temporary_bytes(side) for name, side in sides.items()}
    inputs = _inputs(args)
    outputs = {name: jax.block_until_ready(side(*inputs)) for name, side in sides.items()}
    differences = [
        float(jnp.max(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32))))
        for x, y in zip(outputs["naive"], outputs["fused"], strict=True)
    ]
    del outputs
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(side(*inputs))
            times[name].append(time.perf_counter() - start)
    rate = roofline.measure_rates(args.dtype, inputs[1].nbytes).flops_per_s
    product = 2 * args.tokens * args.d * args.vocab_size
    medians = {name: statistics.median(x) for name, x in times.items()}
    keeps_logits = 4 * args.tokens * args.vocab_size <= args.kept_bytes
    products = {"naive": 3, "fused": 3 if keeps_logits else 4}
    bounds = {name: products[name] * product / rate for name in sides}
    return {
        "vocab_size": args.vocab_size,
        "d": args.d,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "keeps_logits": keeps_logits,
        "memory_ratio": _ratio(memory),
        "time_ratio": medians["fused"] / medians["naive"],
        "min_time_ratio": min(times["fused"]) / min(times["naive"]),
        "temporary_mib": {name: size / _MIB for name, size in memory.items()},
        "median_s": medians,
        "min_s": {name: min(x) for name, x in times.items()},
        "repeats": args.repeats,
        "flops_per_s": rate,
        "roofline_s": bounds,
        "roofline_share": {name: bounds[name] / medians[name] for name in sides},
        "max_difference": dict(
            zip(("logprobs", "hidden_gradient", "table_gradient"), differences, strict=True)
        ),
        **result_of_tpu,
        "device": jax.devices()[0].device_kind,
        "cpu": platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "jax": jax.__version__,
    }


def compile_sides(
    args: argparse.Namespace, where: jax.sharding.Sharding
) -> dict[str, jax.stages.Compiled]:
    """Return the compiled naive and fused programs.

    Each is a function (hidden, table, targets, cotangent) -> (log-probs, two gradients).
    """
    device = next(iter(where.device_set))
    vocab_block = args.vocab_block or vocab_block_on(platform_of(device))

    def fused(
        hidden: Float[Array, "n d"], table: Float[Array, "v d"], targets: Int[Array, " n"]
    ) -> Float32[Array, " n"]:
        return fused_logprobs(
            hidden[None],
            table,
            targets[None],
            temperature=_TEMPERATURE,
            chunk_tokens=args.chunk_tokens,
            vocab_block=vocab_block,
            kept_bytes=args.kept_bytes,
        )[0]

    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        for x in jax.eval_shape(lambda: _inputs(args))
    ]
    return {
        name: jax.jit(_with_gradients(side)).lower(*shapes).compile()
        for name, side in (("naive", _naive), ("fused", fused))
    }


def temporary_bytes(args: argparse.Namespace, where: jax.sharding.Sharding) -> dict[str, int]:
    """Return side -> bytes of temporary memory, as reported by the compiler."""
    return {name: _temporary_bytes(side) for name, side in compile_sides(args, where).items()}


def tpu_device(topology: str) -> Any:
    """Return a device that is not attached, to compile for.

    Raises:
        ValueError: libtpu is missing or has no such topology.
    """
    for name, value in _NO_TPU.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--topology={topology}: {reason}; wanted one such as v5e:2x2, and libtpu installed "
            "(pip install libtpu)"
        ) from error


def _naive(
    hidden: Float[Array, "n d"], table: Float[Array, "v d"], targets: Int[Array, " n"]
) -> Float32[Array, " n"]:
    logits = jnp.einsum("nd,vd->nv", hidden, table, preferred_element_type=jnp.float32)
    logits = logits / _TEMPERATURE
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _with_gradients(side: Callable[..., Array]) -> Callable[..., tuple[Array, Array, Array]]:
    def run(
        hidden: Array, table: Array, targets: Array, cotangent: Array
    ) -> tuple[Array, Array, Array]:
        logprobs, pull = jax.vjp(lambda h, w: side(h, w, targets), hidden, table)
        return logprobs, *pull(cotangent)

    return run


def _temporary_bytes(side: jax.stages.Compiled) -> int:
    memory = side.memory_analysis()
    assert memory is not None, "this backend does not report its memory"
    return memory.temp_size_in_bytes


def _ratio(memory: dict[str, int]) -> float | None:
    """Return naive over fused memory; None if a TPU keeps the naive logits in on-chip memory."""
    return memory["fused"] / memory["naive"] if memory["naive"] else None


def _inputs(args: argparse.Namespace) -> tuple[Array, Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    n, d, v = args.tokens, args.d, args.vocab_size
    # Logits with a standard deviation of three: neither uniform nor one-hot.
    table = jax.random.normal(keys[1], (v, d), args.dtype) * (3 * _TEMPERATURE / d**0.5)
    return (
        jax.random.normal(keys[0], (n, d), args.dtype),
        table.astype(args.dtype),
        jax.random.randint(keys[2], (n,), 0, v),
        jax.random.normal(keys[3], (n,)),
    )


if __name__ == "__main__":
    sys.exit(main())
