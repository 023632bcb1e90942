# SPDX-License-Identifier: Apache-2.0
"""Models besides the policy that score or judge responses: their programs and memory.

These models are the reward model, gold reward model, victim, classifier, sentence embedder, and the
start model that an evaluation compares with. Reward models and the start model are sharded over the
devices of a searcher, the gold model over the devices of the first searcher, which evaluates. Each
searcher has whole copies of victim and classifier on its first device; the trainer's first device
has the embedder. The programs are those of the run, lowered from shapes.

Invariant: the memory of every model that the run loads is counted.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from tba_jax.config.schema import Config
from tba_jax.decoding import lowering
from tba_jax.decoding.session import PREFILL_TOKENS
from tba_jax.devices.platform import platform_of
from tba_jax.devices.sharding import Placement, placed_shapes
from tba_jax.devices.site import Site
from tba_jax.evaluation.attacks import make_embed_program
from tba_jax.evaluation.metrics import distance_rows, make_distance_program
from tba_jax.models import encoder
from tba_jax.models.hf import config_json
from tba_jax.models.shardings import on_mesh, param_shardings
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.planning.estimates import shard_bytes
from tba_jax.planning.programs import Ids, Planned, abstract_reference, abstract_weights, sizes_of
from tba_jax.rewards.classifiers import classify_program, verdict_program
from tba_jax.rewards.config import (
    ENCODER_TOKENS,
    GUARD_TOKENS,
    JUDGE_ROWS,
    VICTIM_NEW_TOKENS,
    VICTIM_SAMPLES,
    VICTIM_SLOTS,
)
from tba_jax.rewards.kinds import kind_of
from tba_jax.rewards.reward_models import LENGTH_STEP, gold_dtype, make_score_program
from tba_jax.rewards.victim import make_victim_decoder, max_prompt_tokens
from tba_jax.run import model_parts
from tba_jax.tasks.registry import entry_of

# Tokens of a guard's verdict ("\n\nunsafe" has two in Llama-Guard's vocabulary). The real number
# needs the tokenizer; one token more or less hardly changes the program.
_VERDICT_TOKENS = 2
# sizes of `attacks.SentenceEmbedder`
_EMBED_ROWS, _EMBED_TOKENS = 64, 128


def judge_paths(config: Config) -> dict[str, str]:
    """Return role -> model folder or hub ID of every model that computes rewards or metrics."""
    task = entry_of(config.task.name)
    named = {
        **kind_of(config, config.task.reward, task.task.reward, config.task.name).models(config),
        "gold reward model": config.eval.gold_model,
        "sentence embedder": config.eval.embedding_path if "attacks" in task.metrics else "",
    }
    return {role: path for role, path in named.items() if path}


def judge_residents(
    config: Config, models: Mapping[str, Mapping[str, Any]], mesh: Mesh
) -> dict[str, dict[str, float]]:
    """Return group -> role -> bytes on the device of the group that has the most.

    Args:
        models: role -> contents of config.json.

    Raises:
        ValueError: a model has the wrong kind for its role, or the mesh does not divide it.
    """
    held: dict[str, dict[str, float]] = {"trainer": {}, "searcher": {}}
    for role in models:
        group = "trainer" if role == "sentence embedder" else "searcher"
        held[group][role] = shard_bytes(_params(role, config, models[role], mesh))
    return held


def plan_judges(
    config: Config,
    model_config: TransformerConfig,
    models: Mapping[str, Mapping[str, Any]],
    placement: Placement,
) -> list[Planned]:
    """Return the programs of the models that score or judge."""
    sizes = sizes_of(config)
    rows = sizes.round_prompts * sizes.samples
    mesh = placement.searcher_meshes[0]
    device, found = mesh.devices.flat[0], []
    if "reward model" in models:
        longest = config.task.max_prompt_tokens + config.search.max_new_tokens
        found.append(_scores("reward model", "score_reward", config, models, mesh, longest, rows))
    if "gold reward model" in models:
        longest = config.task.max_prompt_tokens + config.search.max_new_tokens
        found.append(_scores("gold reward model", "score_gold", config, models, mesh, longest, 0))
    if "victim" in models:
        found += _victim(config, models["victim"], device, rows)
    if "classifier" in models:
        found.append(_classifier(config, models["classifier"], mesh, rows))
    if "sentence embedder" in models:
        found.append(_embedder(config, models, placement.trainer_mesh))
    if config.eval.reference_metrics:
        found.append(_distance(config, model_config, placement))
    return found


def _dtype(role: str, config: Config, mesh: Mesh) -> str:
    return {
        "reward model": config.reward.dtype,
        "gold reward model": gold_dtype(Site(mesh)).name,
        "victim": config.reward.dtype,
        "classifier": config.reward.dtype,
        "sentence embedder": "float32",
    }[role]


def _params(role: str, config: Config, model: Mapping[str, Any], mesh: Mesh) -> Any:
    """Return the shapes of a model's parameters, sharded as the run loads them.

    The run divides some models over the mesh, and loads others on its first device.
    """
    dtype = jnp.dtype(_dtype(role, config, mesh))
    is_divided = role.endswith("reward model")
    if role == "sentence embedder" or (
        role == "classifier" and config.classifier.kind == "encoder"
    ):
        tree = encoder.abstract_params(encoder.encoder_config(model), dtype)
    else:
        shape = config_json.transformer_config(model)
        if bool(shape.num_labels) != is_divided:
            wanted = "a sequence classifier" if is_divided else "a language model"
            raise ValueError(
                f"the {role} must be {wanted}, but its config.json describes "
                f"another kind of model; set a path to {wanted}"
            )
        tree = abstract_params(shape, dtype)
        if is_divided:
            return placed_shapes(tree, on_mesh(mesh, param_shardings(shape, mesh)))
    first = SingleDeviceSharding(mesh.devices.flat[0])
    return placed_shapes(tree, jax.tree.map(lambda _: first, tree))


def _ints(*shape: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _scores(
    role: str,
    name: str,
    config: Config,
    models: Mapping[str, Mapping[str, Any]],
    mesh: Mesh,
    longest: int,
    rows: int,
) -> Planned:
    shape = config_json.transformer_config(models[role])
    params = _params(role, config, models[role], mesh)
    program = make_score_program(shape, _dtype(role, config, mesh), Site(mesh))
    width = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, shape.max_positions)
    size = JUDGE_ROWS
    return Planned(
        name=name,
        group="searcher",
        sizes=f"{size} responses, {width} tokens",
        lower=lambda: program.lower(params, _ints(size, width), _ints(size)),
        resident={role: shard_bytes(params)},
        variants=-(-width // LENGTH_STEP),
        calls_per_round=-(-rows // size),
    )


def _victim(config: Config, model: Mapping[str, Any], device: Any, attacks: int) -> list[Planned]:
    dtype = config.reward.dtype
    shape = config_json.transformer_config(model)
    longest = max_prompt_tokens(shape)
    decoder = make_victim_decoder(
        shape,
        dtype=dtype,
        eos_ids=Ids().eos_ids,
        pad_id=Ids().pad_id,
        platform=platform_of(device),
    )
    weights = lowering.abstract_weights(shape, jnp.dtype(dtype), SingleDeviceSharding(device))
    slots = min(attacks * VICTIM_SAMPLES, VICTIM_SLOTS)
    prompts = max(1, min(-(-slots // VICTIM_SAMPLES), PREFILL_TOKENS // longest))
    columns, buckets = decoder.cache_length, len(decoder.prompt_buckets)
    lowered = dict(
        lowering.lower_all(
            decoder,
            weights,
            num_slots=slots,
            prompt_length=longest,
            prefill_prompts=prompts,
        )
    )
    held = {"victim": shard_bytes(weights)}
    in_slots = f"{slots} slots of {columns} columns"
    # Responses are assumed to have half of the maximum length, as for the searchers.
    chunks = attacks * VICTIM_SAMPLES * VICTIM_NEW_TOKENS / 2 / slots / decoder.chunk_steps
    return [
        Planned(
            name="victim_prefill",
            group="searcher",
            sizes=f"{prompts} prompts of {longest} tokens",
            lower=lowered["prefill"],
            resident=held,
            variants=buckets,
            calls_per_round=-(-attacks // prompts),
        ),
        Planned(
            name="victim_admit",
            group="searcher",
            sizes=in_slots,
            lower=lowered["admit"],
            resident={},
            variants=buckets,
        ),
        Planned(
            name="victim_chunk",
            group="searcher",
            sizes=f"{in_slots}, {decoder.chunk_steps} steps",
            lower=lowered["chunk_truncated"],
            resident=held,
            unknown_trips=decoder.chunk_steps,
            calls_per_round=chunks,
        ),
    ]


def _classifier(config: Config, model: Mapping[str, Any], mesh: Mesh, attacks: int) -> Planned:
    dtype, rows = config.reward.dtype, JUDGE_ROWS
    params = _params("classifier", config, model, mesh)
    arguments: tuple[Any, ...]
    if config.classifier.kind == "encoder":
        shape = encoder.encoder_config(model)
        length = min(ENCODER_TOKENS, shape.max_tokens)
        program = classify_program(shape, dtype)
        arguments = _ints(rows, length), _ints(rows, length, dtype=jnp.bool_)
    else:
        decoder = config_json.transformer_config(model)
        length = min(GUARD_TOKENS, decoder.max_positions - _VERDICT_TOKENS)
        program = verdict_program(decoder, _VERDICT_TOKENS, dtype, Site(mesh).platform)
        arguments = _ints(rows, length + _VERDICT_TOKENS), _ints(rows)
    return Planned(
        name="classify",
        group="searcher",
        sizes=f"{rows} responses, {length} tokens",
        lower=lambda: program.lower(params, *arguments),
        resident={"classifier": shard_bytes(params)},
        variants=3,
        calls_per_round=-(-attacks * VICTIM_SAMPLES // rows),
    )


def _embedder(config: Config, models: Mapping[str, Mapping[str, Any]], mesh: Mesh) -> Planned:
    model = models["sentence embedder"]
    shape = encoder.encoder_config(model)
    params = _params("sentence embedder", config, model, mesh)
    length = min(_EMBED_TOKENS, shape.max_tokens)
    program = make_embed_program(shape)
    return Planned(
        name="embed_attacks",
        group="trainer",
        sizes=f"{_EMBED_ROWS} attacks, {length} tokens",
        lower=lambda: program.lower(
            params, _ints(_EMBED_ROWS, length), _ints(_EMBED_ROWS, length, dtype=jnp.bool_)
        ),
        resident={"sentence embedder": shard_bytes(params)},
        variants=3,
    )


def _distance(config: Config, model_config: TransformerConfig, placement: Placement) -> Planned:
    sizes = sizes_of(config)
    scoring = model_parts.make_rollout_scoring(config, Ids().eos_ids)
    program = make_distance_program(model_config, scoring, Site(placement.searcher_meshes[0]))
    weights = abstract_weights(config, model_config, placement, config.search.quantization)
    # A searcher's own reference is used if there is one.
    reference = (
        abstract_reference(config, model_config, placement)
        if config.reference.placement == "searcher"
        else abstract_weights(config, model_config, placement)
    )
    t = config.search.max_new_tokens
    responses = (config.task.num_eval_prompts or 2**31) * config.eval.num_samples
    rows = distance_rows(responses, t, model_config.vocab_size)
    return Planned(
        name="reference_distance",
        group="searcher",
        sizes=f"{rows} responses of {t} tokens",
        lower=lambda: program.lower(
            weights, reference, _ints(rows, sizes.prompt + t), _ints(rows), _ints(rows), t=t
        ),
        resident={
            "parameters": shard_bytes(weights),
            "reference parameters": shard_bytes(reference),
        },
        variants=model_parts.make_padding(config, 0, t).num_shapes,
    )
