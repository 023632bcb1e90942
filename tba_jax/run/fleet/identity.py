# SPDX-License-Identifier: Apache-2.0
"""What must agree between the trainer and a searcher of a fleet.

Code, model, tokenizer, data, reward and run: else responses would be of another policy or task
without a word. Python, jax and the kind of device may differ: log-probs of sampling are stored with
every response. Invariant: equal names mean equal files.
"""

import hashlib
from pathlib import Path

from tba_jax.config.command_line import versions
from tba_jax.run.shared import Shared


def identity_of(shared: Shared) -> dict[str, str]:
    """Names of what this process works with."""
    facts = shared.facts
    return {"code": code_name(), "run": facts.run_id, **facts.fingerprints}


def code_name() -> str:
    """The version of the package, and a digest of its source files."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"tba_jax {versions()['tba_jax']} {digest.hexdigest()[:12]}"
