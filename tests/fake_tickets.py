# SPDX-License-Identifier: Apache-2.0
"""An owner with a clock of its own, its prompts, and results of its tickets."""

import json
import types

from fake_groups import make_buffer, make_groups, make_prompt

from tba_jax.flow.state import PartState
from tba_jax.flow.tickets import EvaluationShard, EvaluationTicket, Report, Result
from tba_jax.remote.evaluation_queue import EvaluationQueue
from tba_jax.remote.owner import Owner, OwnerSettings

IDENTITY = "1/r"
S = 2  # responses of a ticket


def make_report(**means):
    """Of half a second in which four tokens were drawn."""
    return Report(4, {"reward_mean": 0.25, **means}, 0.5, 0.25, 0.125)


def make_result(number, version=0, searcher=0, prompt_id=None, **changes):
    """A ticket's result; its prompt has the ticket's number."""
    responses = {number if prompt_id is None else prompt_id: [[5, number + 1], [6]]}
    (group,) = make_groups(responses, ticket=number, version=version, searcher=searcher, **changes)
    return Result(number, version, group, make_report())


class Numbered:
    """Prompt n is of ticket n; those in `long` are left out."""

    def __init__(self, long=()):
        self.long = long

    def from_number(self, number):
        while number in self.long:
            number += 1
        return number, make_prompt(number)


class Shards:
    """Five shards of one prompt, whose figures are their numbers and who answered."""

    def tickets(self, version):
        return [EvaluationTicket(version, i, (make_prompt(i),)) for i in range(5)]

    def merge(self, shards):
        return sorted((shard.first, shard.texts[0][0]) for shard in shards)


def shard_of(ticket, who):
    fields = ([[[1]]], [[True]], [[who]], [[1.0]], [[False]], {}, {})
    return EvaluationShard(ticket.first, *fields)


class House:
    """The owner's process; `restore` makes the next one from the newest checkpoint."""

    def __init__(self, num_searchers=2, *, prompts=None, given=(), **settings):
        self.now, self.lines, self.step = 0.0, [], 0
        self.num_searchers, self.prompts, self.given = num_searchers, prompts or Numbered(), given
        self.num_prompts = settings.pop("num_prompts", 4)
        self.settings = {"share": 1.0, "max_staleness": 0, "initial_fill": 0} | settings
        self.open()
        self.save()

    def open(self):
        self.merged = []  # numbers of tickets, in the order of the merges
        self.buffer = make_buffer(recency_prob=1.0)
        self.evaluations = EvaluationQueue(Shards())
        settings = OwnerSettings(
            identity=IDENTITY,
            num_searchers=self.num_searchers,
            num_local=0,
            samples_per_prompt=S,
            **self.settings,
        )
        self.owner = Owner(
            settings,
            types.SimpleNamespace(merge=self._merge, check_ledger=self._check, num_fresh_groups=0),
            self.prompts.from_number,
            self.evaluations,
            types.SimpleNamespace(num_prompts=self.num_prompts),
            given=self.given,
            clock=lambda: self.now,
            log=self.lines.append,
        )

    def _merge(self, groups, step):
        for group in groups:
            assert len(group.trajectories) + sum(group.rejected.values())
            self.merged.append(group.trajectories[0].ticket)

    def _check(self, waiting, generated):
        assert generated == waiting + S * len(self.merged)

    def merge(self, **options):
        return self.owner.merge(self.step, **options)

    def save(self):
        state = self.owner.state()
        self.saved = state.arrays, json.loads(json.dumps(state.meta)), list(self.merged)

    def restore(self):
        """The next owner of the run, from the newest checkpoint."""
        arrays, meta, merged = self.saved
        self.open()
        self.owner.restore(PartState(arrays, meta))
        self.merged = list(merged)

    def check(self):
        """Each ticket is merged once, and the ledger is closed."""
        assert len(set(self.merged)) == len(self.merged)
        ledger = self.owner.ledger()
        generated = S * len(self.merged) + ledger["waiting"] + ledger["lost"]
        assert ledger["generated"] == generated and ledger["lost"] >= 0
