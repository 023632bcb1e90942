# SPDX-License-Identifier: Apache-2.0
"""How a config fits the devices and hosts there are: what depends on their number alone.

What chips refuse is the business of `sharding`.
"""

import math

from tba_jax.config.schema import Config
from tba_jax.settings import need


def trainer_mesh(config: Config, num_hosts: int) -> tuple[int, int, int]:
    """Sizes of the trainer's mesh: data, fsdp, model.

    In a pod every host trains. A mesh that fsdp and model do not spread over all of the hosts
    already gets, with the default `mesh.data = 1`, one copy of the state for each host.
    """
    data, fsdp, model = config.mesh.data, config.mesh.fsdp, config.mesh.model
    if config.placement == "pod" and data == 1 and (fsdp * model) % num_hosts:
        data = num_hosts
    return data, fsdp, model


def _validate_pod(config: Config, num_devices: int, num_hosts: int) -> None:
    data, fsdp, model = trainer_mesh(config, num_hosts)
    shape = f"{data} x {fsdp} x {model}"
    trainer, mine = data * fsdp * model, data * fsdp * model // num_hosts
    need(
        trainer % num_hosts == 0 and mine <= num_devices,
        "mesh",
        shape,
        f"each of the {num_hosts} processes has an equal share of the trainer's {trainer} devices, "
        f"and sees {num_devices}",
        "Make mesh.data x mesh.fsdp x mesh.model a multiple of the processes, and small enough.",
    )
    need(
        mine % model == 0,
        "mesh.model",
        model,
        f"the rows of a batch would be divided over processes: each has {mine} trainer devices",
        "Lower mesh.model and raise mesh.fsdp.",
    )
    need(
        config.num_searchers < num_hosts or config.num_searchers % num_hosts == 0,
        "num_searchers",
        config.num_searchers,
        f"the {num_hosts} processes of the pod have equal numbers of searchers, at least one",
        f"Give a multiple of {num_hosts}.",
    )
    each, left = config.search.num_devices, num_devices - mine or mine
    need(
        each <= left,
        "search.num_devices",
        each,
        f"each process has {left} devices for searchers",
        "Lower it.",
    )
    need(
        config.batch.num_prompts % (data * fsdp) == 0,
        "batch.num_prompts",
        config.batch.num_prompts,
        f"must divide by mesh.data x mesh.fsdp = {data * fsdp} of {num_hosts} processes",
        "Raise or lower it.",
    )


def validate_devices(config: Config, num_devices: int, num_hosts: int = 1) -> None:
    """Check the parts of the placement that depend on how many devices there are.

    Args:
        config: validated.
        num_devices: of this process.
        num_hosts: processes of the run.

    Raises:
        ConfigError: as `validate`.
    """
    if config.placement == "pod":
        _validate_pod(config, num_devices, num_hosts)
        return
    mesh = config.mesh
    trainer = mesh.data * mesh.fsdp * mesh.model
    each = config.search.num_devices
    shape = f"{mesh.data} x {mesh.fsdp} x {mesh.model}"
    need(
        trainer <= num_devices,
        "mesh",
        shape,
        f"the trainer's mesh wants {trainer} devices, and this process sees {num_devices}",
        "Make mesh.data, mesh.fsdp or mesh.model smaller.",
    )
    wanted, left = config.num_searchers * each, num_devices - trainer
    if config.placement == "split":
        need(
            left > 0,
            "mesh",
            shape,
            f"placement=split needs a device for searchers, and this process sees {num_devices}",
            ("Make it smaller, or set" if num_devices > 1 else "Set")
            + " --config.placement=shared.",
        )
        need(
            wanted <= left,
            "num_searchers",
            config.num_searchers,
            f"placement=split leaves {left} devices for searchers of {each} each",
            f"Set --config.num_searchers={left // each} or --config.placement=shared."
            if left >= each
            else f"Set --config.search.num_devices={left} or --config.placement=shared.",
        )
    elif config.placement == "shared" or wanted > left:
        need(
            trainer % each == 0,
            "search.num_devices",
            each,
            f"searchers that share the trainer's {trainer} devices must divide them",
            f"Set --config.search.num_devices={math.gcd(trainer, each)}, or --config.placement="
            "split where there are devices for both.",
        )
