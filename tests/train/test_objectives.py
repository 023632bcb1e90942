# SPDX-License-Identifier: Apache-2.0
"""Objectives by name and in files of the user, and the types that tests check."""

import os

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from tba_jax.api import load_config
from tba_jax.config.schema import flatten, unflatten
from tba_jax.settings import ConfigError
from tba_jax.train.groups import of_sums
from tba_jax.train.objectives import make_objective, own_names, own_settings

GROUPS = of_sums(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3)))


def test_a_setting_of_another_type_or_objective_is_refused():
    with pytest.raises(ConfigError, match="clip_low = 'a': must be a number. The default is 0.2"):
        make_objective("dapo", {"clip_low": "a"})
    with pytest.raises(ConfigError, match="inner = 4: .*no such setting; it has clip_low"):
        make_objective("dapo", {"inner": 4})
    assert make_objective("grpo", {"clip_low": 1}).value("clip_low") == 1.0
    assert "clip_low" in own_names()
    assert [x.name for x in own_settings("cispo")] == ["objective.importance_cap"]


def test_what_an_objective_needs_follows_from_its_settings():
    exact = make_objective("tb", {"importance": "none"}).needs
    assert (exact.sampler, exact.beta, exact.head) == ("any", "positive", "")
    assert make_objective("tb", {"log_z": "learned"}).needs.head == "log_z"
    assert make_objective("tb").needs.sampler == "ratio"
    centred = make_objective("tb", {"importance": "none", "kl_center": "behavior"})
    assert centred.needs.sampler == "ratio"
    assert make_objective("ppo").needs.total == "tokens"


def test_ratios_refuse_a_truncated_sampler_by_name():
    with pytest.raises(ConfigError, match=r"config.search.top_p = 0.8: objective.name=gspo reads"):
        load_config("math", objective={"name": "gspo"}, search={"top_p": 0.8})
    load_config("math", objective={"importance": "none"}, search={"top_p": 0.8})


OWN_FILE = """
from typing import Annotated
from tba_jax.train.groups import Terms
from tba_jax.train.losses import summed
from tba_jax.train.objectives import About, Needs, objective

@objective(Needs(total="tokens"))
def ours(groups, beta, *, clip: Annotated[float, About("bound", above=0)] = 0.2):
    return Terms(-clip * summed(groups, groups.logp), {"tokens": groups.logp})

def plain(groups, beta, *, power=2):
    return groups.reward ** power

def narrow(groups):
    return groups.reward

def fails(groups, beta):
    return groups.nothing

def wrong(groups, beta):
    return groups.reward.sum()
"""


def test_a_function_in_a_file_is_an_objective_and_a_changed_file_is_loaded_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN_FILE)
    name = f"{path}:ours"
    config = load_config("math", objective={"name": name, "clip": 0.3})
    assert config.objective.built.value("clip") == 0.3
    assert unflatten(flatten(config)) == config
    assert make_objective(name)(GROUPS, 0.1).loss.shape == (2, 3)
    plain = make_objective(f"{path}:plain", {"power": 3})
    assert plain(GROUPS, 0.1).loss.tolist() == [[1.0] * 3] * 2
    assert (plain.needs.total, plain.needs.sampler) == ("responses", "ratio")
    path.write_text(OWN_FILE.replace("0.2", "0.25"))
    os.utime(path, ns=(1, 1))
    assert make_objective(name).value("clip") == 0.25
    with pytest.raises(ConfigError, match="objective.clap.*it has clip"):
        load_config("math", objective={"name": name, "clap": 0.3})
    with pytest.raises(ConfigError, match="objective.clip = -1.0: must be positive"):
        load_config("math", objective={"name": name, "clip": -1.0})


def test_what_is_no_objective_in_a_file_or_fails_is_named(tmp_path):
    for own, source, why in (
        ("theirs", OWN_FILE, "there is no theirs; wanted a function"),
        ("narrow", OWN_FILE, "narrow is <function narrow at .*: too many positional"),
        ("ours", "x = 1\ny = undefined\n", r"raised NameError(.|\n)*mine.py\", line 2"),
    ):
        path = tmp_path / f"{own}.mine.py"
        path.write_text(source)
        with pytest.raises(ConfigError, match=f"objective.name={path}:{own}: .*{why}"):
            load_config("math", objective={"name": f"{path}:{own}"})
    path = tmp_path / "mine.py"
    path.write_text(OWN_FILE)
    raised = "fails: the function raised AttributeError: 'Gr(.|\n)*return groups.nothing"
    with pytest.raises(ConfigError, match=raised):
        make_objective(f"{path}:fails")(GROUPS, 0.1)
    with pytest.raises(ConfigError, match=r"wrong returned \(\); wanted one term for each respon"):
        make_objective(f"{path}:wrong")(GROUPS, 0.1)


def test_a_wrong_shape_is_refused_by_the_type_checker_of_tests():
    with pytest.raises(TypeCheckError, match="of_sums"):
        of_sums(*(jnp.zeros((2, n)) for n in (3, 2, 3)))
