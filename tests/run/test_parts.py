# SPDX-License-Identifier: Apache-2.0
"""Parts follow the config: how searchers draw, and which mesh a command reads a model on."""

from types import SimpleNamespace

import jax
import numpy as np
from fake_models import random_params, tiny_config

from tba_jax.config.schema import make_config
from tba_jax.devices.site import reading_mesh
from tba_jax.models.logprobs import token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.run.model_parts import groups_stay_whole, make_decoder
from tba_jax.search.sampler import sampling_settings

CONFIG = tiny_config()


def test_searchers_draw_as_the_config_says_and_report_the_truncated_distribution():
    config = make_config(
        {
            "task.max_prompt_tokens": 4,
            "search.max_new_tokens": 6,
            "search.top_p": 0.6,
            "search.min_new_tokens": 3,
            "search.sampling_temperature": 0.8,
        }
    )
    # Half of the vocabulary ends a response: without the least length most would have one token.
    tokenizer = SimpleNamespace(eos_ids=tuple(range(11)), pad_id=0)
    decoder = make_decoder(config, CONFIG, tokenizer)
    params = random_params(CONFIG)
    prompt = np.array([5, 6, 7, 8], np.int32)
    out = decoder.decode(
        params,
        [prompt],
        num_samples=16,
        key=jax.random.key(0),
        settings=sampling_settings(config.search),
    )
    assert out.lengths.min() == 4  # three tokens, and the one that ends it
    full = token_logprobs(
        params,
        np.concatenate([np.broadcast_to(prompt, (1, 16, 4)), out.tokens], axis=-1),
        np.full((1, 16), 4, np.int32),
        out.lengths,
        response_bucket=6,
        config=CONFIG,
        scoring=Scoring(temperature=0.8),
    )
    # Beyond the least length every token is allowed that top-p keeps: its probability is divided
    # by what was kept, at least 0.6 and less than 1.
    at = np.arange(6)[None, None]
    free = (at >= 3) & (at < out.lengths[..., None])
    gain = (out.token_logprobs - full)[free]
    assert len(gain) and gain.min() > -1e-5 and gain.max() < -np.log(0.6) + 1e-5
    assert gain.max() > 0.1  # something was cut off


def test_a_model_is_read_on_as_many_devices_as_divide_it():
    assert reading_mesh(CONFIG.hidden_size, jax.devices()).shape["fsdp"] == 8
    assert reading_mesh(CONFIG.hidden_size, jax.devices()[:7]).shape["fsdp"] == 4


def test_groups_whose_episodes_may_fork_are_divided_over_micro_batches():
    """The paths of a forked episode can need more rows than a micro-batch has."""
    fields = {"objective.group_size": 4, "search.samples_per_prompt": 4}
    fields |= {"batch.micro_batch_rows": 4}
    assert groups_stay_whole(make_config(fields))
    assert not groups_stay_whole(make_config({**fields, "task.environment": "agent.py:run"}))
