# SPDX-License-Identifier: Apache-2.0
"""What an installed package needs beyond its modules, and what pip can find of it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_embedded_model_travels_with_the_package():
    assets = ROOT / "tba_jax" / "assets"
    models = {path.parent.name for path in assets.glob("*/config.json")}
    packed = PROJECT["tool"]["setuptools"]["package-data"]["tba_jax.assets"]
    assert {f"{name}/*" for name in models} == set(packed)
    assert not [p for name in models for p in (assets / name).iterdir() if p.is_dir()]


def test_extras_that_are_named_exist_under_a_name_that_every_pip_finds():
    extras = set(PROJECT["project"]["optional-dependencies"])
    # pip 23.2 compares what a user asks for with the normalised name, as it was typed.
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", extra) for extra in extras)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "launch").glob("*.sh")]
    modules = [*(ROOT / "tba_jax").rglob("*.py")]
    asked = {}
    for path in (*pages, *modules):
        for names in re.findall(r"(?:tba_jax|'\.)\[([\w,-]+)\]", path.read_text()):
            asked |= dict.fromkeys(names.split(","), path.name)
    assert {"hub", "math", "reasoning-gym", "cuda", "tpu"} <= set(asked)
    assert {name: asked[name] for name in set(asked) - extras} == {}
