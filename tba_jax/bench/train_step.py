# SPDX-License-Identifier: Apache-2.0
"""Command: speed of the train step, compared with a naive step and the roofline.

    python -m tba_jax.bench.train_step --model_shape=39m --json

Workload: groups of full rows, one Trajectory Balance step with AdamW and clipping. `tba_jax` is our
step, which computes every prompt once for all its responses. `naive` is a plain JAX step of the
same model and optimiser: a row for each response, no recomputation, and the log-softmax of all
logits in float32. Both sides have equal random weights; the command fails if the losses of their
first steps differ. Every repeat of a side has a fresh process; figures are medians of the repeats.
Tokens per second count prompt and response. `mfu` is the share of the measured matmul rate that the
operations of a side use, without recomputation. Use a quiet machine: a large `cpu_s` (processor
time) shows disturbed runs.
"""

import argparse
import functools
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax.bench import harness
from tba_jax.bench.harness import SHAPES, Figures
from tba_jax.commands.entry_point import make_parser
from tba_jax.devices.placement import MESH_AXES
from tba_jax.flow.layout import Batch, RowLayout
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.models import transformer
from tba_jax.models.logprobs import Scoring
from tba_jax.planning import roofline
from tba_jax.settings import Schedule
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.groups import of_sums
from tba_jax.train.losses import tb
from tba_jax.train.objectives import make_objective
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import TrainState, init_state, only_finite, step_shardings
from tba_jax.train.step import StepSettings, make_train_step

_SIZES = {"num_prompts": 2, "group_size": 4, "prompt_tokens": 64, "response_tokens": 128}
_SIDES = ("tba_jax", "naive")
_BETA, _LEARNING_RATE = 0.05, 1e-6
_ADAMW = OptimizerSettings(weight_decay=0.01, clip_norm=1.0)
# smaller than differences between models, larger than rounding of sums of log-probs
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
_TIMES = ("tokens_per_s", "step_s", "min_step_s", "cpu_s", "ratio", "mfu")
_COLUMNS = (*_TIMES, "temporary_bytes", "max_rss_bytes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser("bench.train_step", __doc__)
    parser.add_argument("--model_shape", default="39m", choices=SHAPES, help="a Qwen2 shape")
    harness.add_integers(parser, _SIZES | {"steps": 5, "repeats": 3}, group_size=2)
    parser.add_argument("--remat", default="layers", choices=("none", "dots", "layers"))
    parser.add_argument(
        "--micro_batch_rows", type=int, default=0, help="rows of a micro-batch; 0: all rows"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    return harness.run(
        parser,
        argv,
        measure,
        columns=_COLUMNS,
        rows=lambda result: {"tba_jax": result, "naive": result["naive"]},
        sides=dict.fromkeys(_SIDES, steps),
    )


def measure(args: argparse.Namespace, folder: Path) -> Figures:
    """Return all figures by name. What cannot be measured is a ValueError."""
    job = {name: value for name, value in vars(args).items() if name not in ("repeats", "json")}
    command = harness.own_command("train_step")
    sides = {x: functools.partial(harness.run_side, x, job, folder, command) for x in _SIDES}
    figures = harness.repeated(sides, args.repeats, "step_s")
    mine, naive = figures["tba_jax"], figures["naive"]
    if not math.isclose(naive["loss"], mine["loss"], rel_tol=_LOSS_TOLERANCE[args.dtype]):
        raise ValueError(
            f"the first step of naive has the loss {naive['loss']}, ours {mine['loss']}: the sides "
            "do not compute the same, so their times cannot be compared. Report this with the "
            "versions"
        )
    for found in figures.values():
        found["mfu"] = found["flops_per_s"] / mine["matmul_flops_per_s"]
    naive["ratio"] = naive["step_s"] / mine["step_s"]
    return {
        **mine,
        "naive": naive,
        "workload": {name: getattr(args, name) for name in _SIZES},
        **{name: value for name, value in job.items() if name not in _SIZES},
        "repeats": args.repeats,
    }


# --- sides -------------------------------------------------------------------


def steps(job: Figures) -> Figures:
    """Measure the train step of one side: its times, memory, and the loss of the first step."""
    config = SHAPES[job["model_shape"]]
    is_ours = job["side"] == "tba_jax"
    run = (_our_step if is_ours else _naive_step)(job)
    state = _state(job)
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(state.params))
    batch = jax.device_put(_batch(job))
    step = run.lower(state, batch).compile()
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
    del state
    step_s = statistics.median(times)
    p, k, x, t = (job[name] for name in _SIZES)
    model_flops = roofline.train_flops(
        config,
        num_rows=p * k,
        prompt_tokens=x,
        response_tokens=t,
        responses_per_prompt=k if is_ours else 1,
    )
    memory: Any = step.memory_analysis()
    rates = roofline.measure_rates(job["dtype"], weight_bytes) if is_ours else None
    return {
        "loss": first_loss,
        "tokens_per_s": p * k * (x + t) / step_s,
        "step_s": step_s,
        "min_step_s": min(times),
        "cpu_s": cpu_s,
        "flops_per_s": model_flops / step_s,
        "matmul_flops_per_s": rates.flops_per_s if rates else None,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compiled_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "num_params": transformer.num_params(config),
        **harness.here(),
    }


def _batch(job: Figures) -> Batch:
    """Return groups of full rows in the layout of a side: `naive` has a row for each response."""
    p, k = job["num_prompts"], job["group_size"]
    x, t = job["prompt_tokens"], job["response_tokens"]
    vocabulary = SHAPES[job["model_shape"]].vocab_size
    rng = np.random.default_rng(job["seed"])
    tokens = rng.integers(0, vocabulary, (p, k, x + t)).astype(np.int32)
    rewards = rng.integers(0, 2, (p, k))
    # Approximate log-prob of random tokens under random weights. TB reads the sums only, which are
    # at the first token.
    reference = np.zeros((p, k, t), np.float32)
    reference[..., 0] = rng.normal(-t * np.log(vocabulary), 3, (p, k))

    none = dict.fromkeys(("version_min", "version_max", "searcher", "ticket"), 0)

    def trajectory(i: int, j: int) -> Trajectory:
        return Trajectory(
            prompt_id=i,
            response_tokens=tokens[i, j, x:],
            reward=float(rewards[i, j]),
            reward_parts={},
            behavior_token_logprobs=np.full(t, -1, np.float32),
            reference_token_logprobs=reference[i, j],
            sampling_temperature=1.0,
            finish_reason="length",
            **none,
        )

    prompts = [Prompt(i, "", tokens[i, 0, :x], {}) for i in range(p)]
    groups = [tuple(trajectory(i, j) for j in range(k)) for i in range(p)]
    ids = tuple(range(k))
    draws = [Draw(*each, True, ids) for each in zip(prompts, groups, strict=True)]
    layout = RowLayout(
        num_prompts=p,
        group_size=k,
        padding=Padding((x,), (t,), 0),
        policy_temperature=1.0,
        shares_prompts=job["side"] == "tba_jax",
        micro_batch_rows=job["micro_batch_rows"],
        is_whole=job["micro_batch_rows"] >= k,
    )
    return layout.batch(draws, 0)


def first_update(job: Figures, device: Any) -> Figures:
    """Return loss and gradient norm of our first step on a device."""
    with jax.default_device(device):
        _, outputs = _our_step(job, device)(_state(job), jax.device_put(_batch(job), device))
    return {name: float(outputs["numbers"][name]) for name in ("loss", "grad_norm")}


def _state(job: Figures) -> TrainState:
    shape = SHAPES[job["model_shape"]]
    params = transformer.init_params(shape, jax.random.key(0), jnp.dtype(job["dtype"]))
    return init_state(params, make_optimizer(_ADAMW), keep_reference=False)


def _our_step(job: Figures, device: Any = None) -> Any:
    config, optimizer = SHAPES[job["model_shape"]], make_optimizer(_ADAMW)
    mesh = Mesh(np.array([device or jax.local_devices()[0]]).reshape(1, 1, 1), MESH_AXES)
    shardings = step_shardings(config, optimizer, mesh, keep_reference=False)
    settings = StepSettings(
        make_objective("tb"),
        Scoring(compute_dtype=job["dtype"]),
        Schedule(_BETA),
        micro_batch_rows=job["micro_batch_rows"],
        is_whole=job["micro_batch_rows"] >= job["group_size"],
        remat=job["remat"],
    )
    return make_train_step(config, optimizer, Schedule(_LEARNING_RATE), settings, shardings)


def _naive_step(job: Figures) -> Callable[..., Any]:
    options = {"config": SHAPES[job["model_shape"]], "compute_dtype": jnp.dtype(job["dtype"])}
    p, k, t = job["num_prompts"], job["group_size"], job["response_tokens"]
    guarded = only_finite(make_optimizer(_ADAMW))

    def loss_fn(params: Any, batch: Batch) -> Any:
        tokens = batch.tokens[batch.source[..., 0].reshape(-1) // t]  # row of each response
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.ones(tokens.shape, bool)
        hidden = transformer.apply(params, tokens, positions, mask, **options)
        logprobs = jax.nn.log_softmax(transformer.unembed(params, hidden, **options)[:, :-1])
        chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
        logp = chosen[:, -t:].reshape(p, k, t).sum(-1)
        groups = of_sums(logp, batch.reference.sum(-1), batch.rewards)
        return tb(groups, _BETA).loss.mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = guarded.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda x, u: x - _LEARNING_RATE * u, state.params, updates)
        return state._replace(params=params, opt_state=opt_state), {"numbers": {"loss": loss}}

    return step


if __name__ == "__main__":
    sys.exit(main())
