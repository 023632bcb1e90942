# SPDX-License-Identifier: Apache-2.0
"""Settings of the devices and hosts of a run."""

from dataclasses import dataclass

from tba_jax.settings import Section, field


@dataclass(frozen=True)
class MeshSettings(Section):
    """The trainer's devices: data x fsdp x model of them."""

    data: int = field(
        1,
        "whole copies of the train state, rows divided; placement=pod: 1 means one for each host",
        at_least=1,
    )
    fsdp: int = field(
        1, "train state and rows divided; weights gathered layer by layer", at_least=1
    )
    model: int = field(
        1, "train state and every matrix product divided (tensor parallel)", at_least=1
    )


@dataclass(frozen=True)
class PodSettings(Section):
    """Runs of several hosts."""

    heartbeat_s: int = field(
        20,
        "a process that is silent for this long is dead, and all end",
        at_least=2,
        on_resume=True,
    )
