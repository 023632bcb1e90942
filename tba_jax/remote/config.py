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
    heartbeat_s: int = field(
        30,
        "seconds without a heartbeat after which a process counts as lost: a pod ends; a fleet "
        "gives the searcher's tickets to other searchers, and restarts a lost trainer after ten "
        "times this long",
        at_least=2,
        on_resume=True,
    )

    @property
    def owner_timeout_s(self) -> float:
        """Seconds without a response of the buffer's owner after which its process counts as lost.

        A trainer that compiles or writes a checkpoint may be slow to respond.
        """
        return 10.0 * self.heartbeat_s
