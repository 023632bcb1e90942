# SPDX-License-Identifier: Apache-2.0
"""Settings of weight publication."""

from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field


@dataclass(frozen=True)
class SyncSettings(Section):
    """Settings of the transport of published weights to searchers."""

    transport: Literal["auto", "memory", "checkpoint"] = field(
        "auto",
        "memory: inside the process; checkpoint: the newest two versions on disk, in the work "
        "directory; auto: "
        "checkpoint if searchers run in other processes than the trainer, else memory",
        on_resume=True,
    )
