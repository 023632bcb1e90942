# SPDX-License-Identifier: Apache-2.0
"""Settings of weight publication."""

from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field


@dataclass(frozen=True)
class SyncSettings(Section):
    """How published weights reach searchers."""

    transport: Literal["auto", "memory", "checkpoint"] = field(
        "auto",
        "memory; checkpoint: versions on disk, in the work directory; auto: memory, and "
        "checkpoint where searchers run in other processes than the trainer",
        on_resume=True,
    )
    keep: int = field(2, "checkpoint: published versions that are kept", at_least=2)
