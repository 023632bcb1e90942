# SPDX-License-Identifier: Apache-2.0
"""StepPlan: what all hosts of a run do in the next step, decided in one place.

Hosts see different data. Where each decided for itself they would diverge in silence: two hosts
that choose different length buckets compute wrong numbers without an error, and one that saves
while another trains waits for ever. So every host offers what it could do, process 0 decides, and
all of them get the same plan. This module does no communication and knows no devices; `Hosts` does
that. Its invariant: whatever the offers are, every host gets the same plan and the same shapes, and
a step is made only when all hosts can make it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Int

# Keeps the draw of slot kinds apart from other uses of the seed.
_PLAN_ROLE = 2


class Hosts(Protocol):
    """The processes of a run, in lock-step: all of them make the same calls in the same order."""

    num_processes: int
    process_id: int

    def decide(
        self,
        offer: Int[np.ndarray, " n"],
        decide: Callable[[Int[np.ndarray, "h n"]], Int[np.ndarray, " m"]],
    ) -> Int[np.ndarray, " m"]:
        """Every process's offer goes to process 0; what `decide` says there, everyone gets.

        Args:
            offer: as many numbers in every process.
            decide: offers by process -> the decision; a fixed number of numbers.
        """
        ...


class Offer(NamedTuple):
    """What one host could do.

    Attributes:
        is_ready: its buffer can fill its slots of a batch, fresh or not.
        num_fresh: prompts with unused fresh responses; counted until they fill its slots.
        wants_stop: it was interrupted.
        evaluated: newest version of which its share of the evaluation is done and not collected;
            -1: none.
        is_publishing: weights that it published last are still being written.
    """

    is_ready: bool
    num_fresh: int
    wants_stop: bool
    evaluated: int = -1
    is_publishing: bool = False


class StepPlan(NamedTuple):
    """What every host does.

    Attributes:
        wait: no step now; look for more data first.
        stop: make no step after this one (with `wait`: not even this one).
        sync: publish and merge after this step.
        publish: of these two also publish; not while a host still writes the version before.
        save: write a checkpoint after this step.
        num_fresh: fresh slots of each host's share of the batch; () with one host, whose buffer
            decides by itself.
        num_short: slots of the whole batch that should have been fresh and are replay slots.
        collect: newest version that all hosts have done their share of evaluating: the shares of
            all up to it are put together now; -1: none.
    """

    wait: bool
    stop: bool
    sync: bool
    save: bool
    num_fresh: tuple[int, ...] = ()
    num_short: int = 0
    collect: int = -1
    publish: bool = True


def share_out(total: int, available: Sequence[int]) -> tuple[int, ...]:
    """Divide `total` as evenly as the hosts' supply allows; all of it where there is enough.

    Args:
        total: what is wanted of all hosts together.
        available: what each host has.
    """
    shares = [0] * len(available)
    left = min(total, sum(available))
    while left:
        open_hosts = [h for h, most in enumerate(available) if shares[h] < most]
        portion = max(1, left // len(open_hosts))
        for host in open_hosts:
            taken = min(portion, available[host] - shares[host], left)
            shares[host] += taken
            left -= taken
    return tuple(shares)


class Planner:
    """Makes the plan of each step.

    Args:
        hosts: the processes of the run.
        num_prompts: p, over all hosts.
        recency_prob: m, probability that a slot is fresh.
        pace: "trainer": wait for missing fresh prompts; "off": make them replay slots.
        seed: of the run.
        num_steps: of the run.
        sync_period: steps between publications.
        checkpoint_period: steps between checkpoints, 0: none.
        shares_data: every host draws its share of the batch; else the first one draws it for all.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        shares_data: bool = True,
        num_prompts: int,
        recency_prob: float,
        pace: str,
        seed: int,
        num_steps: int,
        sync_period: int,
        checkpoint_period: int,
    ) -> None:
        self._hosts = hosts
        self._shares_data = shares_data
        self._num_prompts = num_prompts
        self._recency_prob = recency_prob
        self._pace = pace
        self._seed = seed
        self._num_steps = num_steps
        self._sync_period = sync_period
        self._checkpoint_period = checkpoint_period

    @property
    def num_hosts(self) -> int:
        """Processes that draw parts of the batch."""
        return self._hosts.num_processes if self._shares_data else 1

    @property
    def share(self) -> int:
        """Prompts of a batch that are this host's."""
        return self._num_prompts // self.num_hosts

    @property
    def draws(self) -> bool:
        """Whether this process draws, its share or the whole batch."""
        return self._shares_data or self._hosts.process_id == 0

    @property
    def host(self) -> int:
        """This process."""
        return self._hosts.process_id

    def plan(self, step: int, offer: Offer) -> StepPlan:
        """The plan of the step after `step` updates; a call of all hosts.

        Args:
            step: optimiser updates done.
            offer: this host's.
        """
        if self._hosts.num_processes == 1:
            return self.decide(step, [offer])

        def decide(offers: Int[np.ndarray, "h n"]) -> Int[np.ndarray, " m"]:
            plan = self.decide(
                step,
                [Offer(bool(r), int(n), bool(s), int(v), bool(p)) for r, n, s, v, p in offers],
            )
            numbers = plan.num_short, plan.collect, plan.publish
            return np.array([*plan[:4], *numbers, *plan.num_fresh], np.int32)

        decided = self._hosts.decide(np.array(offer, np.int32), decide).tolist()
        flags, (num_short, collect, publish), num_fresh = decided[:4], decided[4:7], decided[7:]
        wait, stop, sync, save = map(bool, flags)
        return StepPlan(wait, stop, sync, save, tuple(num_fresh), num_short, collect, bool(publish))

    def decide(self, step: int, offers: Sequence[Offer]) -> StepPlan:
        """The decision itself, from all hosts' offers: what runs on process 0."""
        wait = not all(offer.is_ready for offer in offers)
        num_fresh: tuple[int, ...] = ()
        num_short = 0
        if len(offers) > 1 and self._shares_data:
            slots = self._num_prompts // len(offers)
            # A function of the step alone: kinds that were decided stay decided over a wait.
            rng = np.random.default_rng([self._seed, _PLAN_ROLE, step])
            wanted = int(rng.binomial(self._num_prompts, self._recency_prob))
            num_fresh = share_out(wanted, [min(slots, offer.num_fresh) for offer in offers])
            num_short = wanted - sum(num_fresh)
            wait = wait or (num_short > 0 and self._pace == "trainer")
        done = step + 1
        period = self._checkpoint_period
        return StepPlan(
            wait=wait,
            stop=any(offer.wants_stop for offer in offers),
            sync=done % self._sync_period == 0 and done < self._num_steps,
            save=bool(period) and done % period == 0,
            num_fresh=num_fresh,
            num_short=num_short,
            collect=min(offer.evaluated for offer in offers),
            publish=not any(offer.is_publishing for offer in offers),
        )

    def agree_on_shape(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The shape that holds every host's rows: the largest of each length; a call of all hosts.

        Args:
            lengths: what this host's rows need, e.g. its longest prompt and longest response.
        """
        if self.num_hosts == 1:
            return tuple(lengths)
        largest = self._hosts.decide(
            np.array(lengths, np.int32), lambda offers: offers.max(axis=0).astype(np.int32)
        )
        return tuple(largest.tolist())
