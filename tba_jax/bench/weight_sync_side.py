# SPDX-License-Identifier: Apache-2.0
"""One case of `tba_jax.bench.weight_sync`, in its own process.

    python -m tba_jax.bench.weight_sync_side JOB.json

Transport, programs and poller are those of a run.

Invariant: the loops with and without publications make the same steps.
"""

import functools
import json
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

from tba_jax.bench.decode_engine import SHAPES
from tba_jax.config import presets
from tba_jax.config.schema import Config, make_config, replace
from tba_jax.devices.sharding import MESH_AXES
from tba_jax.devices.site import Site
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.models import model as models
from tba_jax.models import transformer
from tba_jax.run.build import first_batch
from tba_jax.run.model_parts import START_MODEL, make_publication_program
from tba_jax.run.search_parts import make_transport
from tba_jax.run.search_process import DELIVERY_S
from tba_jax.run.shared import Sites
from tba_jax.run.trainer_parts import (
    make_optimizer_from,
    make_packing,
    make_step_settings,
    make_step_shardings,
)
from tba_jax.train.state import TrainState, make_init_state
from tba_jax.train.step import make_train_step
from tba_jax.weights.transport import Transport

# 273 million parameters, 1.09 GB in float32.
_LARGE = {"vocab_size": 64_000, "hidden_size": 1024, "num_layers": 18, "num_heads": 16}
_LARGE |= {"num_kv_heads": 4, "mlp_size": 2816}
# Prompts, responses to each, tokens of both.
_BATCHES = {"large": (2, 4, 64, 128), "tiny": (2, 2, 8, 8)}


def main(argv: Sequence[str]) -> int:
    """Run one job and write its result to the file that the job names."""
    job = json.loads(Path(argv[0]).read_text())
    jax.config.update("jax_num_cpu_devices", 2)
    Path(job["result"]).write_text(json.dumps(measure(job)))
    return 0


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return the pauses of the trainer, and the times of the loop with and without publications."""
    config, model, shape = _load(job["model"], job["transport"])
    devices = jax.local_devices()
    trainer = Site(Mesh(np.array([[[devices[0]]]]), MESH_AXES))
    sites = Sites(trainer, trainer, (Site(Mesh(np.array([devices[1]]), ("model",))),))
    state, step = _trainer(config, model, shape, sites)
    publish = make_publication_program(config, shape, sites.publication.mesh)
    transport = make_transport(config, shape, sites, Path(job["workdir"]), None, publish)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(state.params))
    state, alone = _loop(state, step, job["steps"], lambda number, params: 0.0)
    pauses: list[float] = []
    delivered: set[int] = set()

    def publish_now(number: int, params: Any) -> float:
        start = time.perf_counter()
        transport.publish(number, params)
        pause = time.perf_counter() - start
        published = transport.latest(0)
        delivered.update([] if published is None else [published.version])
        pauses.append(pause)
        return pause

    stop = StopFlag()
    poll = functools.partial(transport.poll, DELIVERY_S)
    poller = Worker("weight-poller", poll, stop).start()
    publish_now(-1, state.params)
    _wait_for_delivery(transport, stop)
    state, with_pauses = _loop(state, step, job["steps"], publish_now)
    stop.check()
    poller.close(config.checkpoint.timeout_s)
    transport.close()
    return {
        "pause_share": sum(pauses[1:]) / with_pauses,
        "pause_s": statistics.median(pauses[1:]),
        "max_pause_s": max(pauses[1:]),
        "first_pause_s": pauses[0],
        "delivery_s": transport.delivery_s,
        "step_s": (with_pauses - sum(pauses[1:])) / job["steps"],
        "cost_share": 1 - alone / with_pauses,
        "num_published": len(pauses),
        "num_delivered": len(delivered),
        "num_bytes": num_bytes,
        "platform": jax.default_backend(),
        "device": devices[0].device_kind,
    }


def _load(
    name: str, transport: str
) -> tuple[Config, models.Description | None, transformer.TransformerConfig]:
    """Return (config, model whose weights are read or None, architecture)."""
    if name == "embedded":
        model = models.describe(str(START_MODEL))
        config = replace(presets.load("math"), {"sync.transport": transport})
        return config, model, model.config
    shape = SHAPES["tiny"]
    if name == "large":
        shape = transformer.TransformerConfig(**{**vars(SHAPES["39m"]), **_LARGE})
    p, k, prompt, response = _BATCHES[name]
    sizes = {"batch.num_prompts": p, "objective.group_size": k, "search.samples_per_prompt": k}
    sizes |= {"task.max_prompt_tokens": prompt, "search.max_new_tokens": response}
    fields = {"sync.transport": transport, "batch.num_length_buckets": 1, **sizes}
    return make_config(fields), None, shape


def _wait_for_delivery(transport: Transport, stop: StopFlag) -> None:
    while transport.latest(0) is None:
        stop.check()
        stop.wait(DELIVERY_S)


def _loop(
    state: TrainState,
    step: Callable[[TrainState], tuple[TrainState, Any]],
    num_steps: int,
    after: Callable[[int, Any], float],
) -> tuple[TrainState, float]:
    """Return (the state, seconds) after `num_steps` steps, each awaited as the trainer does."""
    start = time.perf_counter()
    for number in range(num_steps):
        state, metrics = step(state)
        jax.device_get(metrics)
        after(number, state.params)
    return state, time.perf_counter() - start


def _trainer(
    config: Config,
    model: models.Description | None,
    shape: transformer.TransformerConfig,
    sites: Sites,
) -> tuple[TrainState, Callable[[TrainState], Any]]:
    """Return (state, a compiled step on one batch), made by the functions of a run."""
    dtype = jnp.dtype(config.model.param_dtype)
    if model is None:
        params = transformer.init_params(shape, jax.random.key(0), dtype)
    else:
        params = model.load_params(param_dtype=dtype)
    optimizer, schedule = make_optimizer_from(config)
    shardings = make_step_shardings(config, shape, sites.trainer.mesh)
    state = make_init_state(optimizer, shardings)(jax.device_put(params, shardings.state.params))
    program = make_train_step(shape, optimizer, schedule, make_step_settings(config, ()), shardings)
    batch = first_batch(config, make_packing(config, 0))
    batch = jax.device_put(batch, shardings.of_batch(batch))
    step = program.lower(state, batch).compile()
    return state, lambda state: step(state, batch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
