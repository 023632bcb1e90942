# SPDX-License-Identifier: Apache-2.0
"""The table of axes, and where it puts the parameters of each family."""

import jax
import numpy as np
import pytest
from fake_models import FAMILIES, tiny_config
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tba_jax.decoding.shardings import weight_shardings
from tba_jax.devices.sharding import partition_spec, tree_shardings
from tba_jax.models import transformer


def mesh(**axes):
    devices = np.array(jax.devices()[: np.prod(list(axes.values()))])
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        (("layers", "embed", "heads", "head_dim"), (2, 16, 4, 8), P(None, "fsdp", "model", None)),
        # Whole experts where their number permits.
        (("layers", "experts", "embed"), (3, 8, 16), P(None, "fsdp", None)),
        (("layers", "experts", "embed"), (3, 5, 16), P(None, None, "fsdp")),
        (("embed", None, "kv_heads", "head_dim"), (16, 2, 2, 8), P("fsdp", None, None, None)),
        (("vocab", "embed"), (64, 16), P("model", "fsdp")),
        (("vocab", "embed"), (50257, 16), P(None, "fsdp")),
        ((None, "mlp"), (2, 24), P(None, "model")),
        ((), (), P()),
    ],
)
def test_the_table_divides_what_the_mesh_divides(axes, shape, spec):
    assert partition_spec(axes, shape, mesh(fsdp=2, model=4)) == spec


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match=r"'heads' of size 6 .* 4 devices .* one of \[1, 2, 3, 6\]"
    ):
        partition_spec(("embed", "heads", "head_dim"), (16, 6, 8), mesh(model=4))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_every_family_has_a_sharding_that_fits(family):
    config = tiny_config(family=family, hidden_size=32, mlp_size=24, vocab_size=64)
    shapes = transformer.abstract_params(config)
    shardings = tree_shardings(transformer.param_axes(config), shapes, mesh(fsdp=2, model=2))
    parts = jax.tree.map(lambda x, s: np.prod(s.shard_shape(x.shape)) / x.size, shapes, shardings)
    layers = parts["layers"]
    down = layers["expert_down" if config.num_experts else "down"]
    assert parts["embed"] == layers["q"] == layers["k"] == layers["o"] == down == 1 / 4
    assert parts["final_norm"] == 1 / 2
    # The decoder's layout: the same parts, without the layer axis; matrices have two axes.
    unstacked = weight_shardings(config, mesh(fsdp=2, model=2))
    assert len(unstacked["layers"]) == config.num_layers
    for name, sharding in shardings["layers"].items():
        spec = list(sharding.spec[1:])
        if name.removeprefix("delta_") in ("q", "q_gate", "gate", "k", "v", "o") and len(spec) == 3:
            del spec[1 if name.removeprefix("delta_") == "o" else 2]
        having = [layer[name] for layer in unstacked["layers"] if name in layer]
        assert having and all(found.spec == P(*spec) for found in having), name
