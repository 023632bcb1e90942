# SPDX-License-Identifier: Apache-2.0
"""The trainer: train state, the jitted train step, and one optimiser step at a time.

It publishes weights and merges outboxes at every sync, draws batches from the replay buffer,
and minimises the objective. It never generates and cannot see a searcher: responses arrive through
outboxes and the buffer, weights leave through a weight transport. It owns the step counter, the
invariant that published weights are no alias of its state, and the ledger check at every merge.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from tba_jax import objectives
from tba_jax.logprobs import response_mask, token_logprobs
from tba_jax.models.transformer import TransformerConfig
from tba_jax.outbox import Outbox
from tba_jax.replay_buffer import ReplayBuffer
from tba_jax.trajectory import Batch, Draw, pack_batch
from tba_jax.weight_sync import Transport


class NonFiniteError(RuntimeError):
    """Loss or gradient is not finite; the message has the step and the last metrics."""


class TrainState(NamedTuple):
    """Everything a train step reads and writes on the device.

    Attributes:
        step: int32, optimiser updates done.
        params: policy parameters.
        opt_state: optax state.
        reference_params: reference parameters where the trainer scores them, else None.
    """

    step: Array
    params: Any
    opt_state: Any
    reference_params: Any


class StepSettings(NamedTuple):
    """The static part of a train step (hashable): objective, schedules, masks, dtypes."""

    objective: str
    scale: str
    beta: float
    beta_schedule: str
    beta_final: float
    beta_steps: int
    beta_jump_step: int
    mask_eos: bool
    eos_ids: tuple[int, ...]
    temperature: float
    reference_reset_period: int
    compute_dtype: str
    logprob_chunk_tokens: int
    remat: bool


def learning_rate_schedule(
    *,
    schedule: str,
    learning_rate: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    num_steps: int,
) -> optax.Schedule:
    """Learning rate as a function of the step.

    constant; linear and cosine: to 0; wsd: stable, then, cosine decay to 0 over `decay_steps`
    (a horizon beyond the last step leaves the rate above 0, as in the paper's Figure 1 run).

    References:
        TBA, arXiv:2503.18929, appendix B.1.
    """

    def warmup(step: Any) -> Any:
        # From one part in warmup_steps, not from 0, which would waste the first batch.
        return learning_rate * (step + 1) / max(1, warmup_steps)

    left = max(1, num_steps - warmup_steps)
    if schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(learning_rate)
    elif schedule == "linear":
        after = optax.linear_schedule(learning_rate, 0.0, decay_steps or left)
    elif schedule == "cosine":
        after = optax.cosine_decay_schedule(learning_rate, decay_steps or left)
    else:
        after = optax.join_schedules(
            [
                optax.constant_schedule(learning_rate),
                optax.cosine_decay_schedule(learning_rate, decay_steps),
            ],
            [stable_steps],
        )
    return optax.join_schedules([warmup, after], [warmup_steps]) if warmup_steps else after


def make_optimizer(
    schedule: optax.Schedule,
    *,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    clip_norm: float,
) -> optax.GradientTransformation:
    """AdamW, after clipping by global norm where `clip_norm` > 0; decay on matrices only."""

    def is_matrix(params: Any) -> Any:
        # Stacked layers add a leading axis, so norm scales and biases have two axes and their names
        # tell them apart.
        def decide(path: Any, x: Array) -> bool:
            name = jax.tree_util.keystr(path)
            return x.ndim >= 2 and not any(word in name for word in ("norm", "bias"))

        return jax.tree_util.tree_map_with_path(decide, params)

    adamw = optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw) if clip_norm else adamw


def init_state(
    params: Any, optimizer: optax.GradientTransformation, *, keep_reference: bool
) -> TrainState:
    """Fresh state at step 0; the reference, where kept, is a copy of the policy."""
    reference = jax.tree.map(jnp.copy, params) if keep_reference else None
    return TrainState(jnp.int32(0), params, optimizer.init(params), reference)


def make_train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    settings: StepSettings,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """The jitted train step; its state argument is donated.

    Returns:
        (state, batch) -> (state, metrics): metrics are float32 scalars.
    """
    compute_dtype = jnp.dtype(settings.compute_dtype)

    def logprobs(params: Any, batch: Batch) -> Float[Array, "p k t"]:
        return token_logprobs(
            params,
            batch.tokens,
            batch.prompt_lengths,
            batch.response_lengths,
            response_bucket=batch.behavior_token_logprobs.shape[-1],
            config=config,
            temperature=settings.temperature,
            compute_dtype=compute_dtype,
            chunk_tokens=settings.logprob_chunk_tokens,
            remat=settings.remat,
        )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        t = batch.behavior_token_logprobs.shape[-1]
        mask = response_mask(
            batch.tokens[..., -t:],
            batch.response_lengths,
            eos_ids=settings.eos_ids,
            mask_eos=settings.mask_eos,
        )
        beta = objectives.beta_at(
            state.step,
            schedule=settings.beta_schedule,
            beta=settings.beta,
            beta_final=settings.beta_final,
            beta_steps=settings.beta_steps,
            beta_jump_step=settings.beta_jump_step,
        )
        if state.reference_params is None:
            reference_logprob = batch.reference_logprob
        else:
            reference_logprob = jnp.sum(logprobs(state.reference_params, batch) * mask, axis=-1)

        def loss_fn(params: Any) -> tuple[Array, tuple[objectives.Loss, Array]]:
            policy_token_logprobs = logprobs(params, batch)
            policy_logprob = jnp.sum(policy_token_logprobs * mask, axis=-1)
            if settings.objective == "tb":
                loss = objectives.tb_loss(
                    policy_logprob,
                    reference_logprob,
                    batch.rewards,
                    beta=beta,
                    scale="paper" if settings.scale == "paper" else "advantage",
                )
            else:
                loss = objectives.rloo_loss(
                    policy_logprob, reference_logprob, batch.rewards, beta=beta
                )
            return loss.loss, (loss, policy_token_logprobs)

        (_, (loss, policy_token_logprobs)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        step = state.step + 1
        reference = state.reference_params
        if reference is not None and settings.reference_reset_period:
            reset = step % settings.reference_reset_period == 0
            reference = jax.tree.map(lambda r, p: jnp.where(reset, p, r), reference, params)

        policy_logprob = jnp.sum(policy_token_logprobs, axis=-1)
        behavior_logprob = jnp.sum(batch.behavior_token_logprobs, axis=-1)
        off_policy = objectives.off_policy_stats(policy_logprob, behavior_logprob)
        counted = jnp.sum(policy_token_logprobs * mask, axis=-1)
        num_tokens = jnp.sum(batch.response_lengths)
        grad_norm = optax.tree.norm(grads)
        metrics = {
            "train/loss": loss.loss,
            "train/tb_loss": loss.tb_loss,
            "train/log_z": jnp.mean(loss.log_z),
            "train/residual_std": jnp.sqrt(
                jnp.mean(jnp.square(loss.residual + loss.log_z[:, None]))
            ),
            "train/reward_mean": jnp.mean(batch.rewards),
            "train/reward_std": jnp.mean(jnp.std(batch.rewards, axis=1)),
            "train/grad_norm": grad_norm,
            "train/lr": schedule(state.step),
            "train/beta": beta,
            "train/kl_reference": jnp.mean(counted - reference_logprob),
            "train/nll_per_token": -jnp.sum(policy_token_logprobs) / num_tokens,
            "train/response_length_mean": jnp.mean(batch.response_lengths.astype(jnp.float32)),
            "train/response_tokens": num_tokens,
            "train/ess_fraction": off_policy.ess_fraction,
            "train/log_ratio_p05": off_policy.log_ratio_p05,
            "train/log_ratio_p50": off_policy.log_ratio_p50,
            "train/log_ratio_p95": off_policy.log_ratio_p95,
            "train/nonfinite": (~(jnp.isfinite(loss.loss) & jnp.isfinite(grad_norm))).astype(
                jnp.int32
            ),
            # Largest |trainer - sampler| log-prob per token over rows drawn by this very version;
            # nan when the batch holds none. Anything above rounding means two definitions.
            "train/sampler_gap": _gap_at_staleness_0(
                policy_token_logprobs, batch.behavior_token_logprobs, batch.versions, state.step
            ),
        }
        return TrainState(step, params, opt_state, reference), metrics

    return jax.jit(train_step, donate_argnums=0)


def _gap_at_staleness_0(
    policy: Float[Array, "p k t"], behavior: Float[Array, "p k t"], versions: Array, step: Array
) -> Float[Array, ""]:
    current = (versions == step)[..., None]
    gap = jnp.max(jnp.where(current, jnp.abs(policy - behavior), -jnp.inf))
    return jnp.where(gap >= 0, gap, jnp.nan)


class Trainer:
    """One optimiser step per `step()`; also publishes and merges, which the driver schedules.

    Args:
        state: initial or restored train state.
        train_step: from `make_train_step`.
        buffer: the replay buffer; this object is its only writer.
        outboxes: one per searcher.
        transport: where weights are published.
        num_prompts, group_size: p and K of a batch.
        prompt_buckets, response_buckets: padded lengths that are compiled for.
        pad_id: token id at padding.
        place_batch: puts host arrays on the trainer's devices.
        log_event: schedule log.
        clock: seconds since the run began.
    """

    def __init__(
        self,
        *,
        state: TrainState,
        train_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]],
        buffer: ReplayBuffer,
        outboxes: Sequence[Outbox],
        transport: Transport,
        num_prompts: int,
        group_size: int,
        prompt_buckets: Sequence[int],
        response_buckets: Sequence[int],
        pad_id: int,
        place_batch: Callable[[Batch], Batch],
        log_event: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self.state = state
        self.step_index = int(state.step)
        self.wait_s = 0.0
        self.sync_s: list[float] = []
        self.trained_tokens = 0
        self.last_event: Mapping[str, Any] = {}
        self.staleness_counts: dict[int, int] = {}
        self._train_step = train_step
        self._buffer = buffer
        self._outboxes = outboxes
        self._transport = transport
        self._num_prompts = num_prompts
        self._group_size = group_size
        self._prompt_buckets = tuple(prompt_buckets)
        self._response_buckets = tuple(response_buckets)
        self._pad_id = pad_id
        self._place_batch = place_batch
        self._log_event = log_event
        self._clock = clock
        self._waiting_since: float | None = None

    def _log(self, event: Mapping[str, Any]) -> None:
        self.last_event = event
        self._log_event(event)

    def publish(self) -> float:
        """Publish the current weights under the current step; returns the pause in seconds."""
        start = self._clock()
        self._transport.publish(self.step_index, self.state.params)
        end = self._clock()
        self._log(
            {
                "event": "sync",
                "step": self.step_index,
                "version": self.step_index,
                "start_s": start,
                "end_s": end,
            }
        )
        self.sync_s.append(end - start)
        return end - start

    def merge(self, max_rounds: int | None = None) -> list[Mapping[str, float]]:
        """Move finished rounds into the buffer and check the ledger.

        Args:
            max_rounds: take at most this many per outbox (exact lag); None: all.

        Returns:
            One summary per merged round, for the search metrics.
        """
        commits = [c for outbox in self._outboxes for c in outbox.take(max_rounds)]
        if commits:
            self._buffer.merge(commits, self.step_index)
        counts = [outbox.counts for outbox in self._outboxes]
        self._buffer.check_ledger(sum(c.pending for c in counts), sum(c.generated for c in counts))
        summaries = []
        for commit in commits:
            rejected: dict[str, int] = {}
            for group in commit.groups:
                for reason, count in group.rejected.items():
                    rejected[reason] = rejected.get(reason, 0) + count
            self._log(
                {
                    "event": "round",
                    "searcher": commit.searcher,
                    "round": commit.round,
                    "version": commit.version,
                    "swaps": [list(swap) for swap in commit.swaps],
                    "prompt_ids": [g.prompt.prompt_id for g in commit.groups],
                    "generated": commit.generated,
                    "rejected": rejected,
                    "merge_step": self.step_index,
                    **commit.wall,
                }
            )
            summaries.append(commit.wall)
        return summaries

    def step(self) -> dict[str, Any] | None:
        """One optimiser step, or None when the buffer has nothing to train on yet.

        Returns:
            Host metrics of the step.

        Raises:
            NonFiniteError: loss or gradient is nan or infinite.
        """
        start = self._clock()
        draws = self._buffer.sample(self._num_prompts, self._group_size, self.step_index)
        if draws is None:
            if self._waiting_since is None:
                self._waiting_since = start
            return None
        waited = 0.0 if self._waiting_since is None else start - self._waiting_since
        self._waiting_since = None
        self.wait_s += waited
        batch = pack_batch(
            draws,
            prompt_buckets=self._prompt_buckets,
            response_buckets=self._response_buckets,
            pad_id=self._pad_id,
        )
        drawn_s = self._clock() - start
        self.state, metrics = self._train_step(self.state, self._place_batch(batch))
        # One transfer for all scalars; it is also what waits for the step.
        values = {k: float(v) for k, v in jax.device_get(metrics).items()}
        end = self._clock()
        if values.pop("train/nonfinite"):
            raise NonFiniteError(
                f"step {self.step_index}: loss {values['train/loss']}, gradient norm "
                f"{values['train/grad_norm']} are not both finite; last metrics: {values}. Lower "
                "config.optimizer.learning_rate or raise config.objective.beta, and begin again in "
                "another --workdir: the policy of the newest checkpoint may be spoilt already"
            )
        step = self.step_index
        self.step_index += 1
        self.trained_tokens += int(values["train/response_tokens"])
        self._log(
            {
                "event": "step",
                "step": step,
                "start_s": start,
                "end_s": end,
                "wait_s": waited,
                "trajectory_ids": [list(d.trajectory_ids) for d in draws],
                "bucket": [
                    batch.tokens.shape[-1] - batch.behavior_token_logprobs.shape[-1],
                    batch.behavior_token_logprobs.shape[-1],
                ],
            }
        )
        values.update(
            {
                "train/wait_batch_s": waited,
                "train/draw_s": drawn_s,
                "train/step_s": end - start,
                "train/tokens_per_s": values["train/response_tokens"] / max(end - start, 1e-9),
                "train/padding_share": 1 - _real_share(batch),
                **self._staleness_metrics(draws, step),
            }
        )
        return values

    def _staleness_metrics(self, draws: Sequence[Draw], step: int) -> dict[str, Any]:
        staleness = np.array([step - y.version_min for d in draws for y in d.trajectories])
        values, counts = np.unique(staleness, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self.staleness_counts[value] = self.staleness_counts.get(value, 0) + count
        total = sum(len(d.trajectories) for d in draws)
        return {
            "buffer/staleness_mean": float(staleness.mean()),
            "buffer/staleness_max": int(staleness.max()),
            "buffer/staleness_histogram": [
                [int(v), int(c)] for v, c in zip(values, counts, strict=True)
            ],
            "buffer/fresh_fraction": float(np.mean([d.is_fresh for d in draws])),
            "buffer/repeat_fraction": sum(d.num_repeats for d in draws) / total,
        }


def _real_share(batch: Batch) -> float:
    return float((batch.prompt_lengths + batch.response_lengths).sum() / batch.tokens.size)
