# SPDX-License-Identifier: Apache-2.0
"""Settings of log-prob computation, shared by policy, reference and start data.

Invariant: the same `Scoring` and the same weights give the same log-probs everywhere.
"""

import dataclasses

KEPT_BYTES = 256 * 2**20
"""Size of four blocks for 8,192 tokens: small compared to the activations of a model on an
accelerator, and enough for a micro-batch on a CPU. On CPU, two more arrays of that size exist for a
while."""


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Definition of log pi(y|x), and options of its computation.

    Attributes:
        temperature: the sampling temperature; divides the logits.
        eos_ids: end-of-sequence ids; used if `min_new_tokens` > 0 or `mask_eos`.
        min_new_tokens: minimum length of a response: before it, `eos_ids` have probability 0, as in
            decoding, and the other tokens are renormalised.
        mask_eos: leave EOS out of the sum over a response, as the official GSM8K code does (its
            tokenizer pads with EOS).
        chunk_tokens: maximum tokens, over all devices, per block of logits.
        kept_bytes: logits up to this size, over all devices, are kept for the backward pass instead
            of recomputed, whatever `chunk_tokens` is.
        compute_dtype: name of the matmul input dtype; the log-softmax is always float32.
    """

    temperature: float = 1.0
    eos_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    mask_eos: bool = False
    chunk_tokens: int = 8192
    kept_bytes: int = KEPT_BYTES
    compute_dtype: str = "float32"
