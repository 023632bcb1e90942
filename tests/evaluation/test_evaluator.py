# SPDX-License-Identifier: Apache-2.0
"""Evaluation: pass@k, the headline, metric functions, and that the same weights give the same."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from fake_models import start_model
from fake_search import ByFunction

from tba_jax.config.schema import make_config
from tba_jax.evaluation.evaluator import pass_at_k
from tba_jax.flow.tickets import EvaluationShard
from tba_jax.run.model_parts import make_decoder
from tba_jax.run.shared import make_evaluator, make_grader, make_shard_evaluator
from tba_jax.search.prompts import PromptReader
from tba_jax.tasks.arithmetic import Arithmetic

# 1 where a response is longer than four characters; none where it is empty.
LONG = ByFunction(lambda text, ids: float(len(text) > 4) if text else None)


@pytest.fixture(scope="module")
def model():
    return start_model()


def evaluator(model, task=None, metrics=(), measures=(), **changes):
    """(evaluator, evaluator of its shards); test_searcher.py decodes with the same programs."""
    sizes = {"task.num_eval_prompts": 6, "task.max_prompt_tokens": 12}
    sizes |= {"search.max_new_tokens": 8, "search.num_slots": 6}
    config = make_config({**sizes, **changes})
    task = task or Arithmetic()
    decoder = make_decoder(config, model[0], model[2])
    grader = make_grader(make_config({}), task, model[2], LONG)
    answer = make_shard_evaluator(config, decoder, grader, measures, None).evaluate
    reader = PromptReader(task, model[2], config.task.max_prompt_tokens)
    return dataclasses.replace(make_evaluator(config, reader), metrics=tuple(metrics)), answer


def evaluate(model, *args, **changes):
    """The result of all shards, one after the other."""
    whole, answer = evaluator(model, *args, **changes)
    return whole.merge([answer(model[1], ticket) for ticket in whole.tickets(0)])


def test_pass_at_k_is_the_share_of_subsets_with_a_right_response():
    rng = np.random.default_rng(0)
    rewards = (rng.random((5, 6)) < 0.3).astype(float).tolist()
    got = pass_at_k(rewards)
    assert list(got) == ["pass_at_1", "pass_at_2", "pass_at_4"]
    for k in (1, 2, 4):
        # The definition itself: every way to choose k of the n samples.
        subsets = [max(s) for row in rewards for s in itertools.combinations(row, k)]
        assert got[f"pass_at_{k}"] == pytest.approx(np.mean(subsets), abs=1e-12)
    assert pass_at_k([[None], [1.0]]) == {"pass_at_1": 0.5}


def test_metric_functions_get_the_responses_and_may_be_the_headline(model):
    class Lengths(Arithmetic):
        metric = "long_share"

    seen = []

    def long_share(responses):
        seen.append(responses)
        return {"long_share": np.mean([[len(t) > 4 for t in row] for row in responses.texts])}

    changes = {"eval.num_samples": 3, "eval.temperature": 1.0}
    run = evaluate(model, Lengths(), [long_share], **changes)
    responses = seen[0]
    assert responses.tokens.shape[:2] == np.shape(responses.rewards) == (6, 3)
    for (i, j), n in np.ndenumerate(responses.lengths):
        assert [responses.texts[i][j]] == model[2].batch_decode([responses.tokens[i, j, :n]])
    values = run.metrics()
    assert values["metric"] == "long_share" and values["n"] == 6
    assert values["long_share"] == pytest.approx(values["reward_mean"])
    assert "pass_at_1" not in values
    assert run.texts == [row[0] for row in responses.texts]
    assert len({t for row in responses.texts for t in row}) > 6  # sampled, not greedy


def test_of_an_only_prompt_every_response_is_a_trial_and_an_example(model):
    sampled = {"eval.num_samples": 3, "eval.temperature": 1.0}
    got = evaluate(model, **sampled, **{"task.num_eval_prompts": 1})
    assert (got.n, got.num_trials, len(got.texts), len(got.rewards)) == (1, 3, 3, 3)
    # Responses to one prompt are not independent of one another where there are several prompts.
    got = evaluate(model, **sampled)
    assert (got.n, got.num_trials, len(got.texts)) == (6, 6, 6)


def length_of_first(params, responses):
    """A measure: tokens of each prompt and of each response to it."""
    lengths = responses.lengths.tolist()
    sizes = [[len(p.tokens)] * len(row) for p, row in zip(responses.prompts, lengths, strict=True)]
    return {"prompt": sizes, "response": lengths}


def sums(responses):
    return {name: np.sum(values) for name, values in responses.measured.items()}


@pytest.mark.parametrize(
    ("size", "changes"), [(6, {}), (3, {"eval.num_samples": 2, "eval.temperature": 1.0})]
)
def test_an_evaluation_in_shards_has_the_figures_of_the_whole(model, size, changes):
    """All problems at once, and in shards of this size, the last of which has one."""
    common = {"task.num_eval_prompts": 2 * size + 1, **changes}
    n = changes.get("eval.num_samples", 1)
    at_once = {"search.num_slots": 14}
    wanted = evaluate(model, None, [sums], (length_of_first,), **common, **at_once)
    whole, answer = evaluator(model, None, [sums], (length_of_first,), **common)
    tickets = whole.tickets(5)
    found = [(t.version, t.first, len(t.prompts)) for t in tickets]
    assert found == [(5, 0, size), (5, size, size), (5, 2 * size, 1)]
    shards = [answer(model[1], tickets[i]) for i in (2, 0, 1)]
    assert whole.merge(shards) == wanted
    assert whole.merge([EvaluationShard(*json.loads(json.dumps(x))) for x in shards]) == wanted
    # A reward may log a value for some responses only.
    rare = [[0.5] * n, *[[math.nan] * n] * (size - 2), [1.0] * n]
    shards[1] = shards[1]._replace(parts={"rare": rare})
    assert whole.merge(shards).values["reward_part_rare"] == 0.75


def test_a_headline_without_a_metric_function_is_refused(model):
    class Missing(Arithmetic):
        metric = "win_rate"

    with pytest.raises(ValueError, match="'win_rate' is not among the metrics of"):
        evaluate(model, Missing())
