# SPDX-License-Identifier: Apache-2.0
"""The reference on a searcher's mesh scores as on one device; published weights outlive a step."""

import jax
import jax.numpy as jnp
import numpy as np
from fake_batches import DIVISIBLE, make_batch, placed, sharded
from fake_models import random_params, tiny_config
from jax.sharding import Mesh

from tba_jax.decoding import lowering
from tba_jax.devices.site import Site
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import param_shardings
from tba_jax.models.transformer import unstack_layers
from tba_jax.search.reference import Reference, make_reference_program
from tba_jax.weights.transport import MemoryTransport, make_publish_program

# Two key/value heads, which both devices keep; a vocabulary that they divide.
CONFIG = tiny_config(qkv_bias=True, head_dim=8, mlp_size=24, vocab_size=64)


def searcher_mesh(first, num):
    return Mesh(np.array(jax.devices()[first : first + num]), ("model",))


def test_a_reference_on_a_mesh_and_of_shared_prompts_equals_one_device():
    batch = make_batch()
    shared = make_batch(shares_prompts=True)
    scores = []
    for num in (1, 2):
        mesh = searcher_mesh(2, num)
        program = make_reference_program(
            CONFIG, Scoring(temperature=0.7, chunk_tokens=16), Site(mesh)
        )
        params = jax.device_put(random_params(CONFIG), param_shardings(CONFIG, mesh))
        assert len(params["embed"].addressable_shards) == num
        score = Reference(program, params)
        for x in (batch, shared):
            rows = x.tokens, x.prompt_lengths, x.response_lengths
            scores.append(score(*rows, 6).reshape(4, 4))
    # Float32 sums of up to six log-probs of order 5, in another order.
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], rtol=1e-5)


def test_published_weights_are_divided_as_searchers_want_and_outlive_a_donated_step():
    shardings, state, step = sharded((1, 2, 1))
    before = jax.device_get(unstack_layers(state.params, DIVISIBLE))
    mesh = shardings.batch.mesh
    wanted = [
        lowering.weight_shardings(DIVISIBLE, searcher_mesh(first, num))
        for first, num in ((4, 2), (6, 2), (0, 2), (3, 1))
    ]
    program = make_publish_program(
        jnp.dtype(jnp.float32),
        lambda params: unstack_layers(params, DIVISIBLE),
        lowering.weight_shardings(DIVISIBLE, mesh),
    )
    transport = MemoryTransport(program, wanted, timeout_s=60)
    transport.publish(0, state.params)
    old = state.params
    state, _ = step(state, placed(make_batch(p=4), shardings))
    jax.block_until_ready(state)
    assert old["embed"].is_deleted()
    assert transport.poll()
    for i, sharding in enumerate(wanted):
        params = transport.latest(i).params
        assert jax.tree.map(lambda x: x.sharding, params) == sharding
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), before)


def test_the_publish_program_moves_nothing_and_holds_one_copy():
    shardings, state, _ = sharded((1, 4, 2))
    program = make_publish_program(
        jnp.dtype(jnp.bfloat16),
        lambda params: unstack_layers(params, DIVISIBLE),
        lowering.weight_shardings(DIVISIBLE, shardings.batch.mesh),
    )
    compiled = program.lower(state.params).compile()
    held = sum(np.prod(x.sharding.shard_shape(x.shape)) * 2 for x in jax.tree.leaves(state.params))
    memory = compiled.memory_analysis()
    # Beside the arrays, the table of the tuple that they are returned in.
    assert held <= memory.output_size_in_bytes <= held + 8 * len(jax.tree.leaves(state)) * 8
    assert memory.temp_size_in_bytes < held / 4
    assert not any(op in compiled.as_text() for op in ("all-gather", "all-to-all", "all-reduce"))
