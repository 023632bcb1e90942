# SPDX-License-Identifier: Apache-2.0
"""Settings of the model that is trained, and of its adapters."""

from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Dtype, Section, field, need

LORA_MODULES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class ModelSettings(Section):
    """The model that is trained."""

    path: str = field("", "HF folder, hub id or embedded:NAME; empty: embedded:start_model")
    param_dtype: Dtype = field("float32", "storage of policy and reference parameters")
    compute_dtype: Dtype = field("float32", "matmul inputs of the trainer; the loss is float32")
    remat: Literal["none", "dots", "layers"] = field(
        "layers", "what the backward pass computes again: nothing, all but matrix products, layers"
    )
    attention: Literal["auto", "xla", "tpu_kernel"] = field(
        "auto",
        "auto: flash attention of cuDNN and a decode kernel on NVIDIA GPUs, else xla; xla: plain "
        "programs everywhere, where a kernel fails or is doubted; tpu_kernel: splash attention and "
        "a decode kernel, for TPUs, which no one has measured",
        on_resume=True,
    )
    rollout_dtype: Dtype = field("float32", "what searchers get and compute in")


@dataclass(frozen=True)
class LoraSettings(Section):
    """Adapters, which are trained and published while the parameters stay."""

    rank: int = field(0, "of each adapter; 0: all parameters are trained", at_least=0)
    alpha: float = field(16.0, "an adapter's product counts alpha / rank times", above=0)
    modules: tuple[str, ...] = field(
        ("q", "k", "v", "o"), f"matrices of a layer that have one, of {', '.join(LORA_MODULES)}"
    )

    def check(self) -> None:
        modules = self.modules
        need(
            bool(modules) and len({*modules}) == len(modules) and {*modules} <= {*LORA_MODULES},
            "lora.modules",
            modules,
            f"must be some of {', '.join(LORA_MODULES)}, each once",
            "For example --config.lora.modules=\"('q', 'v')\".",
        )
