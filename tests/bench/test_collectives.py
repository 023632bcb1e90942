# SPDX-License-Identifier: Apache-2.0
"""Collectives are read from compiled text, and the traffic of a step is as modelled."""

import importlib.util
import json

import pytest

from tba_jax.bench import collectives
from tba_jax.bench.collectives import Case, Collective, model_bytes, parse

TEXT = """\
HloModule jit_step, is_scheduled=true

%all-reduce-scatter.1 (x: bf16[512,64]) -> bf16[64,64] {
  %r = bf16[512,64]{1,0} all-reduce(%x), channel_id=4, replica_groups=[1,8]<=[8]
}

%fused.1 (x: f32[8,16]) -> f32[64,16] {
  %g = f32[64,16]{1,0} all-gather(%x), channel_id=1, replica_groups=mesh['data'=4,'fsdp'=8] {'fsdp'}
}

%cond (s: (s32[], f32[8,16])) -> pred[] {
  %bound = s32[]{:T(128)} constant(6)
}

%body (s: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %f = f32[64,16]{1,0} fusion(%y), kind=kCustom, calls=%fused.1
  %again = f32[64,16]{1,0} fusion(%y), kind=kCustom, calls=%fused.1
  %r = bf16[64,64]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.1
}

ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %w = (s32[], f32[8,16]) while(%t), condition=%cond, body=%body
  %sum = (f32[2]{0}, f32[4]{0}) all-reduce(%b, %c), replica_groups={{0,1},{2,3}}
  %p = (bf16[8,4], bf16[8,4], u32[], u32[]) collective-permute-start(%d), channel_id=9
}
"""


def test_collectives_are_counted_as_often_as_their_loop_runs():
    assert parse(TEXT) == [
        # Overlapped with two products, and one collective all the same.
        Collective("all-gather", 64 * 16 * 4, 8, 6),
        Collective("reduce-scatter", 512 * 64 * 2 // 8, 8, 6),
        Collective("all-reduce", 2 * 4 + 4 * 4, 2, 1),
        Collective("collective-permute", 8 * 4 * 2, 2, 1),
    ]


def test_bytes_that_a_ring_sends():
    sent = {
        kind: Collective(kind, 800, 8, 2).sent_bytes
        for kind in ("all-gather", "all-reduce", "reduce-scatter", "collective-permute")
    }
    assert sent == {
        "all-gather": 1400,
        "all-reduce": 2800,
        "reduce-scatter": 2 * 7 * 800,
        "collective-permute": 1600,
    }


def test_the_model_tends_to_a_limit_as_copies_are_added():
    sizes = [model_bytes(Case(data=n)) for n in (1, 8, 32, 2**20)]
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[0] < 0.11 * sizes[0]


def test_a_slice_that_does_not_exist_is_refused(capsys):
    assert collectives.main(["--chips=12"]) == 2
    assert "want some of [8, 16, 32, 64, 128, 256]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (pip install libtpu)",
)
def test_traffic_of_each_device_grows_as_the_model_says(capsys):
    assert collectives.main(["--chips=8,64", "--json"]) == 0
    few, many = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    grown = many["sent_mib"] - few["sent_mib"]
    wanted = many["model_mib"] - few["model_mib"]
    # Scalars, norms and metrics travel too, far below a percent of the weights.
    assert 0.98 * wanted < grown < 1.02 * wanted
    # The gradients of the tables at both ends are summed whole instead of scattered.
    for row in (few, many):
        assert row["model_mib"] < row["sent_mib"] < 1.2 * row["model_mib"]
        assert set(row["by_kind_mib"]) == {"all-gather", "all-reduce", "reduce-scatter"}
