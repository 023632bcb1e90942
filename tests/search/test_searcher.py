# SPDX-License-Identifier: Apache-2.0
"""A searcher's rounds: given responses come first, scored like drawn ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import load_folder

from tba_jax.config.schema import make_config
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.scoring import Scoring
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import unstack_layers
from tba_jax.replay.outbox import Outbox
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import ScoreResult
from tba_jax.run.model_parts import START_MODEL, make_decoder
from tba_jax.search.prompts import PromptStream
from tba_jax.search.sampler import Sampler
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.search.start_data import GivenGroup, StartData, make_start_program
from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.weights.transport import Published


class LengthReward:
    """The number of characters; none for the response "9"."""

    def score(self, prompts, completions, columns, *, completion_ids, has_eos):
        assert len(prompts) == len(completions) == len(columns["answer"]) == len(has_eos)
        rewards = [None if text == "9" else float(len(text)) for text in completions]
        return ScoreResult(rewards, ["nine" if r is None else None for r in rewards], "")


class LengthReference:
    """Minus the prompt's length and a tenth of the response's."""

    def __init__(self):
        self.shapes = []

    def __call__(self, tokens, prompt_lengths, response_lengths, response_bucket, is_sampled):
        self.shapes.append(tokens.shape)
        return jnp.asarray(-prompt_lengths[:, None] - response_lengths / 10)


@pytest.fixture(scope="module")
def model():
    config, params, _ = load_folder(str(START_MODEL), param_dtype=jnp.float32)
    return config, unstack_layers(params, config), Tokenizer.load(str(START_MODEL))


def make_searcher(model, given_texts):
    """(searcher of rounds of 2 prompts with 3 responses, its outbox, stream and reference)."""
    model_config, params, tokenizer = model
    config = make_config(
        {
            "task.max_prompt_tokens": 12,
            "search.max_new_tokens": 8,
            "search.prompts_per_round": 2,
            "search.samples_per_prompt": 3,
        }
    )
    groups = []
    for index, texts in given_texts:
        text, columns = Arithmetic().train_problem(index)
        prompt = Prompt(index, text, tokenizer.encode(text, add_bos=True), columns)
        ids = [np.append(tokenizer.encode(x, add_bos=False), tokenizer.eos_ids[0]) for x in texts]
        groups.append(GivenGroup(prompt, tuple(ids)))
    program = make_start_program(
        model_config, Scoring(eos_ids=tokenizer.eos_ids, chunk_tokens=64), max_new_tokens=8
    )
    sizes = {"prompts_per_round": 2, "samples_per_prompt": 3}
    padding = Padding((12,), (8,), tokenizer.pad_id)
    given = StartData(groups, program, **sizes, temperature=1.0, padding=padding)
    stream = PromptStream(
        Arithmetic(),
        tokenizer,
        searcher=0,
        num_searchers=1,
        ownership="any",
        seed=0,
        max_prompt_tokens=12,
        long_prompts="refuse",
    )
    outbox, reference = Outbox(2**20), LengthReference()
    parts = SearchParts(
        index=0,
        stream=stream,
        weights=lambda: Published(0, params),
        sampler=Sampler(
            make_decoder(config, model_config, tokenizer), config.search, jax.random.key(0), 0
        ),
        grader=Grader(LengthReward(), tokenizer.batch_decode, lambda text: None, ""),
        reference=reference,
        padding=padding,
        outbox=outbox,
        clock=lambda: 0.0,
    )
    return Searcher(parts, given), outbox, stream, reference


def test_given_responses_are_scored_in_the_first_rounds_and_then_it_draws(model):
    given = [(5, ("1", "22", "9")), (2, ("333",)), (5, ("4444",))]
    searcher, outbox, stream, reference = make_searcher(model, given)
    decode = model[2].decode
    assert (searcher.num_given, searcher.num_given_rounds_left) == (5, 2)
    before = stream.state()
    searcher.step()
    searcher.step()
    assert searcher.num_given_rounds_left == 0
    assert stream.state() == before and searcher.decoded_tokens == 0
    first, second = outbox.take()
    assert [(c.round, c.generated, c.prompt_state) for c in (first, second)] == [
        (0, 4, before),
        (1, 1, before),
    ]
    a, b = first.groups
    (c,) = second.groups
    assert [[(decode(y.response_tokens), y.reward) for y in g.trajectories] for g in (a, b, c)] == [
        [("1", 1.0), ("22", 2.0)],
        [("333", 3.0)],
        [("4444", 4.0)],
    ]
    assert [g.rejected for g in (a, b, c)] == [{"nine": 1}, {}, {}]
    assert [g.prompt.prompt_id for g in (a, b, c)] == [5, 2, 5]
    for y in (*a.trajectories, *b.trajectories, *c.trajectories):
        prompt = {5: a, 2: b}[y.prompt_id].prompt
        length = len(y.response_tokens)
        assert y.finish_reason == "eos" and y.sampling_temperature == 1.0
        assert (
            y.behavior_token_logprobs.shape == (length,) and (y.behavior_token_logprobs < 0).all()
        )
        assert y.reference_logprob == pytest.approx(-len(prompt.tokens) - length / 10)
        assert (y.version_min, y.version_max, y.searcher) == (0, 0, 0)

    searcher.step()
    (drawn,) = outbox.take()
    assert (drawn.round, drawn.generated) == (2, 6)
    assert stream.state() == drawn.prompt_state != before and searcher.decoded_tokens > 0
    # Full and partial rounds of given responses compile no program of their own.
    assert set(reference.shapes) == {(3, 20)}
