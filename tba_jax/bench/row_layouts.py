# SPDX-License-Identifier: Apache-2.0
"""Command: tokens that a train step computes in each layout of its rows, without computing them.

    python -m tba_jax.bench.row_layouts --json

The responses of a batch are as long as the limit, or have geometric lengths whose mean is a share
of the limit. Prompt lengths are between a quarter of the limit and the limit. The command counts
the tokens of padded rows with 1, 3 and 6 length buckets, of packed rows as long as the longest
prompt with response (`packed 1x`), and of packed rows of twice that length. All layouts compute a
prompt once for the responses of its row. Counts do not depend on the machine.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.bench.reporting import columns, make_parser, run_command
from tba_jax.bench.synthetic import response
from tba_jax.flow.packing import Packing
from tba_jax.flow.padding import Padding, length_buckets
from tba_jax.flow.trajectory import Draw, Prompt

_MEANS = (1.0, 2 / 3, 1 / 3, 0.1)
# numbers of prompts and of responses to each; limits of prompts and responses in tokens
_BATCHES = ((8, 8, 256, 256), (4, 16, 64, 256), (4, 16, 256, 128), (7, 20, 512, 512))
_LAYOUTS = {
    "1 bucket": (1, 0),
    "3 buckets": (3, 0),
    "6 buckets": (6, 0),
    "packed 1x": (3, 1),
    "packed 2x": (3, 2),
}
"""Name -> length buckets, and length of a packed row in longest prompts and responses."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    return run_command(make_parser("row_layouts", __doc__), argv, measure, _table)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens of every batch in every layout."""
    del args
    rows = []
    for batch in _BATCHES:
        for mean in _MEANS:
            draws = make_draws(*batch, mean)
            counts = {name: num_tokens(draws, *batch, name) for name in _LAYOUTS}
            rows.append({"batch": "{} x {}, {} + {}".format(*batch), "mean": mean, **counts})
    return {"rows": rows}


def make_draws(
    num_prompts: int, size: int, prompt_tokens: int, response_tokens: int, mean: float
) -> list[Draw]:
    """Return the draws of a batch whose mean response length is `mean` times the limit.

    With `mean` 1, all responses are as long as the limit.
    """
    rng = np.random.default_rng(0)
    draws = []
    for i in range(num_prompts):
        tokens = np.ones(rng.integers(prompt_tokens // 4, prompt_tokens + 1), np.int32)
        lengths = np.full(size, response_tokens)
        if mean < 1:
            drawn = rng.geometric(1 / (mean * response_tokens), size)
            lengths = np.clip(drawn, 1, response_tokens)
        draws.append(
            Draw(
                prompt=Prompt(i, "", tokens, {}),
                trajectories=tuple(response(i, np.ones(n, np.int32), 1.0) for n in lengths),
                weights=(1,) * size,
                is_fresh=True,
                trajectory_ids=tuple(range(size)),
                num_repeats=0,
            )
        )
    return draws


def num_tokens(
    draws: Sequence[Draw],
    num_prompts: int,
    size: int,
    prompt_tokens: int,
    response_tokens: int,
    layout: str,
) -> int:
    """Return the number of computed tokens of a batch, with padding."""
    buckets, longest = _LAYOUTS[layout]
    prompts, responses = (length_buckets(n, buckets) for n in (prompt_tokens, response_tokens))
    packing = Packing(
        num_prompts=num_prompts,
        group_size=size,
        padding=Padding(prompts, responses, 0),
        policy_temperature=1.0,
        shares_prompts=True,
        row_length=longest * (prompt_tokens + response_tokens),
    )
    return int(packing.batch(draws).tokens.size)


def _table(result: Mapping[str, Any]) -> Sequence[str]:
    return columns(
        result["rows"],
        {"": "{batch}", "mean": "{mean:.2f}", **{n: f"{{{n}:,}}" for n in _LAYOUTS}},
    )


if __name__ == "__main__":
    sys.exit(main())
