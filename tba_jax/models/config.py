# SPDX-License-Identifier: Apache-2.0
"""Settings of the model that is trained, and of its adapters."""

from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Dtype, Section, field, need

MATRICES = (
    *("q", "q_gate", "k", "v", "o", "gate", "up", "down"),
    *("delta_q", "delta_k", "delta_v", "delta_gate", "delta_o"),
)
"""Matrices of layers that can have adapters."""


@dataclass(frozen=True)
class ModelSettings(Section):
    """The model that is trained."""

    path: str = field("", "HF folder, hub ID or embedded:NAME; empty: embedded:start_model")
    param_dtype: Dtype = field("float32", "storage dtype of policy and reference parameters")
    compute_dtype: Literal["float32", "bfloat16", "auto"] = field(
        "float32",
        "dtype of matmul inputs and of the searchers' weights; the loss is float32; auto: float32 "
        "on CPUs, else bfloat16",
    )
    remat: Literal["auto", "none", "dots", "layers"] = field(
        "auto",
        "recomputation in the backward pass: none: nothing; dots: all except matrix products; "
        "layers: whole layers; auto: in bfloat16 on GPUs and TPUs, without "
        "experts, the faster of dots and layers, each with the rows that fit; else layers",
    )
    attention: Literal["auto", "xla"] = field(
        "auto",
        "auto: on NVIDIA GPUs flash attention of cuDNN, on TPUs splash attention, in bfloat16; "
        "else xla; xla: no kernels on any platform, to rule out a kernel as cause of an error",
        on_resume=True,
    )


@dataclass(frozen=True)
class LoraSettings(Section):
    """Low-rank adapters, which are trained and published while the parameters are frozen."""

    rank: int = field(0, "rank of each adapter; 0: train all parameters", at_least=0)
    alpha: float = field(16.0, "scale of the adapters: alpha / rank times their product", above=0)
    modules: tuple[str, ...] = field(
        ("q", "k", "v", "o"), f"matrices with an adapter, of {', '.join(MATRICES)}"
    )

    def check(self) -> None:
        modules = self.modules
        need(
            bool(modules) and len({*modules}) == len(modules) and {*modules} <= {*MATRICES},
            "lora.modules",
            modules,
            f"must be some of {', '.join(MATRICES)}, each once",
            "For example --config.lora.modules=\"('q', 'v')\".",
        )
