# SPDX-License-Identifier: Apache-2.0
"""Damaged files are read rightly or refused in a line; the long form is `killer.py`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chaos import damage
from fake_rounds import make_buffer, make_commit, make_prompt, make_trajectory
from fake_workdir import fake_workdir

from tba_jax.config.schema import Config
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Group
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.host_state import KINDS, Facts, HostState
from tba_jax.run.workdir import begin_run, run_id_of
from tba_jax.storage import sealed


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A work directory with two checkpoints of a few numbers, and the logs of a run."""
    folder = tmp_path_factory.mktemp("template") / "run"
    config = Config(num_steps=6)
    fake_workdir(folder, num_steps=6)
    (folder / "report.html").write_text("")
    report = sealed.read(folder / "report.json")
    report["eval"]["after"] = {"pass_at_1": 0.5, "n": 512, "step": 6}
    sealed.write(folder / "report.json", report)
    begin_run(folder, config)
    facts = Facts(0, 1, run_id_of(folder), dict.fromkeys(KINDS, "f00d"))
    buffer = make_buffer()
    drawn = tuple(make_trajectory(0, [token], version=1) for token in (5, 6, 7))
    group = Group(make_prompt(0), drawn, {})
    buffer.merge([dataclasses.replace(make_commit({}), groups=(group,), generated=3)], 3)
    parts = {
        "buffer": buffer.state(),
        "outbox_0": PartState({}, {"groups": []}),
        "evaluations": PartState({}, {"last_eval_step": 6}),
        "logs": PartState({}, {file.name: file.stat().st_size for file in folder.glob("*.jsonl")}),
    }
    state = {"w": jnp.arange(3000.0).reshape(3, 1000), "step": jnp.int32(6)}
    checkpoints = Checkpoints(folder / "checkpoints", keep=2)
    for step in (3, 6):
        checkpoints.save(step, state, HostState(facts, parts))
    checkpoints.close()
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    return damage.Template(folder, config, target)


def test_whatever_file_is_damaged_the_next_command_is_right_or_says_so(template, tmp_path):
    before = damage.baselines(template, tmp_path)
    states = damage.states_of(template)
    assert before["unfinished"]["resume"].step == 6 and len(states) == 2
    kinds, outcomes = set(), {"told": 0, "right": 0}
    for number in range(45):
        rng = np.random.default_rng((15, number))
        tried = damage.try_one(template, before, states, rng, tmp_path)
        if tried is not None:
            what, wrong, found = tried
            assert not wrong, f"{number}: {what}: {wrong}"
            kinds.add(what.split()[0])
            is_reported = any(isinstance(value, Exception) for value in found.values())
            outcomes["told" if is_reported else "right"] += 1
    assert len(kinds) >= 7 and min(outcomes.values()) >= 8, (kinds, outcomes)


def test_what_is_silently_other_is_seen(template, tmp_path):
    """The judge judges: a report and a state that were changed with their digests."""
    before = damage.baselines(template, tmp_path)
    was = before["finished"]["resume"]
    other = dataclasses.replace(was, report={**was.report, "seed": 7})
    assert "silently" in damage.verdict("resume", was, other, {})
    was = before["unfinished"]["resume"]
    other = dataclasses.replace(was, state="beef")
    assert "another than was saved" in damage.verdict("resume", was, other, {6: was.state})
    assert "instead of a line" in damage.verdict("buffer", {}, KeyError("x"), {})
    assert "not one line" in damage.verdict("buffer", {}, damage.Told("a\nb"), {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}', "lacks the entry 'crc32c'"),
        ('{"a": 1, "crc32c": "00000000"}', "expected 00000000"),
        ("[1]", "holds a list, wanted a JSON object"),
        ("[" * 10**5, "nested too deep"),
        ("\ufffe", "Expecting value"),
    ],
)
def test_another_object_than_was_sealed_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        sealed.unseal(content)


def test_every_changed_character_of_a_sealed_object_is_seen():
    facts = {"step": 12, "x": [0.5, None, "ü"], "eval": {"after": {"step": 6}}}
    text = sealed.seal(facts)
    assert sealed.unseal(text) == facts == sealed.unseal(sealed.seal(json.loads(text)))
    for at, character in enumerate(text):
        for other in "07ae,":
            changed = text[:at] + other + text[at + 1 :]
            try:
                assert other == character or sealed.unseal(changed) == facts  # blanks between
            except ValueError:
                continue
