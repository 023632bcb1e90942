# SPDX-License-Identifier: Apache-2.0
"""Who only reads sees a version as it was written, or the one before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.weights.transport import make_publish_program
from tba_jax.weights.version_reader import VersionReader
from tba_jax.weights.version_writer import CheckpointTransport
from tba_jax.weights.versions import PublicationError, Versions


def test_a_reader_follows_the_bell_a_restored_trainer_and_storage_that_fails(tmp_path):
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    writer = CheckpointTransport(
        str(tmp_path), make_publish_program(jnp.float32), [None], timeout_s=60
    )
    now = [0.0]
    reader = VersionReader(
        Versions(tmp_path),
        {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=where)},
        [where, where],
        timeout_s=10.0,
        layout=lambda params: {"w": params["w"] + 1},
        clock=lambda: now[0],
    )

    def publish(version):
        writer.publish(version, {"w": jnp.full(4, float(version))})
        writer.poll()

    publish(3)
    assert not reader.poll() and reader.latest(0) is None  # nobody told it
    reader.announce(3)
    assert reader.poll() and not reader.poll()
    assert reader.latest(1).version == 3
    np.testing.assert_array_equal(reader.latest(1).params["w"], 4.0)
    reader.announce(5)  # named, and not there: as if it had been deleted meanwhile
    now[0] = 1.0
    assert not reader.poll() and reader.latest(0).version == 3
    publish(6)
    reader.announce(6)
    assert reader.poll() and reader.latest(0).version == 6
    publish(4)  # by a trainer that was restored
    reader.announce(4)
    assert not reader.poll() and reader.latest(0).version == 6
    reader.forget()
    assert reader.latest(0) is None
    reader.announce(4)
    assert reader.poll() and reader.latest(0).version == 4
    (tmp_path / "weights" / "4").rename(tmp_path / "weights" / "elsewhere")
    reader.forget()
    reader.announce(4)
    assert not reader.poll()
    now[0] = 20.0
    with pytest.raises(
        PublicationError, match="has not been readable for 19 s: .*Repair the storage"
    ):
        reader.poll()
    writer.close()
