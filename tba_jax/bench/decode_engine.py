# SPDX-License-Identifier: Apache-2.0
"""Our own processes of `tba_jax.bench.decode`: the checkpoint and the engine.

    python -m tba_jax.bench.decode_engine JOB.json

Invariant: a response of the checkpoint written here ends at every token with nearly the same
probability, in every context, so that every decoder draws lengths from one known distribution.
"""

import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.bench.processes import run_job, versions
from tba_jax.bench.synthetic import save_checkpoint
from tba_jax.decoding.engine import Decoder, row_keys
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.session import Session
from tba_jax.devices.platform import platform_of
from tba_jax.devices.site import any_device
from tba_jax.models import model as models
from tba_jax.models import transformer
from tba_jax.models.quantized import quantize
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
# Share of the constant dimension in the mean square of the residual stream.
_CONSTANT_SHARE = 0.9
_QUEUE_SLOTS, _QUEUE_PROMPT, _QUEUE_TOKENS = 32, 16, 32
# Short queues are measured several times, until as many responses are drawn.
_QUEUE_RESPONSES = 512


def main(argv: Sequence[str]) -> int:
    """Run one job."""
    measures = {"write": write, "engine": measure, "queue": measure_queue}
    return run_job(argv[0], lambda job: measures[job["side"]](job))


def write(job: dict[str, Any]) -> dict[str, Any]:
    """Write a checkpoint of random weights for `job["shape"]`; EOS is the last token ID."""
    config = SHAPES[job["shape"]]
    params = transformer.init_params(config, jax.random.key(0), jnp.dtype(job["dtype"]))
    params, probabilities = with_eos(params, config, job["eos_prob"], job["dtype"])
    save_checkpoint(job["model"], config, params, job["dtype"])
    return {
        "eos_prob_mean": float(probabilities.mean()),
        "eos_prob_std": float(probabilities.std()),
    }


def with_eos(
    params: Params, config: TransformerConfig, eos_prob: float, dtype: str
) -> tuple[Params, np.ndarray]:
    """Return (params with a nearly constant probability of EOS, that probability in 512 contexts).

    The logits have no bias, so dimension 0 of the residual stream is made constant: every token's
    embedding has the same value in this dimension, and no layer reads or writes it. The last row of
    the tied embedding is zero except in this dimension. Its logit is therefore constant up to the
    final norm, whose mean square is mostly the constant. The scale of that row comes from a run
    over random contexts. The other logits are random with a standard deviation of about 0.3.
    """
    d, share = config.hidden_size, _CONSTANT_SHARE
    constant = math.sqrt(d * share / (1 - share))
    others = math.sqrt(1 / (1 - share))  # cancels the effect of the constant on a norm
    layers = dict(params["layers"])
    for name in ("attn_norm", "mlp_norm"):
        layers[name] = (layers[name] * others).at[:, 0].set(0)
    for name in ("o", "down"):
        layers[name] = layers[name].at[..., 0].set(0)
    # The constant adds the same value to the logits of all other tokens. It is small, so that
    # bfloat16 keeps the difference to the last token.
    norm = jnp.full((d,), 0.3 * others / math.sqrt(d)).at[0].set(0.05 / math.sqrt(d))
    params = {
        **params,
        "layers": layers,
        "embed": (params["embed"] * math.sqrt(d)).at[:, 0].set(constant).at[-1].set(0),
        "final_norm": norm.astype(dtype),
    }
    b, s = 8, 64
    tokens = jax.random.randint(jax.random.key(1), (b, s), 0, config.vocab_size - 1)
    positions = jnp.broadcast_to(jnp.arange(s), (b, s))
    hidden = transformer.apply(
        params, tokens, positions, tokens >= 0, config=config, compute_dtype=jnp.dtype(dtype)
    )
    logits = transformer.unembed(params, hidden, config=config, compute_dtype=jnp.dtype(dtype))
    log_others = np.asarray(jax.nn.logsumexp(logits[..., :-1], axis=-1), np.float64)
    direction = np.asarray(hidden[..., 0], np.float64)
    wanted = log_others.mean() - math.log(1 / eos_prob - 1)
    scale = np.asarray(jnp.asarray(wanted / direction.mean(), dtype), np.float64)
    probabilities = 1 / (1 + np.exp(log_others - scale * direction))
    return {**params, "embed": params["embed"].at[-1, 0].set(float(scale))}, probabilities


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the engine under one workload."""
    start = time.perf_counter()
    model = models.describe(job["model"])
    config, params = model.config, model.load_params(param_dtype=job["dtype"])
    prompts = np.load(job["prompts"])
    num_rows = len(prompts) * job["num_samples"]
    decoder = _decoder(config, job, prompts.shape[1], job["max_new_tokens"], job["eos_ids"])
    make = jax.jit(functools.partial(quantize, quantization=job["quantization"]))
    weights = jax.block_until_ready(make(decoder.weights(params)))
    del params
    load_s = time.perf_counter() - start

    def call(seed: int) -> tuple[Session, list[int]]:
        return _draw(decoder, weights, prompts, job["num_samples"], num_slots, seed)

    num_slots = min(job["num_slots"] or num_rows, num_rows)
    start = time.perf_counter()
    warm_up_runs = _warm_up(decoder, lambda run: call(job["seed"] + 1 + run))
    warm_up_s = time.perf_counter() - start
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
    run = {
        "warm_up_s": warm_up_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "first_token_s": statistics.first_token_s,
        "prefill_s": statistics.prefill_s,
        "decode_s": statistics.chunk_s,
        "steps": statistics.steps,
        "slot_share": statistics.tokens / statistics.slot_steps,
        "warm_up_runs": warm_up_runs,
        "programs": compiled,
        "recompiled": decoder.compile_count - compiled,
        "bytes_per_step": work.num_bytes / statistics.steps,
        "flops_per_step": work.num_flops / statistics.steps,
        "bytes_per_s": rates.bytes_per_s,
        "flops_per_s": rates.flops_per_s,
        "step_s": statistics.chunk_s / statistics.steps,
        "bound_step_s": rates.bound_s(work) / statistics.steps,
        "sum_step_s": rates.sum_s(work) / statistics.steps,
        "lengths": lengths,
    }
    return {
        "load_s": load_s,
        "num_slots": num_slots,
        "num_params": transformer.num_params(config),
        "versions": versions("jax", "jaxlib", "flax"),
        "num_threads": len(os.sched_getaffinity(0)),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "runs": {"engine": run},
    }


def measure_queue(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the cost per token of short responses, for several lengths of the initial queue."""
    model = models.describe(job["model"])
    config, params = model.config, model.load_params(param_dtype=job["dtype"])
    decoder = _decoder(config, job, _QUEUE_PROMPT, _QUEUE_TOKENS, ())
    weights = decoder.weights(params)
    del params
    rng = np.random.default_rng(job["seed"])
    prompts = rng.integers(0, config.vocab_size, (max(job["queued"]), _QUEUE_PROMPT))

    def call(n: int, seed: int) -> Session:
        return _draw(decoder, weights, prompts[:n], 1, _QUEUE_SLOTS, seed)[0]

    _warm_up(decoder, lambda run: call(min(job["queued"]), run))
    figures = {}
    for n in job["queued"]:
        compiled, costs = decoder.compile_count, []
        for trial in range(max(1, _QUEUE_RESPONSES // n)):
            start = time.perf_counter()
            session = call(n, trial)
            costs.append(1e6 * (time.perf_counter() - start) / session.statistics.tokens)
        figures[str(n)] = {
            "us_per_token": float(np.median(costs)),
            "recompiled": decoder.compile_count - compiled,
        }
    costs = [x["us_per_token"] for x in figures.values()]
    return {
        "by_length": figures,
        "spread": max(costs) / min(costs) - 1,
        "num_slots": _QUEUE_SLOTS,
        "prompt_tokens": _QUEUE_PROMPT,
        "max_new_tokens": _QUEUE_TOKENS,
    }


def _decoder(
    config: TransformerConfig,
    job: dict[str, Any],
    prompt_tokens: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
) -> Decoder:
    return Decoder(
        config,
        compute_dtype=job["dtype"],
        eos_ids=eos_ids,
        pad_id=job["pad_id"],
        prompt_buckets=(prompt_tokens,),
        max_length=prompt_tokens + max_new_tokens,
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
