# SPDX-License-Identifier: Apache-2.0
"""Where a run begins or goes on: the train state, what is frozen beside it, the saved host states.

The only place that reads the policy's weights. Invariant: a reference never shares buffers with
what is trained, which the next step donates.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tba_jax.devices.site import Site
from tba_jax.models import lora
from tba_jax.run import identity
from tba_jax.run.host_state import CheckpointError, HostState
from tba_jax.run.prompts import check_prompts
from tba_jax.run.searching import make_references
from tba_jax.run.shared import Shared
from tba_jax.run.training import abstract_state, make_optimizer_from, make_step_shardings
from tba_jax.search.reference import Reference
from tba_jax.train.state import TrainState, make_init_state

_TAIL_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Start:
    """What a process of the run starts with.

    Attributes:
        state: the train state, initial or restored.
        base: frozen parameters under adapters; None where all are trained.
        references: a reference scorer for each set of searcher devices, where searchers score.
        step: of the restored checkpoint; 0 for a new run.
        host_state: of that checkpoint, as `Checkpoints.restore` gives it; None for a new run.
    """

    state: TrainState
    base: Any
    references: dict[Site, Reference]
    step: int = 0
    host_state: HostState | None = None


def open_start(
    shared: Shared,
    phase: Callable[[str], None],
    note: Callable[[str], None],
    accepted: Collection[str] = (),
) -> Start:
    """Load the model, and restore the newest checkpoint of the work directory if there is one.

    Args:
        shared: what it stands on; all processes of the run call this.
        phase: told what takes long.
        note: told what was lost.
        accepted: of `identity.KINDS`, what may have changed since the checkpoint was written.

    Raises:
        ValueError: weights or prompts are not usable. UserError: what the run was made of changed.
        CheckpointError: no checkpoint is intact, the newest that is cannot be read, or it is
            another run's.
    """
    config, sites, model = shared.config, shared.sites, shared.model
    policy, mesh = shared.policy, sites.trainer.mesh
    has_adapters = policy.adapters is not None
    shardings = make_step_shardings(config, model.config, mesh)
    facts = shared.facts  # what the run is made of now, not when it is first saved
    check_prompts(shared, facts.fingerprints, phase, note)
    newest = _newest_intact(shared, note)
    if newest is None and shared.cluster.is_primary and (made := steps_made(shared.workdir)):
        note(f"there is no checkpoint: the {made:,} steps that were made are made again")
    references: dict[Site, Reference] = {}
    params, base = None, None
    scores_here = config.reference.placement == "searcher" and bool(sites.searchers)
    if newest is None or has_adapters or scores_here:
        phase("loading the model")
        params = model.load_params(
            param_dtype=jnp.dtype(config.model.param_dtype),
            shardings=shardings.base if has_adapters else shardings.state.params,
        )
    if scores_here:
        references = make_references(config, policy, shared.tokenizer.eos_ids, sites, params)
    if has_adapters:
        base = params
        params = lora.init_adapters(policy, config.seed, shardings.state.params)
    if newest is None:
        optimizer, _ = make_optimizer_from(config)
        return Start(make_init_state(optimizer, shardings)(params), base, references)
    del params
    phase("restoring the newest checkpoint")
    target = abstract_state(config, model.config, mesh)
    _, state, host_state = shared.checkpoints.restore(target, newest)
    for line in identity.check(newest, host_state.facts, facts, accepted):
        note(line)
    state = state if isinstance(state, TrainState) else TrainState(*state)
    if int(state.step) != newest:
        raise CheckpointError(
            f"checkpoint {newest} holds step {int(state.step)}: its folder was renamed. Give "
            f"checkpoints/{newest} the name checkpoints/{int(state.step)} again"
        )
    return Start(state, base, references, newest, host_state)


def steps_made(workdir: Path) -> int:
    """The step that the last whole lines of metrics.jsonl tell of; 0 where they tell of none."""
    path = workdir / "metrics.jsonl"
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0  # a log that cannot be read is the affair of who opens it
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            step = json.loads(line)["step"] if line.startswith(b'{"step"') else None
            if isinstance(step, int):
                return step
    return 0


def _newest_intact(shared: Shared, note: Callable[[str], None]) -> int | None:
    """Step of the newest checkpoint whose files are as they were written, None without any.

    Damaged ones are put aside. All processes call this, and divide the reading.

    Raises:
        CheckpointError: the oldest is damaged too; in all processes.
    """
    checkpoints, cluster = shared.checkpoints, shared.cluster
    while True:
        # Read once: a host that looked a moment later might see another one.
        step = cluster.broadcast_json(checkpoints.latest_step())
        if step is None:
            return None
        share = (cluster.process_id, cluster.num_processes)
        found = sum(cluster.gather_json(checkpoints.damage(step, share=share)), [])
        if not found:
            return step
        answer: dict[str, str] = {}
        if cluster.is_primary:
            try:
                answer = {"kept": str(checkpoints.put_aside(step, found))}
            except CheckpointError as error:
                answer = {"lost": str(error)}
        answer = cluster.broadcast_json(answer)
        if "lost" in answer:
            raise CheckpointError(answer["lost"])
        note(
            f"checkpoint {step} is damaged ({found[0]}) and was put aside as {answer['kept']}; "
            "the run continues from the one before it"
        )
        checkpoints.look_again()
