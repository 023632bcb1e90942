# SPDX-License-Identifier: Apache-2.0
"""A searcher that samples a tiny model, with rewards by a function."""

import numpy as np
from fake_models import ONE_LAYER, random_params, tiny_decoder
from fake_tickets import House

from tba_jax.flow.trajectory import Prompt
from tba_jax.models.transformer import unstack_layers
from tba_jax.rewards.scores import Grader, Score
from tba_jax.search.config import SearchSettings
from tba_jax.search.sampler import Sampler
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.weights.publication import Published


class ByFunction:
    """Rewards by a function of (text, token IDs), None of which has the reason "none"."""

    def __init__(self, function):
        self.function = function

    async def score(self, completions):
        rewards = [self.function(x.text, x.ids) for x in completions]
        return [Score(r, "none" if r is None else None) for r in rewards]


FIRST_TOKEN = ByFunction(lambda text, ids: float(ids[0]))


def grader_of(reward):
    """Grades by tokens alone: every text is "x"."""
    return Grader(reward, lambda rows: ["x"] * len(rows), lambda text: None, "")


def make_searcher(owner, sampler, grader, weights, **changes):
    """A searcher without evaluations or given responses, unless `changes` has them."""
    parts = {"index": 0, "evaluated": lambda version: None, "evaluator": None, "given": None}
    parts |= {"sampler": sampler, "grader": grader, "weights": weights}
    return Searcher(SearchParts(**parts | changes), owner)


class OneToken:
    """Prompt n has the token 1 + n."""

    def from_number(self, number):
        return number, Prompt(number, f"p{number}", np.array([1 + number], np.int32), {})


class World:
    """A searcher with four slots, and the owner of its tickets of two responses.

    Args:
        num_tokens: largest length of a response; a chunk has four tokens.
        eos_ids: tokens that end a response.
        reward: of responses.
        in_flight: whether newer weights are loaded between chunks.
    """

    def __init__(self, num_tokens=12, *, eos_ids=(), reward=FIRST_TOKEN, in_flight=True):
        self.version, self.house = 0, House(1, prompts=OneToken())
        self.owner = self.house.owner
        settings = SearchSettings(samples_per_prompt=2, num_slots=4, max_new_tokens=num_tokens)
        sampler = Sampler(tiny_decoder(eos_ids=eos_ids), settings, np.zeros(2, np.uint32))
        params = unstack_layers(random_params(ONE_LAYER), ONE_LAYER)
        self.searcher = make_searcher(
            self.owner,
            sampler,
            grader_of(reward),
            lambda: Published(self.version, params),
            swaps_in_flight=in_flight,
        )

    def run(self, num_chunks):
        """Results of the chunks, by ticket number."""
        for _ in range(num_chunks):
            self.searcher.step()
            self.searcher.grade()
        return self.owner._results
