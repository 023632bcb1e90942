# SPDX-License-Identifier: Apache-2.0
"""Weights as files from hosts that train to hosts that search, both in this process."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.weights.version_reader import VersionReader
from tba_jax.weights.version_writer import Members, VersionWriter
from tba_jax.weights.versions import PublicationError, Versions


def writer(tmp_path, session, **changes):
    options = {"timeout_s": 60} | changes
    return VersionWriter(
        str(tmp_path),
        jax.jit(lambda tree: jax.tree.map(jnp.copy, tree)),
        session=session,
        members=Members(0, (0,)),
        **options,
    )


class Reader:
    """A host that searches: it looks at what is named, and reads that."""

    def __init__(self, tmp_path, session, devices):
        here = jax.sharding.SingleDeviceSharding(devices[0])
        options = Members(0, (0,)).options
        self.versions = Versions(tmp_path, session=session, readers=options)
        self.reader = VersionReader(
            self.versions,
            {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=here)},
            [jax.sharding.SingleDeviceSharding(d) for d in devices],
            timeout_s=10.0,
            layout=lambda tree: {"kernel": tree["w"].T},
        )
        self.latest, self.at = self.reader.latest, self.reader.at

    def poll(self):
        for version in self.versions.named()[-1:]:
            self.reader.announce(version)
        return self.reader.poll()


def weights(value):
    return {"w": jnp.arange(16.0).reshape(4, 4) + value}


def publish(to, version):
    to.publish(version, weights(version))
    assert to.poll() and not to.poll()


def test_every_reader_gets_the_newest_whole_version_in_its_layout(tmp_path):
    devices = jax.local_devices()[:2]
    kept: list[int] = []
    to = writer(tmp_path, "now", kept=lambda: kept)
    at = Reader(tmp_path, "now", devices)
    assert not at.poll() and at.latest(0) is None and to.latest(0) is None
    to.publish(0, weights(0))
    assert to.is_publishing and not at.poll()  # not named yet
    assert to.poll() and not to.is_publishing and to.latest(0).version == 0
    assert at.poll() and not at.poll()
    for i, device in enumerate(devices):
        version, params = at.latest(i)
        assert version == 0 and params["kernel"].devices() == {device}
        np.testing.assert_array_equal(params["kernel"], np.asarray(weights(0)["w"]).T)
    # A version that is to be evaluated stays; others go when two newer ones are there.
    kept.append(0)
    for version in (1, 2, 3):
        publish(to, version)
    assert at.poll() and at.latest(1).version == 3
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == ["0", "2", "3"]
    old = at.at(0)
    np.testing.assert_array_equal(old[1]["kernel"], np.asarray(weights(0)["w"]).T)
    assert at.latest(1).version == 3
    with pytest.raises(PublicationError, match="weights/1 are deleted or damaged"):
        at.at(1)
    (damaged,) = (tmp_path / "weights" / "2").glob("_METADATA")
    damaged.write_text(damaged.read_text() + " ")
    with pytest.raises(PublicationError, match="weights/2 are deleted or damaged"):
        at.at(2)
    to.close()


def test_versions_of_an_earlier_start_are_not_seen(tmp_path):
    before = writer(tmp_path, "before")
    publish(before, 8)
    before.close()
    at = Reader(tmp_path, "now", jax.local_devices()[:1])
    assert not at.poll()
    to = writer(tmp_path, "now")
    assert not at.poll() and list((tmp_path / "weights").iterdir()) == []
    publish(to, 4)  # the run was resumed before 8
    assert at.poll() and at.latest(0).version == 4
    assert json.loads((tmp_path / "versions.json").read_text())["versions"] == [4]
    to.close()
