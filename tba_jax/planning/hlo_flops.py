# SPDX-License-Identifier: Apache-2.0
"""FLOPs of the matrix products of an instruction of HLO text, two per multiply-add.

Products are dots, on TPU convolutions, and on NVIDIA GPUs also calls of cuBLAS and
cuDNN. The FLOPs of flash attention follow from its shapes: two products in the
forward pass and five (cuDNN) or seven (splash) in the backward pass, of which a causal mask leaves
half. Splash attention names the share of visible pairs, which is a lower bound, because it computes
whole blocks; if its mask is data, all pairs count.

Invariant: a call whose FLOPs are unknown is named in the result.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from tba_jax.models.per_shard import VISIBLE_SCOPE
from tba_jax.planning.hlo_text import FREE_CALLS, Instruction, braces, numbers, target


def flops_of(x: Instruction, body: Mapping[str, Instruction]) -> tuple[float, tuple[str, ...]]:
    """Return (FLOPs, names of calls that could not be counted)."""
    if x.opcode == "dot":
        lhs = body[x.operands[0]].arrays[0]
        contracted = math.prod(lhs.dims[i] for i in numbers(x, "lhs_contracting_dims"))
        return 2.0 * x.arrays[0].num_elements * contracted, ()
    if x.opcode == "convolution":
        return _convolution_flops(x, body), ()
    if x.opcode == "custom-call":
        return _call_flops(x, body)
    return 0.0, ()


def _call_flops(x: Instruction, body: Mapping[str, Instruction]) -> tuple[float, tuple[str, ...]]:
    name = target(x)
    if name in FREE_CALLS:
        return 0.0, ()
    estimate = re.search(r'"cost_estimate":\s*\{"flops":\s*"?(\d+)', x.attributes)
    if estimate:
        return float(estimate[1]), ()
    if "/splash_m" in x.attributes:
        return _splash_flops(x, body), ()
    if name.startswith("__cudnn$fmha"):
        return _attention_flops(x, body), ()
    contracting = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', x.attributes)
    if contracting:  # a product by cuBLAS
        lhs = body[x.operands[0]].arrays[0]
        axes = [int(n) for n in re.findall(r"\d+", contracting[1])]
        return 2.0 * x.arrays[0].num_elements * math.prod(lhs.dims[i] for i in axes), ()
    return 0.0, (name,)


def _attention_flops(x: Instruction, body: Mapping[str, Instruction]) -> float:
    """Return the FLOPs of cuDNN attention with scores [b h s t], without masked pairs."""
    scores = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', x.attributes)
    assert scores is not None, x
    num_scores = math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
    products = 5 if target(x).endswith("Backward") else 2
    seen = 0.5 if re.search(r'"mask_type":\s*"(PADDING_)?CAUSAL', x.attributes) else 1.0
    return seen * products * 2.0 * num_scores * body[x.operands[0]].arrays[0].dims[-1]


def _splash_flops(x: Instruction, body: Mapping[str, Instruction]) -> float:
    """Return the FLOPs of splash attention of a share of all pairs; of all, if it is unknown."""
    arrays = [array for name in x.operands for array in body[name].arrays]
    q, k = [a for a in arrays if len(a.dims) > 2 and a.dtype in ("bf16", "f16", "f32")][:2]
    # The metadata of every kernel name the block sizes of all three.
    phase = re.findall(r"/splash_m[a-z]+_(fwd|dq|dkv)", x.attributes)[-1]
    products = {"fwd": 2, "dq": 3, "dkv": 4}[phase]
    found = re.findall(VISIBLE_SCOPE + r"(\d+)", x.attributes)
    share = int(found[-1]) / 1000 if found else 1.0
    return share * products * 2.0 * q.num_elements * k.dims[-2]


def _convolution_flops(x: Instruction, body: Mapping[str, Instruction]) -> float:
    """Return the FLOPs of a convolution, which represents every matrix product on TPU.

    Batch axes of such a product are dilated or padded windows.
    """
    lhs, rhs = (body[name].arrays[0] for name in x.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    assert labels is not None, x
    left, right, out = labels[1], labels[2], labels[3]
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", braces(x.attributes, "window=")))
    spatial = sorted(label for label in out if label.isdigit())

    def per_axis(key: str, default: str) -> list[str]:
        return window[key].split("x") if key in window else [default] * len(spatial)

    positions = 1
    for n, size, stride, pad, left_dilation, right_dilation in zip(
        spatial,
        per_axis("size", "1"),
        per_axis("stride", "1"),
        per_axis("pad", "0_0"),
        per_axis("lhs_dilate", "1"),
        per_axis("rhs_dilate", "1"),
        strict=True,
    ):
        low, hole = int(pad.split("_")[0]), int(left_dilation)
        at_out = np.arange(x.arrays[0].dims[out.index(n)])[:, None] * int(stride)
        at = at_out + np.arange(int(size)) * int(right_dilation) - low
        last = (lhs.dims[left.index(n)] - 1) * hole
        positions *= int(np.sum((at >= 0) & (at <= last) & (at % hole == 0)))
    batch_groups = re.search(r"batch_group_count=(\d+)", x.attributes)
    batch = lhs.dims[left.index("b")] // (int(batch_groups[1]) if batch_groups else 1)
    # The kernel's input features are those of one feature group.
    return 2.0 * batch * rhs.dims[right.index("i")] * rhs.dims[right.index("o")] * positions
