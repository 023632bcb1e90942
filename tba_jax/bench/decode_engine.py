# SPDX-License-Identifier: Apache-2.0
"""Process of `tba_jax.bench.decode` that measures the engine once.

python -m tba_jax.bench.decode_engine JOB.json
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.bench.processes import run_job, versions
from tba_jax.decoding.engine import Decoder, row_keys
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.session import Session
from tba_jax.devices.platform import platform_of
from tba_jax.devices.site import any_device
from tba_jax.models import transformer
from tba_jax.models.transformer import Params, TransformerConfig
from tba_jax.planning import roofline

_39M = TransformerConfig(
    vocab_size=32_000,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=1408,
    family="qwen2",
    qkv_bias=True,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
)
# Qwen2 with a tied output matrix: 38,943,232 parameters; Qwen2.5-1.5B; one for tests.
SHAPES = {
    "39m": _39M,
    "1.5b": dataclasses.replace(
        _39M,
        vocab_size=151_936,
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        head_dim=128,
        mlp_size=8960,
    ),
    "tiny": dataclasses.replace(
        _39M,
        vocab_size=128,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        head_dim=8,
        mlp_size=64,
    ),
}
_MOST_WARM_UPS = 6
_MEAN_LENGTH_SHARE = 1 / 3  # mean length over the length limit


def main(argv: Sequence[str]) -> int:
    """Run one job."""
    return run_job(argv[0], measure)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the engine under one workload."""
    config = SHAPES[job["shape"]]
    params = transformer.init_params(config, jax.random.key(0), jnp.dtype(job["dtype"]))
    rng = np.random.default_rng(job["seed"])
    shape = (job["num_prompts"], job["prompt_tokens"])
    prompts = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    num_rows = len(prompts) * job["num_samples"]
    num_slots = min(job["num_slots"] or num_rows, num_rows)
    decoder = _decoder(config, job)
    weights = jax.block_until_ready(decoder.weights(params))
    del params

    def call(seed: int) -> tuple[Session, list[int]]:
        return _draw(decoder, weights, prompts, job["num_samples"], num_slots, seed)

    _warm_up(decoder, lambda run: call(job["seed"] + 1 + run))
    compiled = decoder.compile_count
    start, cpu_start = time.perf_counter(), time.process_time()
    session, lengths = call(job["seed"])
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    statistics = session.statistics
    work = roofline.decode_work(
        config,
        itemsize=jnp.dtype(job["dtype"]).itemsize,
        num_steps=statistics.steps,
        prompt_tokens=prompts.shape[1],
        response_lengths=lengths,
    )
    rates = roofline.measure_rates(job["dtype"], sum(x.nbytes for x in jax.tree.leaves(weights)))
    return {
        "tokens_per_s": sum(lengths) / wall_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "first_token_s": statistics.first_token_s,
        "prefill_s": statistics.prefill_s,
        "decode_s": statistics.chunk_s,
        "response_length": float(np.mean(lengths)),
        "slot_share": statistics.tokens / statistics.slot_steps,
        "bytes_per_step": work.num_bytes / statistics.steps,
        "flops_per_step": work.num_flops / statistics.steps,
        "bytes_per_s": rates.bytes_per_s,
        "flops_per_s": rates.flops_per_s,
        "step_s": statistics.chunk_s / statistics.steps,
        "bound_step_s": rates.bound_s(work) / statistics.steps,
        "recompiled": decoder.compile_count - compiled,
        "num_slots": num_slots,
        "num_params": transformer.num_params(config),
        "versions": versions("jax", "jaxlib", "flax"),
        "num_threads": len(os.sched_getaffinity(0)),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }


def _decoder(config: TransformerConfig, job: dict[str, Any]) -> Decoder:
    eos_ids: Sequence[int] = ()
    if job["has_eos"]:
        # Random weights prefer no token, so a share of the vocabulary ends responses as often.
        eos_ids = range(0, config.vocab_size, round(_MEAN_LENGTH_SHARE * job["max_new_tokens"]))
    return Decoder(
        config,
        compute_dtype=job["dtype"],
        eos_ids=tuple(eos_ids),
        pad_id=0,
        prompt_buckets=(job["prompt_tokens"],),
        max_length=job["prompt_tokens"] + job["max_new_tokens"],
        chunk_steps=job["chunk_steps"],
        site=any_device(platform_of(jax.local_devices()[0])),
    )


def _draw(
    decoder: Decoder,
    weights: Params,
    prompts: np.ndarray,
    num_samples: int,
    num_slots: int,
    seed: int,
) -> tuple[Session, list[int]]:
    """Submit all prompts at once; return (idle session, lengths of its responses)."""
    settings = SamplingSettings(max_new_tokens=decoder.max_length - prompts.shape[1])
    session = decoder.session(
        weights, num_slots=num_slots, prefill_prompts=-(-num_slots // num_samples)
    )
    keys = row_keys(jax.random.key(seed), len(prompts) * num_samples)
    for prompt, own in zip(prompts, keys.reshape(-1, num_samples, 2), strict=True):
        session.submit(prompt, own, settings)
    return session, [len(response.tokens) for response in session.run()]


def _warm_up(decoder: Decoder, call: Callable[[int], object]) -> int:
    """Run until two consecutive runs compile nothing; return the number of runs.

    Which programs a run compiles depends on the lengths of its responses.
    """
    quiet = 0
    for run in range(_MOST_WARM_UPS):
        compiled = decoder.compile_count
        call(run)
        quiet = quiet + 1 if decoder.compile_count == compiled else 0
        if quiet == 2:
            return run + 1
    return _MOST_WARM_UPS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
