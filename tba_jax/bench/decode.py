# SPDX-License-Identifier: Apache-2.0
"""Command: speed of the decoder, compared with the roofline of the machine.

    python -m tba_jax.bench.decode --workload=uniform --json

The model has random weights in a Qwen2 shape (--shape). Two workloads: `uniform`, 32 prompts of 64
tokens with 128 new tokens each and no EOS; `rl`, 16 samples of each of 8 prompts of 256 tokens,
which end after about a third of 256 tokens. Tokens per second count the tokens of responses up to
and including EOS, from submission to the last response on the host. Every repeat has a fresh
process and is warmed up before it is measured; figures are medians of the repeats. Use a quiet
machine: a large `cpu_s`, the processor time, shows disturbed repeats.

`roofline_share` is the time that a decode step needs at the measured memory bandwidth or matmul
rate, whichever is slower, divided by its measured time.
"""

import argparse
import functools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.bench import harness
from tba_jax.bench.harness import SHAPES, Figures
from tba_jax.commands.entry_point import make_parser
from tba_jax.decoding.engine import Decoder, Session
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.sampling import fold_in
from tba_jax.devices.platform import platform_of
from tba_jax.devices.site import any_device
from tba_jax.models import transformer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import roofline

_SIZES = ("num_prompts", "num_samples", "prompt_tokens", "max_new_tokens")
# Sizes, and whether responses may end before the length limit.
WORKLOADS: Mapping[str, Mapping[str, Any]] = {
    "uniform": dict(zip(_SIZES, (32, 1, 64, 128), strict=True)) | {"has_eos": False},
    "rl": dict(zip(_SIZES, (8, 16, 256, 256), strict=True)) | {"has_eos": True},
}
_TIMES = ("prefill_s", "decode_s", "cpu_s", "step_s", "bound_step_s")
_COLUMNS = ("tokens_per_s", *_TIMES, "response_length", "slot_share", "roofline_share")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser("bench.decode", __doc__)
    parser.add_argument("--shape", default="39m", choices=SHAPES, help="shape of the model")
    parser.add_argument("--workload", default="uniform", choices=WORKLOADS)
    # default: sizes of the workload
    harness.add_integers(parser, dict.fromkeys(_SIZES), max_new_tokens=8)
    harness.add_integers(parser, {"chunk_steps": 8, "repeats": 3})
    parser.add_argument("--num_slots", type=int, default=0, help="decode slots; 0: all responses")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    return harness.run(parser, argv, measure, columns=_COLUMNS, sides={"engine": engine})


def measure(args: argparse.Namespace, folder: Path) -> Figures:
    """Return all figures by name."""
    given = {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    workload = {**WORKLOADS[args.workload], **given}
    about = {name: getattr(args, name) for name in ("shape", "dtype", "chunk_steps")}
    job = about | workload | {"num_slots": args.num_slots, "seed": args.seed}
    side = functools.partial(harness.run_side, "engine", job, folder, harness.own_command("decode"))
    figures = harness.repeated({"engine": side}, args.repeats, "tokens_per_s")["engine"]
    workload["name"] = args.workload
    return figures | about | {"workload": workload, "repeats": args.repeats}


def make_decoder(
    config: TransformerConfig,
    dtype: str,
    prompt_tokens: int,
    max_new_tokens: int,
    device: Any,
    **options: Any,
) -> Decoder:
    """Return a decoder for prompts of equal length on a device."""
    return Decoder(
        config,
        compute_dtype=jnp.dtype(dtype),
        pad_id=0,
        prompt_tokens=prompt_tokens,
        max_length=prompt_tokens + max_new_tokens,
        site=any_device(platform_of(device)),
        **options,
    )


def engine(job: Figures) -> Figures:
    """Measure the engine once under the workload of a job; the result has times and work."""
    config = SHAPES[job["shape"]]
    params = transformer.init_params(config, jax.random.key(0), jnp.dtype(job["dtype"]))
    seed = job["seed"] + job["repeat"]  # each repeat draws other responses
    rng = np.random.default_rng(seed)
    shape = (job["num_prompts"], job["prompt_tokens"])
    prompts = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    num_rows = len(prompts) * job["num_samples"]
    num_slots = min(job["num_slots"] or num_rows, num_rows)
    # Random weights prefer no token, so a share of the vocabulary ends responses as often: after a
    # third of the length limit on average.
    every = round(job["max_new_tokens"] / 3)
    decoder = make_decoder(
        config,
        job["dtype"],
        job["prompt_tokens"],
        job["max_new_tokens"],
        jax.local_devices()[0],
        eos_ids=tuple(range(0, config.vocab_size, every)) if job["has_eos"] else (),
        chunk_steps=job["chunk_steps"],
    )
    weights = jax.block_until_ready(decoder.weights(params))
    del params

    def call(max_new_tokens: int) -> tuple[Session, list[int]]:
        """Submit all prompts at once; return (idle session, lengths of its responses)."""
        settings = SamplingSettings(max_new_tokens)
        session = decoder.session(weights, num_slots=num_slots)
        keys = fold_in(jax.random.key(seed), np.arange(num_rows)).reshape(len(prompts), -1, 2)
        for prompt, own in zip(prompts, keys, strict=True):
            session.submit(prompt, own, settings)
        return session, [len(response.tokens) for response in session.run()]

    call(job["max_new_tokens"])  # compiles every program
    start, cpu_start = time.perf_counter(), time.process_time()
    session, lengths = call(job["max_new_tokens"])
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    statistics, prefill_s = session.statistics, call(1)[0].statistics.decode_s
    decode_s = statistics.decode_s - prefill_s
    work = roofline.decode_work(
        config,
        itemsize=jnp.dtype(job["dtype"]).itemsize,
        num_steps=statistics.steps,
        prompt_tokens=prompts.shape[1],
        response_lengths=lengths,
    )
    rates = roofline.measure_rates(job["dtype"], sum(x.nbytes for x in jax.tree.leaves(weights)))
    step_s, bound_step_s = (x / statistics.steps for x in (decode_s, rates.bound_s(work)))
    return {
        "tokens_per_s": sum(lengths) / wall_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "response_length": float(np.mean(lengths)),
        "slot_share": statistics.tokens / statistics.slot_steps,
        "bytes_per_s": rates.bytes_per_s,
        "flops_per_s": rates.flops_per_s,
        "step_s": step_s,
        "bound_step_s": bound_step_s,
        "roofline_share": bound_step_s / step_s,
        "num_slots": num_slots,
        "num_params": transformer.num_params(config),
        **harness.here(),
    }


if __name__ == "__main__":
    sys.exit(main())
