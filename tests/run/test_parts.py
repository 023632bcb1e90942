# SPDX-License-Identifier: Apache-2.0
"""Parts follow the config: how searchers draw, and which mesh a command reads a model on."""

import jax
from fake_models import tiny_config

from tba_jax.config.schema import make_config
from tba_jax.devices.site import reading_mesh
from tba_jax.planning.programs import Ids
from tba_jax.run.model_parts import make_layout

CONFIG = tiny_config()


def test_a_model_is_read_on_as_many_devices_as_divide_it():
    assert reading_mesh(CONFIG.hidden_size, jax.devices()).shape["fsdp"] == 8
    assert reading_mesh(CONFIG.hidden_size, jax.devices()[:7]).shape["fsdp"] == 4


def test_groups_whose_episodes_may_fork_are_divided_over_micro_batches():
    """The paths of a forked episode can need more rows than a micro-batch has."""
    fields = {"objective.group_size": 4, "search.samples_per_prompt": 4}
    fields |= {"batch.micro_batch_rows": 4}
    mesh = reading_mesh(CONFIG.hidden_size, jax.devices()[:1])
    assert make_layout(make_config(fields), Ids(), mesh).is_whole
    forking = make_config({**fields, "task.environment": "agent.py:run"})
    assert not make_layout(forking, Ids(), mesh).is_whole
