# SPDX-License-Identifier: Apache-2.0
"""Settings of log-prob computation, shared by policy, reference and given responses.

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
        temperature: sampling temperature, which divides the logits.
        eos_ids: end-of-sequence IDs; used if `min_new_tokens` > 0.
        min_new_tokens: minimum length of a response. Earlier, `eos_ids` have probability 0, as in
            decoding, and the probabilities of the other tokens are renormalised.
        kept_bytes: logits up to this size, over all devices, are kept for the backward pass instead
            of recomputed.
        compute_dtype: name of the matmul input dtype; the log-softmax is always float32.
    """

    temperature: float = 1.0
    eos_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    kept_bytes: int = KEPT_BYTES
    compute_dtype: str = "float32"
