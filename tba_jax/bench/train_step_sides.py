# SPDX-License-Identifier: Apache-2.0
"""Processes of `tba_jax.bench.train_step` that run JAX: checkpoint, our steps, a naive step.

    python -m tba_jax.bench.train_step_sides JOB.json

The naive step is a straightforward implementation: the same model and optimiser without
recomputation, logits of all positions in float32, and their log-softmax.

Invariant: both sides start from the same weights and batch, and report their first loss.
"""

import dataclasses
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from tba_jax.bench.decode_engine import SHAPES
from tba_jax.bench.processes import run_job, versions
from tba_jax.bench.synthetic import response, write_checkpoint
from tba_jax.devices.sharding import MESH_AXES
from tba_jax.flow.layout import Batch, RowLayout
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.models import model as models
from tba_jax.models import transformer
from tba_jax.models.scoring import Scoring
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import roofline
from tba_jax.settings import Schedule
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.groups import of_sums
from tba_jax.train.losses import tb
from tba_jax.train.objectives import make_objective
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import TrainState, init_state, only_finite, step_shardings
from tba_jax.train.step import StepSettings, make_train_step


def main(argv: Sequence[str]) -> int:
    """Run the job in the given JSON file."""
    return run_job(argv[0], lambda job: (write if job["side"] == "write" else measure)(job))


def write(job: dict[str, Any]) -> dict[str, Any]:
    """Write a checkpoint of random weights, and a batch of full rows."""
    config = SHAPES[job["shape"]]
    write_checkpoint(job["model"], config, job["dtype"])
    p, k = job["num_prompts"], job["group_size"]
    x, t = job["prompt_tokens"], job["response_tokens"]
    rng = np.random.default_rng(job["seed"])
    tokens = rng.integers(0, config.vocab_size, (p, k, x + t)).astype(np.int32)
    tokens[:, :, :x] = tokens[:, :1, :x]
    np.savez(
        job["batch"],
        tokens=tokens,
        rewards=rng.integers(0, 2, (p, k)).astype(np.float32),
        # Approximate log-prob of random tokens under random weights.
        reference_logprob=rng.normal(-t * np.log(config.vocab_size), 3, (p, k)),
    )
    sizes = {"num_rows": p * k, "prompt_tokens": x, "response_tokens": t}
    return {
        "num_params": transformer.num_params(config),
        "flops": {
            "tba_jax": roofline.train_flops(config, **sizes, responses_per_prompt=k),
            "naive": roofline.train_flops(config, **sizes),
        },
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the train step of one side: its times, memory, and the loss of the first step."""
    model = models.describe(job["model"])
    config, params = model.config, model.load_params(param_dtype=job["dtype"])
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    schedule = optax.constant_schedule(job["learning_rate"])
    optimizer = make_optimizer(
        OptimizerSettings(weight_decay=job["weight_decay"], clip_norm=job["clip_norm"])
    )
    make = _naive_step if job["side"] == "naive" else _our_step
    state = init_state(params, optimizer, keep_reference=False)
    del params
    batch = jax.device_put(_batch(job))
    start = time.perf_counter()
    step = make(config, optimizer, schedule, job).lower(state, batch).compile()
    compile_s = time.perf_counter() - start
    state, outputs = step(state, batch)
    first_loss = float(outputs["numbers"]["loss"])
    times = []
    cpu_start = time.process_time()
    for _ in range(job["steps"]):
        start = time.perf_counter()
        state, outputs = step(state, batch)
        jax.block_until_ready((state, outputs))
        times.append(time.perf_counter() - start)
    cpu_s = (time.process_time() - cpu_start) / job["steps"]
    memory = step.memory_analysis()
    assert memory is not None, "this backend does not report its memory"
    stats = jax.devices()[0].memory_stats() or {}
    result = {
        "loss": first_loss,
        "step_s": times,
        "cpu_s": cpu_s,
        "compile_s": compile_s,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compiled_peak_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "device_peak_bytes": stats.get("peak_bytes_in_use"),
        "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "num_threads": len(os.sched_getaffinity(0)),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib", "optax"),
    }
    del state
    if job["side"] == "tba_jax":
        result["flops_per_s"] = roofline.measure_rates(job["dtype"], weight_bytes).flops_per_s
    return result


def _batch(job: dict[str, Any]) -> Batch:
    """Return the batch in the layout of a side: `naive` has a row for each response."""
    arrays = np.load(job["batch"])
    tokens, rewards, x = arrays["tokens"], arrays["rewards"], job["prompt_tokens"]
    p, k, _ = tokens.shape

    def trajectory(i: int, j: int) -> Trajectory:
        reference = np.zeros(tokens.shape[2] - x, np.float32)
        reference[0] = arrays["reference_logprob"][i, j]  # of which TB reads the sum only
        found = response(i, tokens[i, j, x:], float(rewards[i, j]))
        return dataclasses.replace(found, reference_token_logprobs=reference)

    draws = [
        Draw(
            prompt=Prompt(i, "", tokens[i, 0, :x], {}),
            trajectories=tuple(trajectory(i, j) for j in range(k)),
            is_fresh=True,
            ids=tuple(range(k)),
        )
        for i in range(p)
    ]
    layout = RowLayout(
        num_prompts=p,
        group_size=k,
        padding=Padding((x,), (job["response_tokens"],), 0),
        policy_temperature=1.0,
        shares_prompts=job["side"] == "tba_jax",
        micro_batch_rows=job["micro_batch_rows"],
        is_whole=job["micro_batch_rows"] >= k,
    )
    return layout.batch(draws, 0)


def _our_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    job: dict[str, Any],
) -> Any:
    settings = StepSettings(
        make_objective("tb"),
        Scoring(compute_dtype=job["dtype"]),
        Schedule(job["beta"]),
        micro_batch_rows=job["micro_batch_rows"],
        is_whole=job["micro_batch_rows"] >= job["group_size"],
        remat=job["remat"],
    )
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), MESH_AXES)
    shardings = step_shardings(config, optimizer, mesh, keep_reference=False)
    return make_train_step(config, optimizer, schedule, settings, shardings)


def _naive_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    job: dict[str, Any],
) -> Callable[..., Any]:
    p, k, t = job["num_prompts"], job["group_size"], job["response_tokens"]
    guarded = only_finite(optimizer)

    def loss_fn(params: Any, batch: Batch) -> Any:
        tokens = batch.tokens[jnp.argsort(batch.source[..., 0].reshape(-1))]
        dtype = jnp.dtype(job["dtype"])
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.ones(tokens.shape, bool)
        hidden = transformer.apply(
            params, tokens, positions, mask, config=config, compute_dtype=dtype
        )
        logits = transformer.unembed(params, hidden, config=config, compute_dtype=dtype)
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
        policy_logprob = chosen[:, -t:].sum(axis=1).reshape(p, k)
        groups = of_sums(policy_logprob, batch.reference.sum(-1), batch.rewards)
        return tb(groups, job["beta"]).loss.mean()

    def step(state: TrainState, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = guarded.update(grads, state.opt_state, state.params)
        rate = schedule(state.step)
        params = jax.tree.map(lambda x, u: x - rate * u, state.params, updates)
        return state._replace(params=params, opt_state=opt_state), {"numbers": {"loss": loss}}

    return jax.jit(step, donate_argnums=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
