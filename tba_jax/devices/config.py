# SPDX-License-Identifier: Apache-2.0
"""Settings of the devices and hosts of a run."""

from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field, need


@dataclass(frozen=True)
class MeshSettings(Section):
    """The trainer's devices: data x fsdp x model of them."""

    data: int = field(
        1,
        "whole copies of the train state, rows divided; placement=pod: 1 means one for each host",
        at_least=1,
        on_resume=True,
    )
    fsdp: int = field(
        1,
        "train state and rows divided; weights gathered layer by layer",
        at_least=1,
        on_resume=True,
    )
    model: int = field(
        1,
        "train state and every matrix product divided (tensor parallel)",
        at_least=1,
        on_resume=True,
    )


@dataclass(frozen=True)
class XlaSettings(Section):
    """How XLA compiles the train step."""

    preset: Literal["none", "overlap", "eigen"] = field(
        "none",
        "options for the trainer's platform: overlap: collectives beside products, on several GPUs "
        "or TPU chips (what that changes in a program: results/structure.md); eigen: products of "
        "Eigen in place of YNNPACK on CPU, faster for large ones and slower for small ones "
        "(results/train_step.md)",
        on_resume=True,
    )
    options: str = field(
        "",
        "NAME=VALUE of the compiler, several with commas between, beside the preset's and over "
        "them; one that it does not have is refused",
        on_resume=True,
    )

    def check(self) -> None:
        """Options that can be read."""
        for part in filter(None, (x.strip() for x in self.options.split(","))):
            name, sign, value = part.partition("=")
            need(
                bool(name.strip() and sign and value.strip()),
                "xla.options",
                self.options,
                f"{part!r} is no NAME=VALUE",
                "Set --config.xla.options=xla_gpu_enable_triton_gemm=false, several with commas.",
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


@dataclass(frozen=True)
class FleetSettings(Section):
    """Runs of placement=fleet: a trainer, and searchers on machines of their own, through Ray."""

    address: str = field(
        "local",
        "local: a Ray cluster of this machine, for this run; auto: the one that this machine "
        "belongs to; or HOST:PORT of its head",
        on_resume=True,
    )
    max_searchers: int = field(
        4,
        "slots for searchers: a slot that no machine fills waits for one; num_searchers of them "
        "are one process",
        at_least=1,
        at_most=4096,
    )
    trainer: str = field(
        "CPU=1",
        "what each process of the trainer takes of a machine: CPU=1, GPU=8, TPU=4",
        on_resume=True,
    )
    trainer_hosts: int = field(
        1,
        "processes of the trainer, which end and begin together; mesh.* is over all of their "
        "devices",
        at_least=1,
        on_resume=True,
    )
    searcher: str = field(
        "CPU=1",
        "what a process of searchers takes: whole machines of TPUs, or one or two of their chips",
        on_resume=True,
    )
    silence_s: float = field(
        30.0,
        "a searcher that is silent for this long is lost: what it had begun is drawn again",
        above=0,
        on_resume=True,
    )
    trainer_silence_s: float = field(
        300.0,
        "a trainer that is silent for this long is ended and made again from its newest checkpoint",
        above=0,
        on_resume=True,
    )
    max_failures: int = field(
        5, "deaths in a row, without progress between them, that end the run", on_resume=True
    )

    def check(self) -> None:
        """Resources that can be read."""
        for name in ("trainer", "searcher"):
            text = getattr(self, name)
            need(
                parse_resources(text) is not None,
                f"fleet.{name}",
                text,
                "wanted NAME=NUMBER, several with commas between",
                f"Set --config.fleet.{name}=CPU=1, GPU=8 or TPU=4.",
            )


def parse_resources(text: str) -> dict[str, float] | None:
    """ "TPU=4,spot=1" as numbers by name; None where it cannot be read."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            return None
    return found if all(name and amount > 0 for name, amount in found.items()) else None
