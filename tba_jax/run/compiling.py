# SPDX-License-Identifier: Apache-2.0
"""Which programs of a run are compiled before their first call, while it loads and searches.

Shapes come from the parts themselves (the packing makes a batch of made-up draws), so that nothing
here repeats what decides them. Invariant: what is compiled ahead is what will be called, or is not
called at all; no result depends on it.
"""

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.config.schema import Config
from tba_jax.devices.ahead import Ahead
from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.packing import Packing
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.models.transformer import abstract_params
from tba_jax.run.shared import Shared
from tba_jax.run.training import StepProgram, abstract_state, make_packing, step_job
from tba_jax.search.prompts import load_grain

SHORT_TOKENS = 64
"""Up to here a policy repeats most of its responses to a prompt, and distinct ones are trained."""


PUBLICATION = "publication"
"""What compiling the publish program is called."""


def compile_ahead(shared: Shared, step: StepProgram, publish: Any) -> Ahead:
    """Begin to compile what the trainer calls first: the publish program, which the searchers wait
    for, and the train step for the batches that are likely to come first.

    Nothing, where that is not worth it or not safe: with one thread, which would wait for it
    anyway; with several hosts, where compilers may exchange what they measure and all must then
    compile in the same order; where prompts and responses have several padded lengths.
    """
    config = shared.config
    is_alone = shared.cluster.num_processes == 1
    has_one_length = config.batch.num_length_buckets == 1 or config.batch.packed_length
    if config.driver != "async" or not is_alone or not has_one_length:
        return Ahead({}).start()
    load_grain()
    batch = first_batch(
        config, make_packing(config, shared.tokenizer.pad_id, shared.sites.trainer.mesh)
    )
    jobs: dict[Hashable, Any] = {
        PUBLICATION: functools.partial(_lower_publication, shared, publish),
        step_job(batch): functools.partial(_lower_step, shared, step, batch),
    }
    return Ahead(jobs).start()


def _lower_step(
    shared: Shared, step: StepProgram, batch: Batch | PackedBatch
) -> jax.stages.Lowered:
    config, model = shared.config, shared.model.config
    state = abstract_state(config, model, shared.sites.trainer.mesh)

    def abstract(x: Any, sharding: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)

    rows = jax.tree.map(abstract, batch, step.shardings.of_batch(batch))
    frozen = ()
    if step.shardings.base is not None:
        dtype = jnp.dtype(config.model.param_dtype)
        like = functools.partial(abstract, dtype=dtype)
        frozen = (jax.tree.map(like, abstract_params(model), step.shardings.base),)
    return step.program.lower(state, rows, *frozen)


def _lower_publication(shared: Shared, publish: Any) -> jax.stages.Lowered:
    config, model = shared.config, shared.model.config
    return publish.lower(abstract_state(config, model, shared.sites.trainer.mesh).params)


def first_batch(config: Config, packing: Packing) -> Batch | PackedBatch:
    """A batch of the shape that the first one probably has; its contents mean nothing.

    Distinct responses take rows: a quarter of them where responses are short, else all.
    """
    prompts, size = packing.num_prompts, packing.group_size
    is_short = config.search.max_new_tokens <= SHORT_TOKENS
    distinct = max(1, size // 4) if is_short else size
    tokens = np.zeros(config.task.max_prompt_tokens, np.int32)
    length = config.search.max_new_tokens
    response = Trajectory(
        prompt_id=0,
        response_tokens=np.zeros(length, np.int32),
        reward=0.0,
        reward_parts={},
        behavior_token_logprobs=np.zeros(length, np.float32),
        reference_logprob=0.0,
        version_min=0,
        version_max=0,
        searcher=0,
        round=0,
        sampling_temperature=packing.policy_temperature,
        finish_reason="length",
        token_advantages=np.zeros(length, np.float32) if packing.has_advantages else None,
    )
    weights = (size - distinct + 1, *(1,) * (distinct - 1))
    draw = Draw(
        Prompt(0, "", tokens, {}), (response,) * distinct, weights, True, (0,) * distinct, 0
    )
    return packing.batch([draw] * prompts)
