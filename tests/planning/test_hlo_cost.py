# SPDX-License-Identifier: Apache-2.0
"""Costs read from HLO text: loops multiplied out, slices and updates at their own size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.models.per_shard import VISIBLE_SCOPE
from tba_jax.planning import chips
from tba_jax.planning.hlo_cost import program_cost


def cost(function, *args, unknown_trips=1, **jit):
    compiled = jax.jit(function, **jit).lower(*args).compile()
    return program_cost(compiled.as_text(), unknown_trips=unknown_trips)


def shape(*dims, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def layers(x, weights, *, unroll):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jax.lax.scan(layer, x, weights, unroll=unroll)[0]


def test_a_scan_costs_what_its_unrolled_form_costs():
    """XLA's own count of the scan is that of one layer."""
    args = shape(256, 256), shape(12, 256, 256)
    scanned, unrolled = (cost(functools.partial(layers, unroll=u), *args) for u in (1, True))
    assert scanned.flops == unrolled.flops == 12 * 2 * 256**3
    # The same weights are read and the same activations written; the scan may copy its carry.
    assert scanned.num_bytes == pytest.approx(unrolled.num_bytes, rel=0.25)
    own = jax.jit(functools.partial(layers, unroll=1)).lower(*args).compile().cost_analysis()
    assert own["flops"] < 2 * 2 * 256**3


def test_the_gradient_of_nested_scans_is_multiplied_out():
    def loss(x, weights):
        def outer(x, _):
            return layers(x, weights, unroll=1), None

        return jnp.sum(jax.lax.scan(outer, x, length=3)[0])

    # Two products in the backward pass for one in the forward pass.
    found = cost(jax.grad(loss, argnums=(0, 1)), shape(64, 64), shape(5, 64, 64))
    assert found.flops == 3 * 3 * 5 * 2 * 64**3
    assert found.unknown_loops == 0


def test_a_loop_that_ends_when_its_data_says_so_takes_the_callers_number():
    def run(x, w):
        def go_on(carry):
            step, x = carry
            return (step < 100) & (jnp.sum(x) < 1e6)

        return jax.lax.while_loop(go_on, lambda c: (c[0] + 1, c[1] @ w), (0, x))

    found = cost(run, shape(64, 64), shape(64, 64), unknown_trips=7)
    assert (found.flops, found.unknown_loops) == (7 * 2 * 64**3, 1)


# As XLA:TPU writes the gradient of a weight that eight devices divide: two parts of it a trip.
BY_STEPS = """HloModule m
%below (c: (f32[8,8], u32[])) -> pred[] {
  %c = (f32[8,8]{1,0}, u32[]) parameter(0)
  %i = u32[] get-tuple-element(%c), index=1
  %limit = u32[] constant(LIMIT)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}
%adds (j: u32[]) -> u32[] {
  %j = u32[] parameter(0)
  %by = u32[] constant(2)
  ROOT %sum = u32[] add(%j, %by)
}
%once (d: (f32[8,8], u32[])) -> (f32[8,8], u32[]) {
  %d = (f32[8,8]{1,0}, u32[]) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%d), index=0
  %k = u32[] get-tuple-element(%d), index=1
  %two = u32[] constant(2)
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %next = u32[] NEXT
  %copied = u32[] copy(%next)
  ROOT %out = (f32[8,8]{1,0}, u32[]) tuple(%y, %copied)
}
ENTRY %main (z: f32[8,8]) -> f32[8,8] {
  %z = f32[8,8]{1,0} parameter(0)
  %start = u32[] constant(START)
  %given = (f32[8,8]{1,0}, u32[]) tuple(%z, %start)
  %while = (f32[8,8]{1,0}, u32[]) while(%given), condition=%below, body=%once
  ROOT %w = f32[8,8]{1,0} get-tuple-element(%while), index=0
}"""


@pytest.mark.parametrize(
    ("following", "start", "limit", "trips"),
    [
        ("add(%k, %two)", 0, 4, 2),
        ("add(%two, %k)", 0, 5, 3),
        ("fusion(%k), kind=kLoop, calls=%adds", 2, 8, 3),
        ("negate(%k)", 0, 4, 4),
    ],
)
def test_a_loop_that_counts_by_steps_or_not_from_0_has_fewer_trips(following, start, limit, trips):
    text = BY_STEPS.replace("NEXT", following).replace("START", str(start))
    found = program_cost(text.replace("LIMIT", str(limit)))
    assert (found.flops, found.unknown_loops) == (trips * 2 * 8**3, 0)


def test_an_update_in_place_costs_the_update_and_a_slice_its_result():
    def write(cache, row, at):
        return jax.lax.dynamic_update_slice(cache, row, (at, 0))

    found = cost(write, shape(4096, 256), shape(1, 256), shape(dtype=jnp.int32), donate_argnums=0)
    assert found.num_bytes < 4 * 256 * 4 + 64

    def read(cache, at):
        return jax.lax.dynamic_slice(cache, (at, 0), (1, 256))

    assert cost(read, shape(4096, 256), shape(dtype=jnp.int32)).num_bytes < 4 * 256 * 4 + 64


FROM_FAST_MEMORY = """HloModule m
ENTRY %main (a: f32[64,8], b: f32[1,8], i: s32[]) -> f32[64,8] {
  %a = f32[64,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0:S(1)} parameter(1)
  %i = s32[] parameter(2)
  ROOT %out = f32[64,8]{1,0} dynamic-update-slice(%a, %b, %i, %i)
}"""


def test_an_update_out_of_fast_memory_is_written_all_the_same():
    assert program_cost(FROM_FAST_MEMORY).num_bytes == 8 * 4


A_KERNEL = """HloModule m
ENTRY %main (x: f32[128,128]) -> f32[128,128] {
  %x = f32[128,128]{1,0} parameter(0)
  %kernel = f32[128,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="splash"}
  ROOT %y = f32[128,128]{1,0} dot(%kernel, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""


SPLASH = """HloModule m
ENTRY %main (b: s8[1,4,4], q: bf16[8,256,64], k: bf16[2,512,64]) -> bf16[8,256,64] {
  %b = s8[1,4,4]{2,1,0} parameter(0)
  %q = bf16[8,256,64]{2,1,0} parameter(1)
  %k = bf16[2,512,64]{2,1,0} parameter(2)
  ROOT %out = bf16[8,256,64]{2,1,0} custom-call(%b, %q, %k, %k), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q_dkv\\": 512, \\"block_q_dq\\": 512}"
}}, metadata={op_name="jit(f)/SCOPEsplash_mha_PHASE/pallas_call"}
}"""


@pytest.mark.parametrize(
    ("scope", "share"), [("", 1.0), (f"{VISIBLE_SCOPE}500/jit(_splash_attention)/", 0.5)]
)
@pytest.mark.parametrize(
    ("phase", "products"), [("fwd_residuals", 2), ("dq_no_residuals", 3), ("dkv_no_residuals", 4)]
)
def test_splash_attention_costs_the_products_of_its_visible_pairs(scope, share, phase, products):
    found = program_cost(SPLASH.replace("SCOPE", scope).replace("PHASE", phase))
    assert found.flops == share * products * 2 * 8 * 256 * 512 * 64
    assert found.uncounted == ()


def test_what_stands_behind_a_kernel_of_several_lines_is_counted():
    found = program_cost(A_KERNEL)
    assert found.flops == 2 * 128**3
    assert found.num_bytes == (2 + 3) * 4 * 128**2
    assert found.uncounted == ("tpu_custom_call",) and found.launches == 2


RETILED = """HloModule m
%copy_fusion (input: s8[64,32,128]) -> s8[64,32,128] {
  %input = s8[64,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = s8[64,32,128]{2,1,0:T(8,128)(4,1)} copy(%input)
}
%fused (a: s8[64,32,128], b: s8[1,32,128], i: s32[]) -> s8[64,32,128] {
  %a = s8[64,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %fusion.1 = s8[64,32,128]{2,1,0:T(8,128)(4,1)} fusion(%a), kind=kLoop, \
output_to_operand_aliasing={{}: (0, {})}, calls=%copy_fusion
  %b = s8[1,32,128]{2,1,0:T(8,128)(4,1)} parameter(1)
  %i = s32[] parameter(2)
  ROOT %out = s8[64,32,128]{2,1,0:T(32,128)(4,1)} dynamic-update-slice(%fusion.1, %b, %i, %i, %i)
}
ENTRY %main (x: s8[64,32,128], y: s8[1,32,128], j: s32[]) -> s8[64,32,128] {
  %x = s8[64,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %y = s8[1,32,128]{2,1,0:T(8,128)(4,1)} parameter(1)
  %j = s32[] parameter(2)
  ROOT %f = s8[64,32,128]{2,1,0:T(32,128)(4,1)} fusion(%x, %y, %j), kind=kLoop, calls=%fused
}"""


def test_another_tiling_of_an_update_in_place_moves_nothing():
    assert program_cost(RETILED).num_bytes == 2 * 32 * 128 + 4


BESIDE = """HloModule m
%fused (a: f32[32,64], i: s32[]) -> f32[1,64] {
  %a = f32[32,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %out = f32[1,64]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,64}
}
%kept (b: f32[32,64], c: f32[1,64], j: s32[]) -> f32[32,64] {
  %b = f32[32,64]{1,0} parameter(0)
  %c = f32[1,64]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %into = f32[32,64]{1,0} dynamic-update-slice(%b, %c, %j, %j)
}
ENTRY %main (x: f32[32,64], k: s32[]) -> f32[32,64] {
  %x = f32[32,64]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %s = ((f32[32,64]{1,0}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%x, %k), calls=%fused
  %y = f32[1,64]{1,0} fusion-done(%s)
  %w = ((f32[32,64]{1,0}, f32[1,64]{1,0}, s32[]), f32[32,64]{1,0}, u32[]) \
fusion-start(%x, %y, %k), calls=%kept
  ROOT %z = f32[32,64]{1,0} fusion-done(%w)
}"""


def test_a_fusion_beside_others_costs_what_it_costs_alone():
    # A row is read and written, and so again; two indices.
    found = program_cost(BESIDE)
    assert found.num_bytes == 4 * 64 * 4 + 2 * 4 and found.launches == 2


def test_figures_are_per_device_and_collectives_are_counted():
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    rows = NamedSharding(mesh, PartitionSpec("model", None))
    columns = NamedSharding(mesh, PartitionSpec(None, "model"))
    whole = NamedSharding(mesh, PartitionSpec())
    args = shape(128, 256, sharding=columns), shape(256, 64, sharding=rows)
    found = cost(jnp.matmul, *args, out_shardings=whole)
    assert found.flops == 2 * 128 * 256 * 64 / 4
    assert found.collective_bytes == 2 * 128 * 64 * 4 * 3 / 4  # an all-reduce over a ring of four


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        program_cost("nonsense")


def test_products_on_a_tpu_are_convolutions_and_count_the_same():
    pytest.importorskip("libtpu")
    where = jax.sharding.SingleDeviceSharding(chips.parse_topology("v5e:2x2").devices()[0])
    x, w = shape(64, 128, 256, sharding=where), shape(64, 256, 128, sharding=where)
    batched = cost(lambda x, w: jnp.einsum("bmk,bkn->bmn", x, w), x, w)
    assert batched.flops == 2 * 64 * 128 * 256 * 128
    args = shape(256, 256, sharding=where), shape(12, 256, 256, sharding=where)
    assert cost(functools.partial(layers, unroll=1), *args).flops == 12 * 2 * 256**3
