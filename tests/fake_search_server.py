# SPDX-License-Identifier: Apache-2.0
"""A search server with a clock of its own, and the tickets that its searchers send."""

import json
from collections import Counter

from fake_rounds import make_commit

from tba_jax.evaluation.service import EvaluationService
from tba_jax.flow.evaluation_shard import EvaluationShard
from tba_jax.flow.state import PartState
from tba_jax.remote.messages import (
    JoinRequest,
)
from tba_jax.remote.search_server import SearchServer
from tba_jax.remote.searcher_table import RemoteSearcher, ServerSettings
from tba_jax.replay.admission import Admission
from tba_jax.replay.outbox import Outbox

IDENTITY = {"code": "1", "model": "m"}
S = 2  # responses of a ticket


def ticket(slot, number, version=0):
    return make_commit(
        {number: [[5, number + 1], [6]]}, round=number, searcher=slot, version=version
    )


class Figures:
    """An evaluator of five parts, whose figures are their numbers and who did them."""

    num_shards = 5

    def shard(self, params, number, device_set=0):
        return part_of(number, params)

    def merge(self, parts):
        return sorted((part.first, part.texts[0][0]) for part in parts)


def part_of(number, who):
    return EvaluationShard(number, [[[1]]], [[True]], [[who]], [[1.0]], {}, [[False]], {})


class House:
    """A trainer's side with a clock of its own; `restore` makes the next one from a checkpoint."""

    def __init__(self, num_searchers=2, *, max_staleness=0, outbox_bytes=2**20, prompts=4):
        self.now, self.lines = 0.0, []
        self.searchers = [RemoteSearcher(i, Outbox(outbox_bytes)) for i in range(num_searchers)]
        self.outboxes = {each.index: each.outbox for each in self.searchers}
        self.demand = {"num_prompts": prompts, "share": 1.0, "max_staleness": max_staleness}
        self.epoch = 0
        self.taken, self.saved = [], None
        self.open_server()
        self.save()

    def open_server(self):
        self.epoch += 1
        unmerged = sum(outbox.num_groups for outbox in self.outboxes.values())
        self.admission = Admission(list(self.outboxes), unmerged=unmerged, **self.demand)
        self.service = EvaluationService(Figures(), lambda: self.now)
        self.server = SearchServer(
            ServerSettings(str(self.epoch), IDENTITY, S, heartbeat_timeout_s=10.0, max_tickets=4),
            self.searchers,
            self.admission,
            self.service,
            clock=lambda: self.now,
            log=self.lines.append,
        )

    def request(self, *message):
        return self.server.request_tickets(*message)

    def join(self, *slots, identity=IDENTITY):
        return self.server.join(JoinRequest(slots or (0,), "a", identity))

    def merge(self):
        commits = [c for outbox in self.outboxes.values() for c in outbox.take()]
        self.taken += [(c.searcher, c.round) for c in commits]
        self.admission.update(step=0, num_merged=len(commits), num_fresh=0)

    def save(self):
        states = [(each.outbox.state(), each.state()) for each in self.searchers]
        self.saved = states, list(self.taken)

    def restore(self):
        states, self.taken = self.saved[0], list(self.saved[1])
        for searcher, ((arrays, meta), counters) in zip(self.searchers, states, strict=True):
            searcher.outbox.restore(PartState(arrays, json.loads(json.dumps(meta))))
            searcher.restore(counters)
        self.open_server()

    def check(self):
        """Each response counts once, each ticket once, and admission counts the open tickets."""
        pending = Counter()
        generated = lost = 0
        for slot, outbox in self.outboxes.items():
            counts = outbox.counts
            generated, lost = generated + counts.generated, lost + counts.lost
            pending.update({slot: counts.pending})
        assert generated == sum(pending.values()) + S * len(self.taken) + lost
        assert lost >= 0
        assert len(set(self.taken)) == len(self.taken)
        begun = sum(
            len(slot.open_tickets) for slot in self.server._searchers.values() if slot.is_connected
        )
        assert self.admission.num_under_way == begun + sum(
            outbox.num_groups for outbox in self.outboxes.values()
        )
