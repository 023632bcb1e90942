# SPDX-License-Identifier: Apache-2.0
"""Settings that a run chooses itself, from its data, its model and the memory of its devices.

A setting of 0 or `auto` requests a choice, and config.json records the chosen values. A resumed run
uses the recorded values, so that it continues with the same batches on other hardware, too. Only
the placement, which a resumed run may change, is chosen again if it does not suit the devices.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tba_jax.config.resolved import asked, dtypes_on
from tba_jax.config.schema import Config, get_field, replace
from tba_jax.devices.config import parse_resources
from tba_jax.devices.placement import PlacementError, divide, hosts_of
from tba_jax.devices.platform import platform_of
from tba_jax.models.transformer import TransformerConfig, num_params
from tba_jax.planning import chips, estimates, layouts, sizes
from tba_jax.run.model_parts import describe_model
from tba_jax.run.peers import start_cluster
from tba_jax.search.prompts import PromptReader
from tba_jax.settings import Schedule
from tba_jax.tasks.custom import Custom

if TYPE_CHECKING:
    from tba_jax.devices.cluster import Cluster

DEFAULT_RESPONSE = 256
"""`search.max_new_tokens` of the preset custom, which a model with a small context lowers."""
DEFAULT_HELD_OUT = 256
"""`task.num_eval_prompts` of the preset custom, which a small data set lowers."""
LENGTHS = ("task.max_prompt_tokens", "search.max_new_tokens", "task.num_eval_prompts")
_LOOKED_AT = 2000  # number of prompts whose length is measured, evenly spaced
_MULTIPLE = 32  # programs are compiled for few lengths
_HELD_OUT_SHARE = 5  # at most one in five rows is held out
_MESH = ("mesh.data", "mesh.fsdp", "mesh.expert", "mesh.model", "search.num_devices")
_PLACEMENT = ("num_searchers", "placement", *_MESH)
_RATE = "optimizer.learning_rate"
_OPEN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "task.max_prompt_tokens": (0, LENGTHS),
    "num_searchers": (0, _PLACEMENT),
    "model.compute_dtype": ("auto", ("model.compute_dtype",)),
    "search.num_slots": (0, ("search.num_slots",)),
    _RATE: (Schedule(0.0), (_RATE,)),
    "batch.micro_batch_rows": (0, ("batch.micro_batch_rows",)),
    "model.remat": ("auto", ("model.remat",)),
}
"""Setting -> the value that requests a choice, and the settings that are then chosen."""


def open_settings(config: Config) -> list[str]:
    """Return the settings that a config leaves to the run."""
    return [
        name
        for key, (asks, names) in _OPEN.items()
        if get_field(config, key) == asks
        for name in names
    ]


def choose(config: Config, saved: Mapping[str, Any], *, is_job: bool = False) -> Config:
    """Choose the settings that this process can choose alone; return the config with them.

    `choose_together` chooses the settings that depend on the devices of several hosts.
    `Config.chosen` has the reasons.

    Args:
        saved: fields of the config of the resumed run; empty for a new run.
        is_job: whether the run has several processes, whose devices are not known here.

    Raises:
        ValueError: the data or the model cannot be used.
    """
    if saved:
        return _as_saved(config, saved, is_job)
    changed, reason = with_lengths(config)
    config = _chosen(config, {name: get_field(changed, name) for name in LENGTHS}, reason)
    if config.optimizer.learning_rate == Schedule(0.0):
        config = _with_rate(config)
    if config.placement == "fleet":  # the searchers' devices belong to other processes
        has_accelerator = {"GPU", "TPU"} & (parse_resources(config.fleet.trainer) or {}).keys()
        config = for_platform(config, "accelerators" if has_accelerator else "cpu")
        fields = {"num_searchers": config.num_searchers or 1}
        return _chosen(config, fields, "one searcher for each process of searchers")
    if is_job or not open_settings(config):
        return config
    start_cluster(config)
    import jax

    return _on_attached(config, jax.local_devices())


def choose_together(config: Config, cluster: "Cluster", saved: Mapping[str, Any]) -> Config:
    """Return the config with the choices of process 0 for all devices, equal in every process.

    Raises:
        PlacementError: the placement is impossible on these devices.
    """
    import jax

    facts: dict[str, Any] = {}
    if cluster.is_primary and not saved and (names := open_settings(config)):
        found = _on_attached(config, jax.devices())
        facts = {"chosen": found.chosen, "fields": {name: get_field(found, name) for name in names}}
    facts = cluster.broadcast_json(facts)
    if not facts:
        return config
    reasons = tuple((name, reason) for name, reason in facts["chosen"])
    return dataclasses.replace(replace(config, facts["fields"]), chosen=reasons)


def _on_attached(config: Config, devices: Sequence[Any]) -> Config:
    model_config = describe_model(config, with_weights=False).config
    return on_devices(config, model_config, devices, chips.memory_bytes(devices))


def on_devices(
    config: Config, model_config: TransformerConfig, devices: Sequence[Any], memory_bytes: float
) -> Config:
    """Return a config with all settings chosen that depend on the devices.

    Args:
        config: config with known lengths.

    Raises:
        PlacementError: the placement is impossible on these devices.
    """
    platform = platform_of(devices[0])
    config = for_platform(config, platform)
    if not config.num_searchers:
        config = _placed(config, model_config, devices, memory_bytes)
    found = divide(config.placement, devices, asked(config))
    fields = sizes.choose(
        config,
        model_config,
        found.mesh,
        devices,
        memory_bytes,
        lambda config: estimates.searcher_bytes(config, model_config, devices[0]),
        shares_devices=found.placement == "shared",
    )
    left = open_settings(config)
    about = f"estimated for devices of {memory_bytes / 2**30:.1f} GiB"
    return _chosen(config, {n: x for n, x in fields.items() if n in left}, about)


def for_platform(config: Config, platform: str) -> Config:
    """Return a config with the dtype that is faster on a platform."""
    return _chosen(config, dtypes_on(config, platform), f"the faster dtype on {platform}")


def with_lengths(config: Config) -> tuple[Config, str]:
    """Return a config with all lengths, and a text with the facts from which they were chosen.

    If `task.max_prompt_tokens` is 0, the function sets three limits: prompts are at most as long as
    the longest prompt of the data, responses of the preset's length have at most half of the
    model's context, and of a small data set at most a fifth is held out instead of the preset's
    number of rows. The choice depends only on data,
    model and config, so a resumed run makes the same choice.

    Raises:
        ValueError: the data or the model cannot be used.
    """
    if config.task.max_prompt_tokens:
        return config, ""
    task = dataclasses.replace(config.task, num_eval_prompts=1).open()
    size = task.size("train")
    model = describe_model(config, with_weights=False)
    reader = PromptReader(task, model.load_tokenizer(), sys.maxsize)
    prompts = (reader.read("train", i) for i in range(0, size, max(1, size // _LOOKED_AT)))
    longest = max(len(prompt.tokens) for prompt in prompts if prompt)
    context = model.config.max_positions
    response = config.search.max_new_tokens
    if response == DEFAULT_RESPONSE:  # a user's own limit stays
        response = min(response, context // 2)
    if response >= context:
        raise ValueError(
            f"search.max_new_tokens={response}: the model has a context of {context} tokens, for "
            f"prompt and response together. Set --config.search.max_new_tokens={context // 2}"
        )
    fields = {
        "task.max_prompt_tokens": min(-(-longest // _MULTIPLE) * _MULTIPLE, context - response),
        "search.max_new_tokens": response,
    }
    held_out = config.task.num_eval_prompts
    if held_out == DEFAULT_HELD_OUT and isinstance(task, Custom):
        most = task.most_held_out(1 / _HELD_OUT_SHARE)
        fields["task.num_eval_prompts"] = min(held_out, most or held_out)
    return replace(config, fields), (
        f"prompts of up to {longest} tokens, and a context of {context}"
    )


def lines(config: Config) -> list[str]:
    """Return one line for each reason: the chosen settings, the reason, and a flag to override."""
    found: dict[str, list[str]] = {}
    for name, reason in config.chosen:
        found.setdefault(reason, []).append(f"{name}={get_field(config, name)}")
    return [
        f"chosen: {', '.join(values)} ({reason}). To change it, set e.g. --config.{values[0]}"
        for reason, values in found.items()
    ]


def _chosen(config: Config, fields: Mapping[str, Any], reason: str) -> Config:
    """Return the config with other fields; `chosen` gets the reason for each changed field."""
    news = tuple((n, reason) for n, value in fields.items() if get_field(config, n) != value)
    earlier = (entry for entry in config.chosen if entry[0] not in dict(news))
    return dataclasses.replace(replace(config, fields), chosen=(*earlier, *news))


def _with_rate(config: Config) -> Config:
    """Return the config with a learning rate for the size of the model.

    1e-4 for adapters; for all N parameters 1e-6 sqrt(7e9 / N), which is close to the rates of the
    paper's runs (1e-6 at 7B, 3e-6 at 410M to 2.8B; appendix B).
    """
    rate, about = 1e-4, "for adapters"
    if not config.lora.rank:
        number = num_params(describe_model(config, with_weights=False).config)
        rate = float(f"{1e-6 * math.sqrt(7e9 / number):.1e}")
        about = f"for {number:,} parameters"
    schedule = Schedule(rate, 0.0, shape="linear", warmup=min(10, config.num_steps // 2))
    return _chosen(config, {_RATE: schedule}, about)


def _placed(
    config: Config, model_config: TransformerConfig, devices: Sequence[Any], memory_bytes: float
) -> Config:
    """Return a config with searchers on the devices that the trainer does not use."""
    about = f"{len(devices)} devices"
    if config.placement == "auto" and all(get_field(config, name) == 1 for name in _MESH):
        placed, _ = layouts.choose(config, model_config, devices, memory_bytes)
        return _chosen(config, {name: get_field(placed, name) for name in _PLACEMENT}, about)
    left = len(devices) - asked(config).mesh.size
    several_hosts = len(hosts_of(devices)) > 1
    searchers = 1 if several_hosts else max(1, left // config.search.num_devices)
    return _chosen(config, {"num_searchers": searchers}, about)


def _as_saved(config: Config, saved: Mapping[str, Any], is_job: bool) -> Config:
    """Return the config with the recorded choices of the resumed run.

    The placement is chosen again if it is invalid for the current devices.
    """
    has_open_placement = not config.num_searchers
    names = [name for name in open_settings(config) if name in saved]
    config = replace(config, {name: saved[name] for name in names})
    if is_job or not has_open_placement or config.placement == "fleet":
        return config
    start_cluster(config)
    import jax

    devices = jax.local_devices()
    try:
        divide(config.placement, devices, asked(config), devices[0].process_index)
        return config
    except PlacementError:
        fresh = dict.fromkeys(_MESH, 1) | {"placement": "auto", "num_searchers": 0}
        model_config = describe_model(config, with_weights=False).config
        again = _placed(replace(config, fresh), model_config, devices, chips.memory_bytes(devices))
        # A resumed run keeps its number of searchers; with too few devices, they share devices.
        kept = {"num_searchers": saved["num_searchers"], "placement": "auto"}
        return replace(again, kept)
