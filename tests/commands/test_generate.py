# SPDX-License-Identifier: Apache-2.0
"""The generate command, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORIES = ROOT / ".." / "shared" / "models" / "stories260k"


@pytest.mark.skipif(not STORIES.is_dir(), reason="../shared/models/stories260k is absent")
def test_greedy_text_equals_that_of_transformers():
    golden = json.loads((ROOT / "tests" / "golden" / "stories260k.json").read_text())
    command = [sys.executable, "-m", "tba_jax.generate", f"--model={STORIES}", "--json"]
    command += [f"--prompt={golden['prompt']}", "--max_new_tokens=64", "--temperature=0"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    result = json.loads(out.stdout.splitlines()[-1])
    assert (result["texts"], result["num_tokens"]) == ([golden["text"]], [64])
    assert golden["prompt"] + golden["text"] in out.stdout
