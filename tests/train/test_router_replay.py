# SPDX-License-Identifier: Apache-2.0
"""Experts that searchers record, and their use by the trainer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_batches import SETTINGS, lay_out, make_draws, slow
from fake_models import random_params, tiny_config

from tba_jax.config.schema import ConfigError, make_config
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.placement import MeshShape
from tba_jax.devices.sharding import trainer_mesh
from tba_jax.devices.site import Site
from tba_jax.flow.trajectory import ExpertsShape
from tba_jax.models import attention, experts, transformer
from tba_jax.models.shardings import ComputeSharding
from tba_jax.run.model_parts import recorded_experts
from tba_jax.train.rows import make_rows
from tba_jax.train.state import init_state
from tba_jax.train.step import make_train_step
from tba_jax.train.step_metrics import largest_gap, routing_disagreement

# One of two experts for each token, with weight 1: a router decides nothing but the expert.
CONFIG = tiny_config(
    family="qwen3_moe", num_experts=2, experts_per_token=1, vocab_size=24, head_dim=8
)
SHAPE = ExpertsShape(CONFIG.num_layers, CONFIG.experts_per_token, "uint8")
UNKNOWN = 255
SAMPLER = random_params(CONFIG)
TRAINER = {**SAMPLER, "layers": {**SAMPLER["layers"]}}
TRAINER["layers"]["router"] = random_params(CONFIG, seed=5)["layers"]["router"]
LAYOUTS = {
    "padded": {},
    "padded, shared prompts": {"shares_prompts": True},
    "packed, shared prompts": {"row_length": 24, "shares_prompts": True},
}


@jax.jit
def _differing(params, rows, ids):
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    given = experts.Recorded(ids, jnp.zeros(rows.shape, bool))
    visible = attention.causal(rows >= 0)
    kwargs = {"config": CONFIG, "compute_dtype": jnp.float32}
    return transformer.apply_recorded(params, rows, positions, visible, given, **kwargs)[1]


def own_experts(params, tokens):
    """[s l] that the router chooses, found by asking for expert 0 in one layer at a time."""
    rows = np.zeros((CONFIG.num_layers, 16), np.int32)  # one length, one program
    rows[:, : len(tokens)] = tokens
    ids = np.full((*rows.shape, CONFIG.num_layers, 1), UNKNOWN, np.uint8)
    for layer in range(CONFIG.num_layers):
        ids[layer, :, layer] = 0
    return np.asarray(_differing(params, rows, ids)).T[: len(tokens)]


def first_tokens():
    """Tokens that pass the same experts as a prompt, whose experts are not recorded."""
    every = [np.array([i]) for i in range(3, CONFIG.vocab_size)]
    return [x for x in every if (own_experts(SAMPLER, x) == own_experts(TRAINER, x)).all()][:2]


@pytest.fixture(scope="module")
def draws():
    """Two prompts with four responses each, drawn by the sampler, with its log-probs."""
    decoder = Decoder(
        CONFIG,
        compute_dtype=jnp.float32,
        eos_ids=(2,),
        pad_id=0,
        prompt_buckets=(1,),
        max_length=16,
        chunk_steps=4,
        experts=SHAPE,
    )
    session = decoder.session(SAMPLER, num_slots=3)
    prompts = first_tokens()
    for i, prompt in enumerate(prompts):
        keys = np.arange(8, dtype=np.uint32).reshape(4, 2) + 100 * i
        session.submit(prompt, keys, SamplingSettings(11))
    found = {(x.request, x.sample): x for x in session.run()}
    out = []
    for i, draw in enumerate(make_draws(p=2)):
        trajectories = tuple(
            dataclasses.replace(
                y,
                response_tokens=found[i, j].tokens,
                behavior_token_logprobs=found[i, j].token_logprobs,
                experts=found[i, j].experts,
            )
            for j, y in enumerate(draw.trajectories)
        )
        prompt = dataclasses.replace(draw.prompt, tokens=prompts[i].astype(np.int32))
        out.append(draw._replace(prompt=prompt, trajectories=trajectories))
    return out


def measured(draws, layout, router_replay, step=0):
    """(largest gap of a token, share of other experts, sum of log-probs)."""
    batch = jax.tree.map(jnp.asarray, lay_out(draws, experts=SHAPE, **LAYOUTS[layout]))

    @jax.jit
    def run(params, batch, step):
        rows = make_rows(batch, step, CONFIG, SETTINGS.scoring, "layers", None, None, router_replay)
        scored = rows.score(params, rows.inputs)
        gap = largest_gap(scored[..., 0], rows.tokens.behavior, rows.is_current)
        share = routing_disagreement(rows, scored)["routing_disagreement"]
        return gap, share, jnp.sum(scored[..., 0])

    return map(float, run(TRAINER, batch, step))


def test_searchers_record_the_experts_of_each_token_they_read(draws):
    for draw in draws:
        for y in draw.trajectories:
            wanted = own_experts(SAMPLER, np.concatenate([draw.prompt.tokens, y.response_tokens]))
            np.testing.assert_array_equal(y.experts[:-1, :, 0], wanted[1:-1])
            assert (y.experts[-1] == UNKNOWN).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replay_closes_the_gap_of_other_experts(draws, layout):
    """Without replay nothing but the experts differs, and they differ often."""
    gap, share, _ = measured(draws, layout, 0)
    assert gap > 0.1 and 0.1 < share < 0.9
    gap, share, _ = measured(draws, layout, 1)
    # Float32 sums in another order.
    assert gap < 1e-5 and 0.1 < share < 0.9


def test_a_step_in_micro_batches_replays(draws):
    schedule = optax.constant_schedule(0.1)
    optimizer = optax.sgd(schedule)
    settings = dataclasses.replace(SETTINGS, router_replay=1, micro_batch_rows=4)
    params = jax.tree.map(jnp.array, TRAINER)  # a step deletes its state
    state = init_state(params, optimizer, keep_reference=True)
    step = make_train_step(CONFIG, optimizer, schedule, settings)
    metrics = step(state, lay_out(draws, experts=SHAPE, micro_batch_rows=4))[1]
    assert metrics["train/sampler_gap"] < 1e-5
    np.testing.assert_allclose(
        metrics["train/routing_disagreement"], list(measured(draws, "padded", 1))[1], rtol=1e-6
    )
    # The reference is the policy's start with the experts of its own router.
    assert abs(metrics["train/kl_reference"]) > 1e-3
    assert metrics["train/grad_norm"] > 0


def test_experts_of_the_next_token_do_not_close_the_gap(draws):
    def one_early(y):
        ids = np.concatenate([y.experts[1:-1], y.experts[:1], y.experts[-1:]])
        return dataclasses.replace(y, experts=ids)

    wrong = [d._replace(trajectories=tuple(map(one_early, d.trajectories))) for d in draws]
    gap, *_ = measured(wrong, "padded", 1)
    assert gap > 0.1  # as without replay; a third of these experts differ from the right ones


def test_replay_ends_with_the_bound_of_staleness(draws):
    """At step 2 responses of version 0 are two steps old."""
    none, below, above = (list(measured(draws, "padded", x, step=2))[2] for x in (0, 2, 3))
    assert none == below and abs(none - above) > 1e-3


def test_the_disagreement_is_the_share_of_tokens_and_layers(draws):
    """Without replay, the experts of both models can be found apart."""
    differs = []
    for draw in draws:
        for y in draw.trajectories:
            tokens = np.concatenate([draw.prompt.tokens, y.response_tokens])
            differs.append((own_experts(SAMPLER, tokens) != own_experts(TRAINER, tokens))[1:-1])
    share = list(measured(draws, "packed, shared prompts", 0))[1]
    np.testing.assert_allclose(share, np.concatenate(differs).mean(), rtol=1e-6)


def test_trajectories_without_experts_pass_those_of_the_router(draws):
    """Given responses of a start, for example."""
    plain = [
        d._replace(trajectories=tuple(dataclasses.replace(y, experts=None) for y in d.trajectories))
        for d in draws
    ]
    gap, share, total = measured(plain, "padded", 1)
    assert [gap, total] == list(measured(draws, "padded", 0))[::2]
    assert np.isnan(share)


@pytest.mark.parametrize("shape", [(1, 1, 2, 2), slow((2, 2, 1, 2))])
def test_a_mesh_with_an_expert_axis_replays_the_same_experts(draws, shape):
    mesh = trainer_mesh(np.array(jax.devices()[: np.prod(shape)]), MeshShape(*shape))
    batch = jax.tree.map(jnp.asarray, lay_out(draws, experts=SHAPE, row_multiple=4))
    scored = []
    for sharding in (None, ComputeSharding(CONFIG, Site(mesh))):
        rows = make_rows(batch, jnp.int32(0), CONFIG, SETTINGS.scoring, "layers", sharding, None, 1)
        scored.append(np.asarray(jax.jit(rows.score)(TRAINER, rows.inputs)))
    np.testing.assert_allclose(scored[0], scored[1], atol=2e-5)
    assert scored[0][..., 1].max() > 0


@pytest.mark.parametrize(("num", "dtype"), [(255, "uint8"), (256, "uint16")])
def test_ids_have_the_smallest_dtype_that_can_also_say_unknown(num, dtype):
    config = dataclasses.replace(CONFIG, num_experts=num)
    assert recorded_experts(make_config({"model.router_replay": 0}), config).dtype == dtype
    assert recorded_experts(make_config(), config) is None


def test_a_model_without_experts_has_nothing_to_replay():
    with pytest.raises(
        ConfigError, match=r"model.router_replay = 2.*\(llama\) has no experts"
    ) as e:
        recorded_experts(make_config({"model.router_replay": 2}), tiny_config())
    assert "\n" not in str(e.value)
