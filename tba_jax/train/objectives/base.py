# SPDX-License-Identifier: Apache-2.0
"""Interface of an objective: a frozen value that computes a loss from groups of responses.

Invariants: nothing is averaged across prompts before log Z is computed, every mean is over the
whole batch, and a response of weight w counts as w responses.
"""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Names of the metrics of `balance_metrics`, which need whole groups.
BALANCE = ("tb_loss", "log_z", "residual_std")


class Totals(NamedTuple):
    """Totals of a whole batch; float32 scalars.

    Attributes:
        prompts: p.
        responses: sum of the weights of all responses.
        tokens: counted tokens, each with the weight of its response.
    """

    prompts: Float[Array, ""]
    responses: Float[Array, ""]
    tokens: Float[Array, ""]


class GroupData(NamedTuple):
    """Up to K distinct responses to each of p prompts: a batch, or some whole groups of it.

    A response counts `weight` times, and the weights of a prompt sum to K, so the loss equals that
    of K rows with repeats. Empty slots, and prompts in other parts of the batch, have values and
    weights of 0. A prompt whose weights are 0 must give a loss of 0 and finite gradients; the means
    below ensure that. Token arrays are 0 at padding. Gradients flow through both forms of the
    policy's log-probs.

    Attributes:
        policy_logprob: [p k], log pi(y|x), sum over the counted tokens.
        policy_token_logprobs: [p k t].
        behavior_token_logprobs: [p k t], log-probs of the distribution that was sampled from.
        reference_logprob: [p k], log pi_ref(y|x), sum.
        reference_token_logprobs: [p k t]; None unless the trainer scores the reference.
        mask: [p k t], the counted tokens.
        reward: [p k], raw, not divided by beta.
        weight: [p k], number of times that the batch contains each response; 0: empty slot.
        length: [p k], tokens of each response.
        staleness: [p k], optimiser steps between the version that drew the response and the trained
            version; 0 for responses that no version drew.
        log_z: [p], learned log Z; None without that head.
        totals: totals of the whole batch.
        token_values: [p k t], learned value of the state before each token; None without a value
            head.
        start_values: [p k t], `token_values` under the policy at the start of the step; None if a
            step makes one update, because both are then equal.
        token_advantages: [p k t], computed by the searcher; None unless the objective reads them.
    """

    policy_logprob: Float[Array, "p k"]
    policy_token_logprobs: Float[Array, "p k t"]
    behavior_token_logprobs: Float[Array, "p k t"]
    reference_logprob: Float[Array, "p k"]
    reference_token_logprobs: Float[Array, "p k t"] | None
    mask: Bool[Array, "p k t"]
    reward: Float[Array, "p k"]
    weight: Float[Array, "p k"]
    length: Int[Array, "p k"]
    staleness: Int[Array, "p k"]
    log_z: Float[Array, " p"] | None
    totals: Totals
    token_values: Float[Array, "p k t"] | None = None
    start_values: Float[Array, "p k t"] | None = None
    token_advantages: Float[Array, "p k t"] | None = None

    @property
    def num_drawn(self) -> Float[Array, " p"]:
        """K of each prompt, the sum of its weights; 0 for prompts in other parts of the batch."""
        return jnp.sum(self.weight, axis=1)

    def mean_over_group(self, x: Float[Array, "p k"]) -> Float[Array, " p"]:
        """Return the weighted mean of each group; 0 for prompts in other parts of the batch."""
        return jnp.sum(x * self.weight, axis=1) / jnp.maximum(self.num_drawn, 1)

    def mean_over_prompts(self, x: Float[Array, " p"]) -> Float[Array, ""]:
        """Return the contribution of these prompts to the mean over the batch's prompts."""
        return jnp.sum(jnp.where(self.num_drawn > 0, x, 0)) / self.totals.prompts

    def mean_over_responses(self, x: Float[Array, "p k"]) -> Float[Array, ""]:
        """Return the contribution of these responses to the weighted mean over all responses."""
        return jnp.sum(x * self.weight) / self.totals.responses

    def mean_over_tokens(self, x: Float[Array, "p k t"]) -> Float[Array, ""]:
        """Return the contribution of these tokens to the weighted mean over all counted tokens."""
        return jnp.sum(jnp.where(self.mask, x, 0) * self.weight[..., None]) / self.totals.tokens


class Loss(NamedTuple):
    """A scalar to minimise, and metrics to log.

    Attributes:
        loss: float32 scalar; gradients flow through the policy's log-probs and a learned log Z.
        metrics: scalars, gradient stopped, logged as "train/NAME".
    """

    loss: Float[Array, ""]
    metrics: Mapping[str, Float[Array, ""]]


class Objective(abc.ABC):
    """An objective: its settings, and its loss on a part of a batch; frozen and hashable.

    A loss computes means with the methods of `GroupData`, so that the losses of the parts of a
    batch sum to the loss of the batch.

    Attributes:
        needs_behavior: whether the objective assumes that the sampler is the current policy, or
            that its log-probs come from one policy. If so, responses of several versions, or of no
            version of the run's policy, are refused.
        needs_token_reference: whether the objective reads the reference token by token; the trainer
            must then score the reference.
        beta_is: positive: the objective divides by beta; any: beta may be 0, which drops the
            reference; unused: the objective does not read beta.
        needs_advantages: whether the objective reads advantages that the searcher computed.
        epochs, minibatches: passes over a batch, and updates per pass. An objective may declare
            them as settings if it bounds ratios to the sampler, and its loss is a mean over tokens
            that does not need whole groups.
        vine_tokens: tokens between two states whose values searchers estimate; 0: no estimates.
        vine_samples: continuations per state.
        log_z_layers, log_z_rate: number of layers and relative learning rate of the head.
    """

    needs_behavior: ClassVar[Any]
    needs_token_reference: ClassVar[Any] = False
    beta_is: ClassVar[Any] = "positive"
    needs_advantages: ClassVar[bool] = False
    epochs: ClassVar[Any] = 1
    minibatches: ClassVar[Any] = 1
    vine_tokens: ClassVar[Any] = 0
    vine_samples: ClassVar[Any] = 0
    log_z_layers: ClassVar[Any] = 1
    log_z_rate: ClassVar[Any] = 1.0

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "needs_behavior"):
            raise TypeError(
                f"objective {cls.__name__} lacks needs_behavior. Set it to True if the objective "
                "assumes something of the sampler, to False if it accepts any sampler"
            )

    @property
    def heads(self) -> tuple[Literal["log_z", "value"], ...]:
        """Learned heads of the objective; at most one."""
        return ()

    @property
    def num_updates(self) -> int:
        """Optimiser updates per batch."""
        return self.epochs * self.minibatches

    def check(self, shared: Any) -> None:  # noqa: B027  (most objectives have no rule)
        """Refuse contradictory settings of this objective.

        Args:
            shared: settings that every objective has, `ObjectiveSettings`.

        Raises:
            ConfigError: see `settings.need`.
        """

    @abc.abstractmethod
    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        """Return the loss.

        Args:
            data: the groups.
            beta: KL coefficient; > 0, or >= 0 if `beta_is` permits 0. The target is
                pi_ref exp(r / beta).
        """


def summed(
    policy_logprob: Float[Array, "p k"],
    reference_logprob: Float[Array, "p k"],
    reward: Float[Array, "p k"],
    log_z: Float[Array, " p"] | None = None,
    weight: Float[Array, "p k"] | None = None,
) -> GroupData:
    """Return groups of one-token responses sampled from the policy, with these log-probs.

    Args:
        policy_logprob, reference_logprob, reward, log_z: as in `GroupData`.
        weight: as in `GroupData`; None: 1 for each response.
    """
    p, k = reward.shape
    weight = jnp.ones((p, k), policy_logprob.dtype) if weight is None else weight
    num = jnp.sum(weight)
    return GroupData(
        policy_logprob=policy_logprob,
        policy_token_logprobs=policy_logprob[..., None],
        behavior_token_logprobs=jax.lax.stop_gradient(policy_logprob)[..., None],
        reference_logprob=reference_logprob,
        reference_token_logprobs=reference_logprob[..., None],
        mask=jnp.ones((p, k, 1), bool),
        reward=reward,
        weight=weight,
        length=jnp.ones((p, k), jnp.int32),
        staleness=jnp.zeros((p, k), jnp.int32),
        log_z=log_z,
        totals=Totals(jnp.asarray(p, weight.dtype), num, num),
    )


def tb_residual(
    policy_logprob: Float[Array, "p k"],
    reference_logprob: Float[Array, "p k"],
    reward: Float[Array, "p k"],
    *,
    beta: Float[Array, ""] | float,
) -> Float[Array, "p k"]:
    """Return the trajectory-balance residual of each response, without log Z(x).

    residual = log pi(y|x) - log pi_ref(y|x) - r(x, y) / beta

    For a fixed prompt, the residual is constant over y exactly when pi is the target
    pi_ref * exp(r / beta) / Z.

    Args:
        policy_logprob: log pi(y|x), summed over response tokens; gradients flow through it.
        reference_logprob: log pi_ref(y|x), summed over the same tokens.
        reward: raw reward, not divided by beta.
        beta: KL coefficient, > 0.

    Returns:
        One residual per response, float32.

    References:
        TBA, arXiv:2503.18929, section 3.2.
    """
    return policy_logprob - reference_logprob - reward / beta


def vargrad_log_z(data: GroupData, residual: Float[Array, "p k"]) -> Float[Array, " p"]:
    """Return the VarGrad estimate of log Z(x): minus the mean residual of the prompt's own group.

    log_z(x) = -(1/K) sum_j weight_j residual(x, y_j), gradient stopped. The stop does not change
    the gradient of the loss, because the centred residuals of a group sum to zero.

    References:
        TBA, arXiv:2503.18929, eq. 4; log-partition-variance form, arXiv:2302.05446.
    """
    return jax.lax.stop_gradient(-data.mean_over_group(residual))


def balance_metrics(
    data: GroupData, residual: Float[Array, "p k"], log_z: Float[Array, " p"]
) -> dict[str, Float[Array, ""]]:
    """Return metrics of how far Trajectory Balance is from being satisfied; gradient stopped.

    tb_loss is the mean of (residual + log_z)^2, residual_std is the square root of tb_loss, and
    log_z is the mean estimate of log Z.
    """
    residual, log_z = jax.lax.stop_gradient((residual, log_z))
    tb_loss = data.mean_over_responses(jnp.square(residual + log_z[:, None]))
    values = tb_loss, data.mean_over_prompts(log_z), jnp.sqrt(tb_loss)
    return dict(zip(BALANCE, values, strict=True))
