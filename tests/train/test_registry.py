# SPDX-License-Identifier: Apache-2.0
"""Objectives by name, and what every one of them must keep."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tba_jax.api import load_config
from tba_jax.config.schema import flatten, unflatten
from tba_jax.settings import ConfigError, Schedule
from tba_jax.train.objectives.base import Objective
from tba_jax.train.objectives.registry import (
    call_objective,
    free_of_behavior,
    make_objective,
    own_names,
    own_settings,
)
from tba_jax.train.objectives.tb import TrajectoryBalance


def test_a_setting_of_another_type_or_objective_is_refused():
    with pytest.raises(ConfigError, match="clip_low = 'a': must be positive. The default is 0.2"):
        make_objective("dapo", {"clip_low": "a"})
    with pytest.raises(ConfigError, match="inner = 4: .*no such setting; it has clip_low"):
        make_objective("dapo", {"inner": 4})
    shared = SimpleNamespace(beta=Schedule(0.5), clip_low=9)
    made = make_objective("grpo", {"clip_low": 1}, shared)
    assert (made.beta, made.clip_low) == (Schedule(0.5), 1.0)
    assert "clip_low" in own_names()
    assert [x.name for x in own_settings("cispo")] == ["objective.importance_cap"]


def test_settings_reach_the_objective():
    made = make_objective("tb", {"scale": "paper", "log_z": "learned"})
    assert made == TrajectoryBalance("paper", "learned") and made.heads == ("log_z",)
    assert make_objective("tb").heads == ()
    assert free_of_behavior() == ("tb",)


def test_an_objective_says_whether_any_sampler_will_do():
    with pytest.raises(TypeError, match="objective Silent lacks needs_behavior"):
        type("Silent", (Objective,), {})


def test_names_are_known_without_jax():
    code = (
        "import sys; from tba_jax.config.schema import Config; import tba_jax.config.rules;"
        "from tba_jax.train.objectives.registry import objective_names;"
        "print('tb' in objective_names(), 'jax' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["True", "False"]


OWN_FILE = """
import dataclasses
from tba_jax.settings import field
from tba_jax.train.objectives.base import Objective

@dataclasses.dataclass(frozen=True)
class Ours(Objective):
    needs_behavior = True
    clip: float = field(0.2, "bound of the ratio", above=0)

    def __call__(self, data, beta):
        raise NotImplementedError

@dataclasses.dataclass
class Mutable(Ours.__mro__[1]):
    needs_behavior = True

    def __call__(self, data, beta):
        raise NotImplementedError

@dataclasses.dataclass(frozen=True)
class Unfinished(Objective):
    needs_behavior = True

@dataclasses.dataclass(frozen=True)
class Narrow(Objective):
    needs_behavior = True

    def __call__(self, data):
        return data

@dataclasses.dataclass(frozen=True)
class Fails(Objective):
    needs_behavior = True

    def __call__(self, data, beta):
        return data.nothing

@dataclasses.dataclass(frozen=True)
class Wrong(Objective):
    needs_behavior = True

    def __call__(self, data, beta):
        return beta

number = 3
"""


def test_a_class_in_a_file_is_an_objective_and_a_changed_file_is_loaded_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN_FILE)
    name = f"{path}:Ours"
    config = load_config("math", objective={"name": name, "clip": 0.3})
    assert config.objective.built.clip == 0.3
    assert unflatten(flatten(config)) == config
    path.write_text(OWN_FILE.replace("0.2", "0.25"))
    os.utime(path, ns=(1, 1))
    assert make_objective(name).clip == 0.25
    with pytest.raises(ConfigError, match="objective.clap.*it has clip"):
        load_config("math", objective={"name": name, "clap": 0.3})


@pytest.mark.parametrize(
    "own, source, why",
    [
        ("Theirs", OWN_FILE, "there is no Theirs; wanted a class derived"),
        ("number", OWN_FILE, "number is 3; wanted a class derived"),
        ("Unfinished", OWN_FILE, "Unfinished lacks __call__"),
        ("Narrow", OWN_FILE, r"Narrow is called with \(data, beta\), and too many positional"),
        ("Mutable", OWN_FILE, r"Mutable can be changed.*dataclass\(frozen=True\)"),
        ("Ours", "x = 1\ny = undefined\n", r"raised NameError(.|\n)*mine.py\", line 2"),
        ("Ours", None, "mine.py cannot be read.*Give the path"),
    ],
)
def test_what_is_no_objective_in_a_file_is_named(tmp_path, own, source, why):
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ConfigError, match=f"objective.name={path}:{own}: .*{why}"):
        load_config("math", objective={"name": f"{path}:{own}"})


def test_an_objective_of_the_user_that_fails_is_named_with_its_traceback(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN_FILE)
    with pytest.raises(ConfigError, match="Fails raised AttributeError: 'int' object") as found:
        call_objective(make_objective(f"{path}:Fails"), 1, 0.1)
    assert str(found.value).count("mine.py") == 1 and "return data.nothing" in str(found.value)
    with pytest.raises(ConfigError, match="Wrong returned float; wanted a .*Loss"):
        call_objective(make_objective(f"{path}:Wrong"), 1, 0.1)
