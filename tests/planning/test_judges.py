# SPDX-License-Identifier: Apache-2.0
"""Models that give rewards or judge have rows in a plan: bytes, and the run's own programs."""

import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from tba_jax.config.rules import validate
from tba_jax.config.schema import freeze, plain, replace
from tba_jax.models import encoder
from tba_jax.models.hf import config_json
from tba_jax.models.transformer import num_params
from tba_jax.planning import command as plan
from tba_jax.planning import compile_one, judges
from tba_jax.planning.children import Answer
from tba_jax.planning.model_shapes import PUBLISHED, published_config
from tba_jax.run import model_parts

CONFIGS = Path(__file__).parents[2] / "configs"
ROBERTA = {
    "model_type": "roberta",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 34,
    "type_vocab_size": 1,
    "id2label": {"0": "kind", "1": "hate"},
}
BERT = ROBERTA | {"model_type": "bert", "type_vocab_size": 2}


def mesh_of(num):
    return Mesh(jax.devices()[:num], ("model",))


def preset(file, name, **fields):
    config = freeze(runpy.run_path(str(CONFIGS / f"{file}.py"))["get_config"](name))
    return replace(config, {"num_cpu_devices": 1, **fields})


def in_process(request, *, timeout_s):
    del timeout_s
    return Answer(json.loads(json.dumps(compile_one.answer(request))))


def planned(config, models):
    """(description, planner) of a config on this process's devices."""
    validate(config)
    model, _ = published_config(model_parts.model_path(config))
    request = {"topology": "", "model": model, "judges": models, "cache": ""}
    planner = plan.Planner(request, 60.0, in_process)
    return planner.describe(plain(config), chooses=False), planner


@pytest.mark.parametrize(
    ("file", "name", "roles"),
    [
        ("math", "arithmetic", []),
        ("tldr", "toy", ["reward model"]),
        ("tldr", "pythia1b", ["reward model", "gold reward model"]),
        ("redteam", "toy", ["victim"]),
        ("redteam", "llama", ["victim", "classifier", "sentence embedder"]),
    ],
)
def test_every_model_that_a_config_names_has_a_role_and_a_published_shape(file, name, roles):
    paths = judges.judge_paths(preset(file, name))
    assert list(paths) == roles
    for path in paths.values():
        is_local = path.startswith("embedded:") or Path(path).is_dir()
        assert is_local or path in PUBLISHED, path


def test_a_reward_model_is_counted_and_scores_responses():
    config = preset("tldr", "toy", placement="split")
    path = config.reward.model_path
    facts, planner = planned(config, {"reward model": published_config(path)[0]})
    searcher = facts["groups"]["searcher"]
    size = num_params(config_json.transformer_config(published_config(path)[0]))
    assert searcher["judges"] == ["reward model"]
    assert searcher["residents"]["reward model"] == 4 * size
    assert "sentence embedder" not in facts["groups"]["trainer"]["residents"]
    score = planner.compile(facts, "score_reward")
    assert score.hbm["reward model"] == 4 * size and score.calls_per_round == 1
    # Rows of 64 tokens, 128 of them: two FLOPs a weight and token at least, tables left out.
    assert score.flops > 128 * 64 * size
    distance = planner.compile(facts, "reference_distance")
    assert not distance.failure and distance.num_bytes > 0


def test_victim_classifier_and_embedder_are_counted_and_compile():
    config = preset(
        "redteam",
        "toy",
        placement="split",
        **{
            "classifier.kind": "encoder",
            "classifier.path": "somewhere",
            "classifier.target": "hate",
            "eval.embedding_path": "elsewhere",
        },
    )
    victim = published_config(judges.judge_paths(config)["victim"])[0]
    models = {"victim": victim, "classifier": ROBERTA, "sentence embedder": BERT}
    facts, planner = planned(config, models)
    held = facts["groups"]["searcher"]["residents"]
    assert held["victim"] == 4 * num_params(config_json.transformer_config(victim))
    tree = encoder.abstract_params(encoder.encoder_config(ROBERTA), jnp.float32)
    assert held["classifier"] == sum(4 * x.size for x in jax.tree.leaves(tree))
    assert facts["groups"]["trainer"]["residents"]["sentence embedder"] > 0
    # 64 attacks x 3 responses of 3 tokens, 192 slots, 8 steps a chunk; 64 rows a classification.
    wanted = {"victim_prefill": 1, "victim_admit": 0, "victim_chunk": 3 / 8, "classify": 3}
    found = {p["name"]: p["calls_per_round"] for p in facts["programs"]}
    assert {name: found[name] for name in wanted} == wanted
    for name in ("victim_chunk", "classify", "embed_attacks"):
        compiled = planner.compile(facts, name)
        assert not compiled.failure and compiled.flops > 0, name


def test_a_guard_is_a_language_model():
    config = preset(
        "redteam",
        "toy",
        placement="split",
        **{"classifier.kind": "guard", "classifier.path": "x", "classifier.target": "unsafe"},
    )
    start, _ = published_config(str(model_parts.START_MODEL))
    facts, planner = planned(config, {"victim": start, "classifier": start})
    size = facts["groups"]["searcher"]["residents"]["classifier"]
    assert size == 4 * num_params(config_json.transformer_config(start))
    assert not planner.compile(facts, "classify").failure


def test_a_reward_model_without_a_score_is_refused():
    start, _ = published_config(str(model_parts.START_MODEL))
    with pytest.raises(ValueError, match="the reward model must be a sequence classifier"):
        judges.judge_residents(preset("tldr", "toy"), {"reward model": start}, mesh_of(1))


def test_reward_models_are_divided_over_a_searcher_and_have_dtypes_of_their_own():
    config = preset("tldr", "pythia410m")
    models = {role: PUBLISHED[path] for role, path in judges.judge_paths(config).items()}
    alone = judges.judge_residents(config, models, mesh_of(1))["searcher"]
    divided = judges.judge_residents(config, models, mesh_of(4))["searcher"]
    size = num_params(config_json.transformer_config(models["gold reward model"]))
    assert alone["gold reward model"] == 4 * size  # on CPU devices
    assert alone["reward model"] == 4 * 353_823_744  # float32
    for role, whole in alone.items():
        assert whole / 4 <= divided[role] < whole / 3, role  # norms and tables stay whole
    with pytest.raises(ValueError, match="Set that axis to one of"):
        judges.judge_residents(config, models, mesh_of(3))


def test_published_shapes_of_judges_are_the_models_they_name():
    sizes = {
        "mnoukhov/pythia410m-rm-tldr6.9b": 353_823_744,
        "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
        "meta-llama/Llama-Guard-3-8B": 8_030_261_248,
    }
    for name, size in sizes.items():
        assert num_params(config_json.transformer_config(PUBLISHED[name])) == size, name
    # As transformers counts them; MiniLM without its pooler, which nothing reads.
    sizes = {
        "facebook/roberta-hate-speech-dynabench-r4-target": 124_647_170,
        "sentence-transformers/all-MiniLM-L6-v2": 22_565_376,
    }
    for name, size in sizes.items():
        tree = encoder.abstract_params(encoder.encoder_config(PUBLISHED[name]), jnp.float32)
        assert sum(x.size for x in jax.tree.leaves(tree)) == size, name
