# SPDX-License-Identifier: Apache-2.0
"""Command: time for which publishing weights stops the trainer, in memory and through Orbax.

    python -m tba_jax.bench.weight_sync --json

Runs real train steps with a publication after each step, and the weight poller on its thread, as in
the asynchronous driver; trainer and reader have one CPU device each. `pause_share` is the time of
publications on the trainer thread, divided by the time of the loop; the first publication, which
compiles, is reported separately. Without spare cores the poller also slows the steps: `cost_share`
is the increase of the time of the loop over the same steps without publications. Two models: the
embedded one with the batches of the preset `arithmetic`, and one with more than 1 GB of weights.
Each of the four cases runs in a fresh process, with transport, programs and poller of a run. The
loops with and without publications make the same steps.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax.bench import processes, reporting
from tba_jax.bench.decode_engine import SHAPES
from tba_jax.config import presets
from tba_jax.config.schema import Config, make_config, replace
from tba_jax.devices.sharding import MESH_AXES
from tba_jax.devices.site import Site, Sites
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.models import model as models
from tba_jax.models import transformer
from tba_jax.run.build import first_batch
from tba_jax.run.model_parts import (
    START_MODEL,
    make_optimizer_from,
    make_packing,
    make_publication_program,
    make_step_settings,
    make_step_shardings,
)
from tba_jax.run.search_parts import make_transport
from tba_jax.train.state import TrainState, make_init_state
from tba_jax.train.step import make_train_step
from tba_jax.weights.transport import DELIVERY_S

MODELS = ("embedded", "large")
TRANSPORTS = ("memory", "checkpoint")
_AIMS = {"memory": 0.01, "checkpoint": 0.05}
# 273 million parameters, 1.09 GB in float32.
_LARGE = {"vocab_size": 64_000, "hidden_size": 1024, "num_layers": 18, "num_heads": 16}
_LARGE |= {"num_kv_heads": 4, "mlp_size": 2816}
# Prompts, responses to each, tokens of both.
_BATCHES = {"large": (2, 4, 64, 128), "tiny": (2, 2, 8, 8)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one case if the only argument is a job file; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) == 1 and argv[0].endswith(".json"):
        jax.config.update("jax_num_cpu_devices", 2)
        return processes.run_job(argv[0], measure_case)
    parser = reporting.make_parser("weight_sync", __doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="models to measure")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="transports to measure")
    parser.add_argument("--steps", type=int, default=50, help="steps of the embedded model")
    parser.add_argument("--large_steps", type=int, default=4, help="steps of the large model")
    return reporting.run_in_folder(parser, argv, measure, _table)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures by name.

    Args:
        folder: empty folder for weights and messages between processes.

    Raises:
        ValueError: an option that cannot be measured; a side failed.
    """
    chosen = {}
    for option, known in (("models", MODELS), ("transports", TRANSPORTS)):
        chosen[option] = getattr(args, option).split(",")
        for name in chosen[option]:
            if name not in known:
                raise ValueError(f"got --{option} with {name!r}; wanted some of {', '.join(known)}")
    reporting.check_least(args, {"steps": 1, "large_steps": 1})
    cases: dict[str, dict[str, Any]] = {}
    for model in chosen["models"]:
        steps = args.large_steps if model == "large" else args.steps
        for transport in chosen["transports"]:
            side = f"{model}_{transport}"
            (folder / side).mkdir()
            job = {"model": model, "transport": transport, "steps": steps}
            job |= {"workdir": str(folder / side)}
            command = (sys.executable, "-m", "tba_jax.bench.weight_sync")
            cases[side] = processes.run_side(side, job, folder, command=command)
            pause, first = cases[side]["pause_share"], cases[side]["first_pause_s"]
            print(f"{side}: pause {pause:.2%}, first {first:.3f} s", file=sys.stderr)
    worst = {
        transport: max(x["pause_share"] for name, x in cases.items() if name.endswith(transport))
        for transport in chosen["transports"]
    }
    return {
        "pause_share": worst,
        "within_aims": all(share <= _AIMS[name] for name, share in worst.items()),
        "cases": cases,
        "hardware": processes.hardware(next(iter(cases.values()))),
    }


def _table(result: Mapping[str, Any]) -> list[str]:
    hw = result["hardware"]
    return [
        f"{hw['processor']}, {hw['num_cores']} cores",
        "",
        *reporting.columns(
            (
                {"case": name, "mb": x["num_bytes"] / 1e6, **x}
                for name, x in result["cases"].items()
            ),
            {
                "": "{case}",
                "weights": "{mb:.0f} MB",
                "step": "{step_s:.3f} s",
                "pause": "{pause_s:.5f} s",
                "share": "{pause_share:.2%}",
                "first": "{first_pause_s:.3f} s",
                "delivered": "{delivery_s:.3f} s",
                "cost": "{cost_share:.1%}",
                "publications": "{num_delivered} of {num_published}",
            },
        ),
    ]


def measure_case(job: dict[str, Any]) -> dict[str, Any]:
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
    while transport.latest(0) is None:
        stop.check()
        stop.wait(DELIVERY_S)
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


def _loop(
    state: TrainState,
    step: Callable[[TrainState], tuple[TrainState, Any]],
    num_steps: int,
    after: Callable[[int, Any], float],
) -> tuple[TrainState, float]:
    """Run `num_steps` steps; return (the state after them, wall time in seconds).

    Args:
        after: function of (step number, params), called when the metrics of a step have arrived.
    """
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
    sys.exit(main())
