# SPDX-License-Identifier: Apache-2.0
"""Hosts that search and the one that keeps the buffer, as plain classes over a folder."""

import itertools
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from etils import epath
from fake_rounds import distinct_responses, make_commit

from tba_jax.config.schema import make_config
from tba_jax.devices.cluster import Cluster, PeerError
from tba_jax.evaluation.service import EvaluationService
from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.batch_bytes import pack_batch, unpack_batch
from tba_jax.flow.evaluation_shard import EvaluationShard
from tba_jax.flow.state import PartState
from tba_jax.replay.admission import Admission, Demand
from tba_jax.replay.outbox import Outbox
from tba_jax.run.errors import UserError
from tba_jax.run.whole_hosts import team as teams
from tba_jax.run.whole_hosts.home import Home, read_start
from tba_jax.run.whole_hosts.mail import Receiver, Sender, read_json, write_json
from tba_jax.run.whole_hosts.notice import Notice
from tba_jax.run.whole_hosts.remote_search import RemoteSearch
from tba_jax.run.whole_hosts.searching_host import Courier
from tba_jax.run.whole_hosts.team import Roles, Team


def message(number):
    return {"x": PartState({"a": np.arange(number)}, {"number": number})}


def test_messages_arrive_once_in_order_and_wait_for_room(tmp_path):
    folder = epath.Path(tmp_path) / "from_2"
    sender, receiver = Sender(folder, most=2), Receiver(folder)
    assert receiver.take() is None
    for number in range(2):
        sender.send(message(number))
    assert not sender.has_room
    for number in range(2):
        taken = receiver.take()
        assert taken["x"].meta == {"number": number}
        np.testing.assert_array_equal(taken["x"].arrays["a"], np.arange(number))
    assert receiver.take() is None and receiver.received == 2
    sender.acknowledge(1)
    assert sender.has_room and sender.num_waiting == 1
    assert [path.name for path in folder.iterdir()] == ["1.npz"]
    sender.acknowledge(9)  # of an older start: no more than was sent
    assert sender.num_waiting == 0 and list(folder.iterdir()) == []


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = epath.Path(tmp_path) / "notice.json"
    assert read_json(path) is None
    value = {"text": "x" * 10_000}
    write_json(path, value)
    torn = []

    def read():
        for _ in range(200):
            if read_json(path)["text"] not in ("x" * 10_000, "y" * 10_000):
                torn.append(1)

    thread = threading.Thread(target=read)
    thread.start()
    for letter in itertools.islice(itertools.cycle("xy"), 200):
        write_json(path, {"text": letter * 10_000})
    thread.join(30)
    assert torn == [] and list(tmp_path.iterdir()) == [tmp_path / "notice.json"]


def test_a_notice_comes_back_as_it_was():
    notice = Notice(beat=3, rounds={"1": 4}, evaluations=((8, False), (0, True)))
    assert Notice.from_record(json.loads(json.dumps(notice.record()))) == notice


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Pair:
    """A home with two hosts that search, 2 and 3, a searcher each; the second one is played."""

    def __init__(self, tmp_path, *, outbox_bytes=10**6, config=None):
        folder = epath.Path(tmp_path) / "mail"
        folder.mkdir(parents=True, exist_ok=True)
        self.team = Team("s", folder, {2: (0,), 3: (1,)})
        self.clock, self.events = Clock(), []
        self.home = Home(
            folder,
            self.team.hosts,
            outbox_bytes=outbox_bytes,
            log_event=self.events.append,
            limit_s=100.0,
            clock=self.clock,
        )
        self.outbox = Outbox(10**6)
        counters = {"decoded_tokens": 5, "idle_s": 0.5, "num_chunks": 2}
        searcher = SimpleNamespace(
            index=0, num_given=0, num_given_rounds_left=0, state=lambda: PartState({}, counters)
        )
        search = SimpleNamespace(
            searchers=[searcher], outboxes=[self.outbox], num_skipped=1, num_compiled=2
        )
        self.service = EvaluationService(Notes(), lambda: 0.0, num_hosts=2, makes_figures=False)
        self.admission = Admission(Demand(4, 1.0, 2, 1), [0])
        self.wants_stop = False
        self.courier = Courier(
            self.team,
            2,
            search,
            self.service,
            self.admission,
            limit_s=100.0,
            wants_stop=lambda: self.wants_stop,
            clock=self.clock,
        )


class Notes:
    num_parts = 2

    def part(self, params, number, station=0):
        return EvaluationShard(number, [[[number]]], [], [[params]], [], {}, [], {})

    def merge(self, parts):
        return sorted(part.first for part in parts)


def test_a_ticket_arrives_once_with_what_led_to_it(tmp_path):
    pair = Pair(tmp_path)
    home, courier = pair.home, pair.courier
    home.open()
    home.step()
    assert read_start(pair.team.folder)["unmerged"] == {"2": 0, "3": 0}
    commit = make_commit({1: distinct_responses(2)}, round=1)
    courier.events.append({"event": "chunk", "searcher": 0, "chunk": 0})
    pair.outbox.put(commit)
    assert courier.step() and home.step()
    arrived = home.searchers[0].outbox
    assert arrived.is_committed(1) and not arrived.is_committed(0)
    assert arrived.counts.generated == 2 and pair.outbox.num_rounds == 0
    assert [e["event"] for e in pair.events] == ["chunk"]
    assert home.searchers[0].num_chunks == 2 and home.total("num_skipped") == 1
    # The same ticket again, of a host that did not know; and one of another host's searcher.
    pair.outbox.restore(Outbox(10**6).state())
    pair.outbox.put(commit)
    pair.outbox.put(make_commit({1: [[5]]}, searcher=1))
    courier.step()
    home.step()
    assert home.num_duplicates == 2 and arrived.counts.generated == 2
    assert home.searchers[1].outbox.counts.generated == 0


def test_merged_groups_and_the_step_reach_the_admission(tmp_path):
    pair = Pair(tmp_path)
    for _ in range(3):
        assert pair.admission.admit(0, 0)
        pair.admission.commit(0, 1.0, 0)
    pair.outbox.put(make_commit({1: [[5]], 2: [[6]], 3: [[7]]}))
    pair.courier.step()
    pair.home.step()
    pair.courier.step()
    assert pair.admission.num_under_way == 3
    assert len(pair.home.searchers[0].outbox.take()) == 1
    pair.home.say(step=4, version=4, num_fresh=3, step_s=0.5)
    pair.home.step()
    pair.courier.step()
    assert pair.courier.notice.step == 4
    assert pair.admission.num_under_way == 1  # three are merged; one of three that wait is its own


def test_a_full_outbox_stops_the_whole_way_back(tmp_path):
    pair = Pair(tmp_path, outbox_bytes=1)
    for number in range(12):
        pair.outbox.put(make_commit({1: [[5]]}, round=number))
        pair.clock.now += 2.0
        pair.courier.step()
        pair.home.step()
    assert pair.home.searchers[0].outbox.num_rounds == 1
    assert pair.outbox.num_rounds > 0 and not pair.courier.step()
    pair.clock.now += 200.0  # a host that has to wait is not silent
    received = []
    for _ in range(20):
        received += [c.round for c in pair.home.searchers[0].outbox.take()]
        pair.home._silence[3].heard()
        pair.home.step()
        pair.clock.now += 2.0
        pair.courier.step()
    assert received == list(range(12)) and pair.home.num_duplicates == 0


def test_whoever_falls_silent_is_named(tmp_path):
    pair = Pair(tmp_path)
    pair.home.step()
    for _ in range(60):
        pair.clock.now += 2.0
        pair.courier.step()
        if pair.clock.now < 100:
            pair.home.step()
    with pytest.raises(PeerError, match="process 3, which searches, has said nothing .* 120 s"):
        pair.home.step()
    pair.courier.step()
    pair.clock.now += 101.0
    with pytest.raises(PeerError, match="keeps the replay buffer has said nothing"):
        pair.courier.step()


def test_shares_of_all_hosts_make_an_evaluation_and_keep_its_weights(tmp_path):
    pair = Pair(tmp_path)
    home = EvaluationService(Notes(), lambda: 0.0, num_hosts=2)
    pair.home.ask(8)
    assert pair.home.pending_evaluations == (8,)
    pair.home.step()
    pair.courier.step()
    assert pair.courier.notice.evaluations == ((8, False),)
    pair.service.request(8, ["eight"])
    assert pair.service.step()
    pair.courier.step()
    pair.home.step()
    assert not pair.home.take_evaluations(home)
    other = EvaluationService(Notes(), lambda: 0.0, host=1, num_hosts=2, makes_figures=False)
    other.request(8, ["eight"])
    assert other.step()
    report = pair.courier._report() | {"events": [], "shares": other.take_shares(8)}
    sender = Sender(pair.team.folder / "from_3")
    empty = pair.home.searchers[1].outbox.state()
    sender.send(
        {
            "commits": empty._replace(meta={k: v for k, v in empty.meta.items()}),
            "report": PartState({}, report | {"searchers": {}}),
        }
    )
    pair.home.step()
    assert pair.home.take_evaluations(home) and pair.home.pending_evaluations == ()
    home.merge()
    assert [(f.version, f.evaluation) for f in home.poll()] == [(8, [0, 1])]


def test_an_interruption_anywhere_stops_the_run(tmp_path):
    pair = Pair(tmp_path)
    search = RemoteSearch(None, pair.home)
    pair.courier.step()
    pair.home.step()
    assert not search.wants_stop
    pair.wants_stop = True
    pair.clock.now += 2.0
    pair.courier.step()
    pair.home.step()
    assert search.wants_stop


def test_a_resumed_run_says_where_searchers_go_on(tmp_path):
    before = Pair(tmp_path / "before")
    before.outbox.put(make_commit({1: [[5]]}, round=0))
    before.courier.step()
    before.home.step()
    parts = {name: p.state() for name, p in RemoteSearch(None, before.home).parts().items()}
    pair = Pair(tmp_path / "after")
    for name, part in RemoteSearch(None, pair.home).parts().items():
        part.restore(parts[name])
    pair.home.open()
    start = read_start(pair.team.folder)
    assert start["searchers"]["0"]["position"]["next_round"] == 1
    assert start["searchers"]["0"]["counters"]["num_chunks"] == 2
    assert start["unmerged"] == {"2": 1, "3": 0}  # it waits in the outbox here


def meet(tmp_path, configs):
    """Processes 0 (train), 1 and 2 (search) meet; what each got, by process."""
    roles = Roles((0,), {1: (0,), 2: (1,)}, (1, 2))
    results: dict = {}

    def home():
        with teams.contextlib.ExitStack() as held:
            results[0] = teams.meet_at_home(Cluster(), configs[0], tmp_path, roles, held)

    def elsewhere(process):
        results[process] = teams.meet_elsewhere(configs[process], tmp_path, process, roles)

    def run(process):
        try:
            home() if process == 0 else elsewhere(process)
        except (UserError, PeerError) as error:
            results[process] = error

    threads = [threading.Thread(target=run, args=(p,)) for p in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_hosts_meet_in_the_work_directory_whatever_an_earlier_start_left(tmp_path):
    config = make_config({"placement": "whole_hosts"})
    first = meet(tmp_path, [config] * 3)
    again = meet(tmp_path, [config] * 3)
    sessions = [found[p][-1].session for found in (first, again) for p in range(3)]
    assert len(set(sessions[:3])) == len(set(sessions[3:])) == 1 and sessions[0] != sessions[3]
    assert [found[1][0] for found in (first, again)] == [False, False]
    assert not (tmp_path / "mail" / sessions[0]).exists()


def test_another_command_is_refused_on_both_sides(tmp_path):
    config = make_config({"placement": "whole_hosts"})
    other = make_config({"placement": "whole_hosts", "seed": 3})
    found = meet(tmp_path, [config, config, other])
    for process in (0, 2):
        assert isinstance(found[process], UserError)
        assert "process 2 was started with another command" in str(found[process])
        assert "seed: 0 there, 3 here" in str(found[process])


def test_nobody_who_answers_is_a_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(teams, "MEET_S", 0.2)
    config, roles = make_config({"placement": "whole_hosts"}), Roles((0,), {1: (0,)}, (1,))
    with pytest.raises(PeerError, match="process 0, which keeps the replay buffer, did not answer"):
        teams.meet_elsewhere(config, tmp_path, 1, roles)
    with teams.contextlib.ExitStack() as held, pytest.raises(PeerError, match=r"process\(es\) 1"):
        (tmp_path / "mail" / "hello_1.json").unlink()
        teams.meet_at_home(Cluster(), config, tmp_path, roles, held)


@pytest.mark.parametrize("kind", [Batch, PackedBatch])
def test_a_batch_is_the_same_after_its_way(kind):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((3, i + 1)).astype("float32" if i % 2 else "int32")
        for i, name in enumerate(kind._fields)
    }
    arrays["is_action"], arrays["prompts"] = rng.random((3, 2)) < 0.5, None
    batch = kind(**arrays)
    back = unpack_batch(pack_batch(batch))
    assert type(back) is kind and back.prompts is None
    for name, array in arrays.items():
        if array is not None:
            np.testing.assert_array_equal(getattr(back, name), array)
            assert getattr(back, name).dtype == array.dtype
