# SPDX-License-Identifier: Apache-2.0
"""Settings of the devices and hosts of a run."""

from dataclasses import dataclass

from tba_jax.settings import Section, field, need


def _axis(description: str) -> int:
    return field(1, description, at_least=1, on_resume=True)


@dataclass(frozen=True)
class MeshSettings(Section):
    """Axes of the trainer's mesh: data x fsdp x expert x model devices."""

    data: int = _axis(
        "number of copies of the train state, over which rows are sharded; on several hosts 1 "
        "means one per host"
    )
    fsdp: int = _axis(
        "number of devices over which train state and rows are sharded; weights are gathered layer "
        "by layer"
    )
    expert: int = _axis(
        "number of devices over which the experts of a mixture, and rows, are sharded; each device "
        "receives the tokens of all these devices, and results are summed"
    )
    model: int = _axis(
        "number of devices over which train state and every matrix product are sharded (tensor "
        "parallel)"
    )


@dataclass(frozen=True)
class FleetSettings(Section):
    """Settings of placement=fleet: a trainer, and searchers on other machines, through Ray."""

    address: str = field(
        "local",
        "local: a new Ray cluster on this machine; auto: the cluster of this machine; or HOST:PORT "
        "of a cluster's head",
        on_resume=True,
    )
    max_searchers: int = field(
        4,
        "maximum number of searchers; missing searchers start when a machine is free; a process "
        "has num_searchers searchers",
        at_least=1,
        at_most=4096,
    )
    trainer: str = field(
        "CPU=1",
        "Ray resources of each trainer process, such as CPU=1, GPU=8 or TPU=4",
        on_resume=True,
    )
    trainer_hosts: int = field(
        1,
        "trainer processes, which start and end together; mesh.* covers the devices of all",
        at_least=1,
        on_resume=True,
    )
    searcher: str = field(
        "CPU=1",
        "Ray resources of a process of searchers; for TPUs: whole machines, or one or two chips",
        on_resume=True,
    )

    def check(self) -> None:
        """Refuse resources that are not NAME=NUMBER."""
        wanted = "must read NAME=NUMBER, several separated by commas"
        for name in ("trainer", "searcher"):
            text = getattr(self, name)
            hint = f"Set --config.fleet.{name}=CPU=1, GPU=8 or TPU=4."
            need(parse_resources(text) is not None, f"fleet.{name}", text, wanted, hint)


def parse_resources(text: str) -> dict[str, float] | None:
    """Parse "TPU=4,spot=1" into numbers by name; return None for a malformed text."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            return None
    return found if all(name and amount > 0 for name, amount in found.items()) else None
