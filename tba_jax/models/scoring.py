# SPDX-License-Identifier: Apache-2.0
"""How given responses are scored: one value for policy, reference and start data.

It holds numbers and names, and loads no jax. The invariant: whoever scores with the same `Scoring`
and the same weights gets the same log-probs.
"""

import dataclasses

KEPT_BYTES = 256 * 2**20
"""As much as four blocks of 8,192 tokens have, little beside the activations of a model that needs
an accelerator, and all of what a micro-batch on a CPU has. On CPU two more arrays of that size are
there for a while."""


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What log pi(y|x) means, and how it is computed.

    Attributes:
        temperature: the sampling temperature; divides the logits.
        eos_ids: end-of-sequence ids; read where `min_new_tokens` > 0 or `mask_eos`.
        min_new_tokens: before as many tokens a response cannot end: `eos_ids` have probability 0
            there, as in decoding, and the others share what they had.
        mask_eos: leave EOS out of the sum over a response, as the official GSM8K code does (its
            tokenizer pads with EOS).
        chunk_tokens: most tokens, over all devices, for which a block of logits exists at a time.
        kept_bytes: logits of at most as many, over all devices, are kept for the backward pass and
            not made again, whatever `chunk_tokens` is.
        compute_dtype: name of the matmul input type; the log-softmax is float32 whatever it is.
    """

    temperature: float = 1.0
    eos_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    mask_eos: bool = False
    chunk_tokens: int = 8192
    kept_bytes: int = KEPT_BYTES
    compute_dtype: str = "float32"
