# SPDX-License-Identifier: Apache-2.0
"""Who gets which device, what chips refuse, and weights that pass between groups of devices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tba_jax.devices.placement import Asked, MeshShape, PlacementError, divide
from tba_jax.devices.sharding import hand_over


class Chip(NamedTuple):
    id: int
    process_index: int
    device_kind: str
    coords: tuple[int, ...] = (0, 0, 0)

    @property
    def platform(self):
        return "tpu" if self.device_kind.startswith("TPU") else self.device_kind


def chips(kind, hosts, per_host):
    return [Chip(i, i // per_host, kind) for i in range(hosts * per_host)]


def ids(devices):
    return [d.id for d in devices]


@pytest.mark.parametrize(
    ("placement", "each", "groups"),
    [
        ("shared", 1, [[0], [1], [0]]),
        ("split", 2, [[2, 3], [4, 5], [6, 7]]),
        ("auto", 1, [[2], [3], [4]]),
    ],
)
def test_placements_of_one_process(placement, each, groups):
    got = divide(placement, chips("cpu", 1, 8), Asked(MeshShape(2), 3, each))
    assert ids(got.trainer) == [0, 1]
    assert [ids(group) for group in got.groups] == groups


@pytest.mark.parametrize(
    ("placement", "devices", "trainer", "each", "message"),
    [
        ("shared", chips("cpu", 1, 4), 8, 1, r"8 trainer devices .* one of \[1, 2, 3, 4\]"),
        ("split", chips("cpu", 1, 8), 2, 3, "3 searchers of 3 devices .* leaves 6 of 8"),
        ("split", chips("cpu", 1, 1), 1, 1, "Set --config.placement=shared"),
        ("hosts", chips("cpu", 1, 4), 4, 1, "do not fit placement=hosts on 1 host"),
        # Half the chips of each host abort the compiler of libtpu.
        ("auto", chips("TPU v6 lite", 4, 4), 6, 1, r"= 6 trainer devices do not fit .* \[16\]"),
        ("auto", chips("TPU v5", 2, 4), 3, 1, r"= 3 trainer .* do not fit .* \[2, 4, 6, 8\]"),
    ],
)
def test_devices_that_do_not_suffice_are_refused(placement, devices, trainer, each, message):
    num_searchers = len({d.process_index for d in devices}) if placement == "auto" else 3
    with pytest.raises(PlacementError, match=message):
        divide(placement, devices, Asked(MeshShape(trainer), num_searchers, each))


@pytest.mark.parametrize(
    ("kind", "trainer", "layout", "trains", "searches"),
    [
        ("TPU v5", 4, "split", [0, 1, 4, 5], [[6], [7]]),  # v5p calls itself TPU v5
        ("TPU v5 lite", 8, "shared", [0, 1, 2, 3, 4, 5, 6, 7], [[4], [5]]),
        ("cuda", 6, "split", [0, 1, 2, 4, 5, 6], [[7], [7]]),
    ],
)
def test_layouts_of_a_pod_of_two_hosts(kind, trainer, layout, trains, searches):
    devices = chips(kind, 2, 4)
    asked = Asked(MeshShape(trainer), num_searchers=4)
    got = divide("auto", devices[::-1], asked, process_index=1)
    assert got.placement == layout
    assert ids(got.trainer) == trains
    assert [ids(group) for group in got.groups] == searches


def grid(kind, columns, rows):
    """A slice of hosts of 2 x 2 chips, hosts counted row by row."""
    found = []
    for host in range(columns * rows):
        y, x = divmod(host, columns)
        places = [(2 * x + i % 2, 2 * y + i // 2, 0) for i in range(4)]
        found += [Chip(4 * host + i, host, kind, place) for i, place in enumerate(places)]
    return found


@pytest.mark.parametrize(
    ("devices", "trainer", "trains", "searches"),
    [
        (chips("cpu", 4, 1), 2, [0, 1], [2, 3]),
        (chips("TPU v5 lite", 4, 4), 12, [0, 1, 2], [3]),
        # A large v5e slice: the last rectangle of hosts, and the first host has no part in it.
        (grid("TPU v5 lite", 4, 4), 32, [2, 3, 6, 7, 10, 11, 14, 15], [1, 4, 5, 8, 9, 12, 13]),
        (grid("TPU v5 lite", 4, 4), 4, [15], list(range(1, 15))),
    ],
)
def test_on_hosts_some_train_and_the_others_search(devices, trainer, trains, searches):
    asked = Asked(MeshShape(trainer), num_searchers=len(searches))
    hosts = range(len({d.process_index for d in devices}))
    found = {h: divide("hosts", devices, asked, process_index=h) for h in hosts}
    assert sorted({d.process_index for d in found[0].trainer}) == trains
    assert [h for h, a in found.items() if a.groups] == searches
    assert [found[h].first_searcher for h in searches] == list(range(len(searches)))
    assert {a.num_searchers for a in found.values()} == {len(searches)}
    mine = found[searches[0]].groups[0]
    assert {d.process_index for d in mine} == {searches[0]}


def mesh(*names, shape, first=0):
    devices = jax.devices()[first : first + np.prod(shape)]
    return Mesh(np.array(devices).reshape(shape), names)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        # From parts to one device; to parts of other axes; to copies.
        (NamedSharding(mesh("x", shape=(4,)), P("x")), SingleDeviceSharding(jax.devices()[5])),
        (
            NamedSharding(mesh("x", "y", shape=(2, 2)), P("y", "x")),
            NamedSharding(mesh("z", shape=(4,), first=2), P("z")),
        ),
        (
            NamedSharding(mesh("x", "y", shape=(2, 2)), P("y")),
            NamedSharding(mesh("z", shape=(2,), first=6), P()),
        ),
    ],
)
def test_weights_pass_between_groups_of_devices_however_they_are_divided(
    source, wanted, monkeypatch
):
    value = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    tree = {"w": jax.device_put(value, source), "s": jnp.float32(3)}
    # Through the host would be `_value` of the whole array.
    monkeypatch.setattr(
        type(tree["w"]), "_value", property(lambda self: pytest.fail("went through the host"))
    )
    here = SingleDeviceSharding(jax.devices()[7])
    out = hand_over(tree, {"w": wanted, "s": here})
    monkeypatch.undo()
    assert out["w"].sharding == wanted and out["s"].sharding == here
    np.testing.assert_array_equal(out["w"], value)
    for shard in out["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])
