# SPDX-License-Identifier: Apache-2.0
"""Settings of the channel between the processes of a run."""

from dataclasses import dataclass

from tba_jax.settings import Section, field


@dataclass(frozen=True)
class RemoteSettings(Section):
    """The channel between the processes of a run."""

    port: int = field(
        0,
        "TCP port of the process that owns the replay buffer; 0: any free port. Behind a firewall "
        "set a port that the other machines may reach",
        at_least=0,
        at_most=65535,
        on_resume=True,
    )
