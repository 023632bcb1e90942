# SPDX-License-Identifier: Apache-2.0
"""What an objective is: a value that makes a loss of groups of responses.

Arrays in, a scalar and metrics out. An objective does not know where log-probs come from, how rows
are padded or packed, or that a batch is worked on in parts. Three invariants stand here: nothing is
averaged across prompts before log Z is taken, every mean is over the whole batch, and a response
with a weight counts as so many responses.
"""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# What `balance_metrics` says, of whole groups.
BALANCE = ("tb_loss", "log_z", "residual_std")


class Totals(NamedTuple):
    """What a whole batch holds; all scalars, float32.

    Attributes:
        prompts: p.
        responses: sum of the weights.
        tokens: those that count, each with the weight of its response.
    """

    prompts: Float[Array, ""]
    responses: Float[Array, ""]
    tokens: Float[Array, ""]


class GroupData(NamedTuple):
    """Up to K distinct responses to each of p prompts: a batch, or whole groups, a part of it.

    A response counts `weight` times, K in all for a prompt: a loss is what it would be of K rows
    with repeats. Places of no response, and all of prompts in other parts, are 0 and have no
    weight; a prompt without weights must give a loss of 0 and finite gradients, which the means
    here see to. Token arrays are 0 at padding. Gradients flow through both forms of the policy's
    log-probs.

    Attributes:
        policy_logprob: [p k], log pi(y|x), summed over the tokens that count.
        policy_token_logprobs: [p k t].
        behavior_token_logprobs: [p k t], of the distribution actually sampled from.
        reference_logprob: [p k], log pi_ref(y|x), summed.
        reference_token_logprobs: [p k t]; None unless the trainer scores the reference.
        mask: [p k t], the tokens that count.
        reward: [p k], raw, not divided by beta.
        weight: [p k], how often each response was drawn; 0: there is none.
        length: [p k], tokens of each response.
        staleness: [p k], optimiser steps between the version that drew it and the trained one; 0
            where no version did.
        log_z: [p], learned; None without that head.
        totals: of the whole batch.
        token_values: [p k t], learned, of the state before each token; None without that head.
        start_values: [p k t], the same of the policy that the step began with; None where a step
            is one update, so that these are `token_values`.
        token_advantages: [p k t], that came with the responses; None unless the objective reads
            them.
        soft_value: [p k], of the prompt, by what the policy at the start drew for it, in units of
            the reward; nan where it drew nothing. None unless the objective reads it.
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
    soft_value: Float[Array, "p k"] | None = None
    token_advantages: Float[Array, "p k t"] | None = None

    @property
    def num_drawn(self) -> Float[Array, " p"]:
        """K of each prompt, the sum of its weights; 0 for one of another part."""
        return jnp.sum(self.weight, axis=1)

    def mean_over_group(self, x: Float[Array, "p k"]) -> Float[Array, " p"]:
        """The mean of each group, each response with its weight; 0 for one of another part."""
        return jnp.sum(x * self.weight, axis=1) / jnp.maximum(self.num_drawn, 1)

    def mean_over_prompts(self, x: Float[Array, " p"]) -> Float[Array, ""]:
        """The part of the whole batch's mean that is of these prompts; parts add up."""
        return jnp.sum(jnp.where(self.num_drawn > 0, x, 0)) / self.totals.prompts

    def mean_over_responses(self, x: Float[Array, "p k"]) -> Float[Array, ""]:
        """The same over responses, each with its weight."""
        return jnp.sum(x * self.weight) / self.totals.responses

    def mean_over_tokens(self, x: Float[Array, "p k t"]) -> Float[Array, ""]:
        """The same over the tokens that count, each with the weight of its response."""
        return jnp.sum(jnp.where(self.mask, x, 0) * self.weight[..., None]) / self.totals.tokens


class Loss(NamedTuple):
    """A scalar to minimise and what is worth logging about it.

    Attributes:
        loss: float32 scalar; gradients flow through the policy's log-probs and a learned log Z.
        metrics: scalars, gradient stopped, logged as "train/NAME".
    """

    loss: Float[Array, ""]
    metrics: Mapping[str, Float[Array, ""]]


class Objective(abc.ABC):
    """A frozen, hashable value. Means are `GroupData`'s, so that losses of parts add up.

    Attributes:
        needs_behavior: it assumes something of the sampler (that it is the current policy, or that
            its log-probs are those of one policy), so responses that several versions or none of
            the run's policies drew are refused.
        needs_token_reference: it reads the reference token by token; only a reference that the
            trainer scores is known so.
        beta_is: positive: it divides by beta; any: 0 leaves the reference out; unused.
        needs_soft_value: it reads what the buffer keeps of each prompt.
        needs_advantages: it reads those that come with responses.
        epochs, minibatches: passes over a batch, and updates of a pass. Only an objective that
            bounds ratios to the sampler, and whose loss is a mean of tokens that needs no whole
            group, declares them as settings.
        log_z_layers, log_z_rate: of a learned log Z or of learned values.
        value_temperature: of the soft value that it reads, in units of the reward; 0: beta.
    """

    needs_behavior: ClassVar[Any]
    needs_token_reference: ClassVar[Any] = False
    beta_is: ClassVar[Any] = "positive"
    needs_soft_value: ClassVar[Any] = False
    needs_advantages: ClassVar[bool] = False
    epochs: ClassVar[Any] = 1
    minibatches: ClassVar[Any] = 1
    log_z_layers: ClassVar[Any] = 1
    log_z_rate: ClassVar[Any] = 1.0
    value_temperature: ClassVar[Any] = 0.0

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "needs_behavior"):
            raise TypeError(
                f"objective {cls.__name__} does not say needs_behavior: True if it assumes "
                "something of the sampler, False if any sampler will do"
            )

    @property
    def heads(self) -> tuple[Literal["log_z", "value"], ...]:
        """What is learned beside the policy; one of them at most."""
        return ()

    @property
    def num_updates(self) -> int:
        """Optimiser updates of one batch."""
        return self.epochs * self.minibatches

    def check(self, shared: Any) -> None:  # noqa: B027  (most objectives have no such rule)
        """Refuse settings of this objective that make no sense together.

        Args:
            shared: settings that every objective has, `ObjectiveSettings`.

        Raises:
            ConfigError: see `settings.need`.
        """

    @abc.abstractmethod
    def __call__(self, data: GroupData, beta: Float[Array, ""] | float) -> Loss:
        """The loss.

        Args:
            data: the groups.
            beta: KL coefficient, > 0, or at least 0 where `beta_is` says so; the target is
                pi_ref exp(r / beta).
        """


def summed(
    policy_logprob: Float[Array, "p k"],
    reference_logprob: Float[Array, "p k"],
    reward: Float[Array, "p k"],
    log_z: Float[Array, " p"] | None = None,
    weight: Float[Array, "p k"] | None = None,
) -> GroupData:
    """A batch of which only sums are known: responses of one token, drawn by the policy itself.

    Args:
        policy_logprob, reference_logprob, reward, log_z: as in `GroupData`.
        weight: the same; None: each was drawn once.
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
    """Trajectory-balance residual of each response, up to log Z(x).

    residual = log pi(y|x) - log pi_ref(y|x) - r(x, y) / beta

    It is constant over y for a fixed prompt exactly when pi is the target
    pi_ref * exp(r / beta) / Z.

    Args:
        policy_logprob: log pi(y|x), summed over response tokens; gradients flow here.
        reference_logprob: log pi_ref(y|x), same tokens.
        reward: raw reward, not divided by beta.
        beta: KL coefficient, > 0.

    Returns:
        One residual per response, float32.

    References:
        TBA, arXiv:2503.18929, section 3.2.
    """
    return policy_logprob - reference_logprob - reward / beta


def vargrad_log_z(data: GroupData, residual: Float[Array, "p k"]) -> Float[Array, " p"]:
    """VarGrad estimate of log Z(x): minus the mean residual of the prompt's own group.

    log_z(x) = -(1/K) sum_j weight_j residual(x, y_j), gradient stopped. Stopping the gradient
    changes nothing as the centred residuals of a group sum to zero; it states the intent.

    References:
        TBA, arXiv:2503.18929, eq. 4; log-partition-variance form, arXiv:2302.05446.
    """
    return jax.lax.stop_gradient(-data.mean_over_group(residual))


def balance_metrics(
    data: GroupData, residual: Float[Array, "p k"], log_z: Float[Array, " p"]
) -> dict[str, Float[Array, ""]]:
    """How far from balance the policy is, whatever is minimised; gradient stopped.

    tb_loss is the mean of (residual + log_z)^2, residual_std its root, log_z the mean estimate.
    """
    residual, log_z = jax.lax.stop_gradient((residual, log_z))
    tb_loss = data.mean_over_responses(jnp.square(residual + log_z[:, None]))
    values = tb_loss, data.mean_over_prompts(log_z), jnp.sqrt(tb_loss)
    return dict(zip(BALANCE, values, strict=True))
