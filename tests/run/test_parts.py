# SPDX-License-Identifier: Apache-2.0
"""Parts follow the config: how searchers draw, and which mesh a command reads a model on."""

import jax
from fake_models import tiny_config

from tba_jax.config.schema import make_config
from tba_jax.devices.site import reading_mesh
from tba_jax.planning.programs import Ids
from tba_jax.run.model_parts import make_layout
from tba_jax.run.shared import evaluated_weights
from tba_jax.weights.publication import Published

CONFIG = tiny_config()


def test_a_model_is_read_on_as_many_devices_as_divide_it():
    assert reading_mesh(CONFIG.hidden_size, jax.devices()).shape["fsdp"] == 8
    assert reading_mesh(CONFIG.hidden_size, jax.devices()[:7]).shape["fsdp"] == 4


def test_the_start_model_replaces_version_0_and_is_read_once_for_an_evaluation():
    held, starts = {3: Published(3, "weights")}, []
    start = lambda: starts.append(0) or "start model"  # noqa: E731
    evaluated = evaluated_weights(lambda version, i: held.get(version), 1, start)
    assert [evaluated(0) for _ in range(3)] == [(0, "start model")] * 3 and starts == [0]
    assert evaluated(3) == (3, "weights") and evaluated(2) is None
    assert evaluated(0) == (0, "start model") and starts == [0, 0]  # it was dropped


def test_groups_whose_episodes_may_fork_are_divided_over_micro_batches():
    """The paths of a forked episode can need more rows than a micro-batch has."""
    fields = {"objective.group_size": 4, "search.samples_per_prompt": 4}
    fields |= {"batch.micro_batch_rows": 4}
    mesh = reading_mesh(CONFIG.hidden_size, jax.devices()[:1])
    assert make_layout(make_config(fields), Ids(), mesh).is_whole
    forking = make_config({**fields, "task.environment": "agent.py:run"})
    assert not make_layout(forking, Ids(), mesh).is_whole
