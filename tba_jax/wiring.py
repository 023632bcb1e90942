# SPDX-License-Identifier: Apache-2.0
"""Wiring: a validated config becomes the parts of a run, connected and not yet moving.

The only module that knows every part and the whole config; sections of the config end here, as
keyword arguments. It starts no thread except the reward processes' own. Its invariant: what
`host_state` saves, `restore` puts back.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax import sharding
from tba_jax.checkpointing import Checkpoints
from tba_jax.config import Config, validate_devices
from tba_jax.data import PromptStream
from tba_jax.decoding.engine import Decoder, SamplingSettings
from tba_jax.evaluation import Evaluation, Evaluator
from tba_jax.logprobs import response_mask, token_logprobs
from tba_jax.metrics import JsonlWriter, MultiWriter, ProgressDisplay
from tba_jax.models import hf_weights, transformer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.outbox import Outbox
from tba_jax.parts import (
    abstract_state,
    make_decoder,
    make_evaluator,
    make_optimizer_from,
    make_rewards,
    model_path,
    step_settings,
)
from tba_jax.replay_buffer import ReplayBuffer
from tba_jax.rewards.source import RewardSource
from tba_jax.searcher import Searcher
from tba_jax.tasks import Task, get_task
from tba_jax.tokenizer import Tokenizer
from tba_jax.train_step import TrainState, init_state, make_train_step
from tba_jax.trainer import Trainer
from tba_jax.trajectory import Batch, length_buckets
from tba_jax.weight_sync import CheckpointTransport, MemoryTransport, Transport


@dataclasses.dataclass
class Run:
    """The parts of one run, and the counters that belong to none of them.

    Attributes:
        clock: seconds of running time, accumulated over resumes.
        before: the first evaluation with its sample texts, None until it is done.
        after: the newest one.
        last_eval_step: step of the newest finished evaluation, -1 before the first.
    """

    config: Config
    workdir: Path
    task: Task
    trainer: Trainer
    searchers: list[Searcher]
    streams: list[PromptStream]
    outboxes: list[Outbox]
    buffer: ReplayBuffer
    transport: Transport
    rewards: RewardSource
    evaluator: Evaluator
    decoder: Decoder
    checkpoints: Checkpoints
    metrics: MultiWriter
    progress: ProgressDisplay
    schedule_log: JsonlWriter
    metrics_log: JsonlWriter
    clock: "RunClock"
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    last_eval_step: int = -1
    last_saved_step: int = -1
    time_to_first_step_s: float | None = None
    searcher_idle_s: dict[int, float] = dataclasses.field(default_factory=dict)

    def host_state(self) -> dict[str, tuple[Mapping[str, np.ndarray], Any]]:
        """Everything that is not train state, copied, for one atomic checkpoint."""
        state: dict[str, tuple[Mapping[str, np.ndarray], Any]] = {
            "buffer": self.buffer.snapshot(),
            "run": (
                {},
                {
                    "elapsed_s": self.clock(),
                    "before": self.before,
                    "after": self.after,
                    "last_eval_step": self.last_eval_step,
                    "time_to_first_step_s": self.time_to_first_step_s,
                    "wait_s": self.trainer.wait_s,
                    "sync_s": self.trainer.sync_s,
                    "trained_tokens": self.trainer.trained_tokens,
                    "staleness_counts": sorted(self.trainer.staleness_counts.items()),
                    "decoded_tokens": [s.decoded_tokens for s in self.searchers],
                    "searcher_idle_s": sorted(self.searcher_idle_s.items()),
                },
            ),
        }
        for i, outbox in enumerate(self.outboxes):
            state[f"outbox_{i}"] = outbox.snapshot()
        return state

    def restore(self, state: Mapping[str, tuple[Mapping[str, np.ndarray], Any]]) -> None:
        """Put back what `host_state` saved; the train state is the trainer's constructor's."""
        self.buffer.restore(*state["buffer"])
        for i, (outbox, stream) in enumerate(zip(self.outboxes, self.streams, strict=True)):
            outbox.restore(*state[f"outbox_{i}"])
            _, prompt_state = outbox.committed
            if prompt_state is not None:
                stream.set_state(prompt_state)
        _, run = state["run"]
        self.clock.add(run["elapsed_s"])
        self.before, self.after = run["before"], run["after"]
        self.last_eval_step = run["last_eval_step"]
        self.last_saved_step = self.trainer.step_index
        self.time_to_first_step_s = run["time_to_first_step_s"]
        self.trainer.wait_s = run["wait_s"]
        self.trainer.sync_s = list(run["sync_s"])
        self.trainer.trained_tokens = run["trained_tokens"]
        self.trainer.staleness_counts = {int(k): int(v) for k, v in run["staleness_counts"]}
        self.searcher_idle_s = {int(k): float(v) for k, v in run["searcher_idle_s"]}
        for searcher, count in zip(self.searchers, run["decoded_tokens"], strict=True):
            searcher.decoded_tokens = count

    def save(self) -> None:
        """Start an asynchronous checkpoint at the trainer's step, unless it has one."""
        step = self.trainer.step_index
        if step == self.last_saved_step:
            return
        # A copy: the save reads in the background what the next donated step overwrites.
        state = jax.tree.map(jnp.copy, self.trainer.state)
        self.checkpoints.save(step, state, self.host_state())
        self.last_saved_step = step

    def record_evaluation(self, step: int, evaluation: Evaluation, start_s: float) -> None:
        """Log one evaluation and keep what the report compares."""
        end = self.clock()
        values = evaluation.metrics()
        self.schedule_log.append(
            {"event": "eval", "step": step, "version": step, "start_s": start_s, "end_s": end}
        )
        self.metrics.write(
            step,
            {"time_s": end, **{f"eval/{k}": v for k, v in values.items()}, "eval/version": step},
        )
        shown = self.config.eval.num_report_samples
        record = {
            **values,
            "step": step,
            "texts": evaluation.texts[:shown],
            "rewards": evaluation.rewards[:shown],
        }
        if self.before is None:
            self.before = record
        self.after = record
        self.last_eval_step = max(self.last_eval_step, step)

    def evaluate_start_model(self) -> None:
        """Measure where the run began, for one that was interrupted before it knew."""
        start = self.clock()
        _, params, _ = hf_weights.load(
            model_path(self.config), param_dtype=jnp.dtype(self.config.model.rollout_dtype)
        )
        self.record_evaluation(0, self.evaluator.run(params), start)

    def abort(self) -> None:
        """Release what would outlive a failure; waits little for storage, which may have failed."""
        self.rewards.close()
        self.checkpoints.abandon(timeout_s=30.0)
        self.progress.close()
        self.metrics.close()
        self.schedule_log.close()

    def close(self) -> None:
        """Release processes, threads and files; complete what is being written."""
        self.rewards.close()
        self.transport.close()
        self.checkpoints.close()
        self.progress.close()
        self.metrics.close()
        self.schedule_log.close()


class RunClock:
    """Seconds of running time; resumes add what earlier processes spent."""

    def __init__(self, now: Callable[[], float], start: float) -> None:
        self._now = now
        self._start = start

    def __call__(self) -> float:
        """Seconds since the run began, without the pauses between processes."""
        return self._now() - self._start

    def add(self, seconds: float) -> None:
        """Count time an earlier process spent."""
        self._start -= seconds


def _score_reference(
    params: Any,
    tokens: Array,
    prompt_lengths: Array,
    response_lengths: Array,
    *,
    response_bucket: int,
    config: TransformerConfig,
    temperature: float,
    compute_dtype: str,
    chunk_tokens: int,
    eos_ids: tuple[int, ...],
    mask_eos: bool,
    min_new_tokens: int,
) -> Array:
    token_values = token_logprobs(
        params,
        tokens,
        prompt_lengths,
        response_lengths,
        response_bucket=response_bucket,
        config=config,
        temperature=temperature,
        compute_dtype=jnp.dtype(compute_dtype),
        chunk_tokens=chunk_tokens,
        min_new_tokens=min_new_tokens,
        eos_ids=eos_ids,
    )
    mask = response_mask(
        tokens[..., -response_bucket:], response_lengths, eos_ids=eos_ids, mask_eos=mask_eos
    )
    return jnp.sum(token_values * mask, axis=-1)


class _Reference:
    """Reference scorer on one searcher device; the jitted program is shared between searchers."""

    def __init__(self, program: Callable[..., Array], params: Any) -> None:
        self._program = program
        self._params = params

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
    ) -> Array:
        return self._program(
            self._params,
            tokens,
            prompt_lengths,
            response_lengths,
            response_bucket=response_bucket,
        )


def build(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    clock: RunClock,
    progress: ProgressDisplay,
    extra_writers: Sequence[Any] = (),
) -> Run:
    """Make every part and restore the newest checkpoint of the work directory, if there is one.

    Args:
        config: validated.
        workdir: exists.
        clock: started when the process did.
        progress: the display that phases are announced on.
        extra_writers: more metric sinks.

    Raises:
        ConfigError: the devices do not fit the placement.
        ValueError: model folder, data or reward function are not usable; says which and why.
        CheckpointError: the newest checkpoint is not readable.
    """
    folder = Path(workdir).absolute()
    devices = jax.local_devices()
    validate_devices(config, len(devices))
    placement = sharding.place(
        config.placement,
        devices,
        num_trainer_devices=config.num_trainer_devices,
        num_searchers=config.num_searchers,
    )
    task = get_task(config.task.name, config.task.data_path)
    # Before the model, which may take minutes to load: data that cannot be read ends the run.
    progress.note(f"{task.name}: {task.train_size():,} prompts, {task.eval_size():,} held out")
    rewards = make_rewards(config, task, placement.searcher_devices)
    progress.phase("loading the model")
    tokenizer = Tokenizer.load(hf_weights.resolve(model_path(config)))
    param_dtype = jnp.dtype(config.model.param_dtype)
    model_config, params, _ = hf_weights.load(model_path(config), param_dtype=param_dtype)
    prompt_buckets = length_buckets(config.task.max_prompt_tokens, config.batch.num_length_buckets)
    response_buckets = length_buckets(config.search.max_new_tokens, config.batch.num_length_buckets)

    reference_program = jax.jit(
        functools.partial(
            _score_reference,
            config=model_config,
            temperature=config.search.sampling_temperature,
            compute_dtype=config.model.compute_dtype,
            chunk_tokens=config.batch.logprob_chunk_tokens,
            eos_ids=tokenizer.eos_ids,
            mask_eos=config.objective.mask_eos,
            min_new_tokens=config.search.min_new_tokens,
        ),
        static_argnames=("response_bucket",),
    )
    references: dict[Any, _Reference] = {}
    if config.reference.placement == "searcher":
        for device in placement.searcher_devices:
            if device not in references:
                where = jax.sharding.SingleDeviceSharding(device)
                references[device] = _Reference(reference_program, sharding.copy_to(params, where))

    optimizer, schedule = make_optimizer_from(config)
    checkpoints = Checkpoints(str(folder / "checkpoints"), keep=config.checkpoint.keep)
    host_state = None
    if checkpoints.latest_step() is None:
        state = init_state(
            sharding.copy_to(params, placement.replicated_sharding),
            optimizer,
            keep_reference=config.reference.placement == "trainer",
            learn_log_z=config.objective.log_z == "learned",
        )
        state = jax.device_put(state, placement.replicated_sharding)
    else:
        progress.phase("restoring the newest checkpoint")
        target = abstract_state(config, model_config, placement.replicated_sharding)
        _, state, host_state = checkpoints.restore(target)
        state = TrainState(*state) if not isinstance(state, TrainState) else state
    del params

    rollout_dtype = jnp.dtype(config.model.rollout_dtype)
    shardings = placement.publication_shardings()
    layout = functools.partial(transformer.unstack_layers, config=model_config)
    transport: Transport
    if config.sync.transport == "memory":
        transport = MemoryTransport(rollout_dtype, shardings, layout)
    else:
        transport = CheckpointTransport(
            str(folder),
            keep=config.sync.keep,
            dtype=rollout_dtype,
            shardings=shardings,
            layout=layout,
        )
    # The synchronous driver itself decides how far searchers run ahead.
    outbox_bytes = config.search.outbox_bytes if config.driver == "async" else sys.maxsize
    outboxes = [Outbox(outbox_bytes) for _ in range(config.num_searchers)]
    buffer = ReplayBuffer(**config.replay, seed=config.seed)
    schedule_log = JsonlWriter(folder / "schedule.jsonl")
    metrics_log = JsonlWriter(folder / "metrics.jsonl")
    decoder = make_decoder(config, model_config, tokenizer)
    streams = [
        PromptStream(
            task,
            tokenizer,
            searcher=i,
            num_searchers=config.num_searchers,
            ownership=config.search.ownership,
            seed=config.seed,
            max_prompt_tokens=config.task.max_prompt_tokens,
            long_prompts=config.task.long_prompts,
        )
        for i in range(config.num_searchers)
    ]
    first_kind = task.response_kinds[0] if task.response_kinds else ""
    root_key = jax.random.key(config.seed)
    searchers = [
        Searcher(
            index=i,
            stream=streams[i],
            decoder=decoder,
            transport=transport,
            outbox=outboxes[i],
            rewards=rewards,
            reference=references.get(placement.searcher_devices[i]),
            decode_text=tokenizer.batch_decode,
            response_kind=task.response_kind,
            first_kind=first_kind,
            key=root_key,
            prompts_per_round=config.search.prompts_per_round,
            samples_per_prompt=config.search.samples_per_prompt,
            settings=SamplingSettings(
                config.search.max_new_tokens,
                temperature=config.search.sampling_temperature,
                min_new_tokens=config.search.min_new_tokens,
            ),
            explore_share=config.search.explore_share,
            explore_temperatures=(
                config.search.explore_min_temperature,
                config.search.explore_max_temperature,
            ),
            num_slots=config.search.num_slots or None,
            in_flight=config.search.swap == "in_flight",
            prompt_buckets=prompt_buckets,
            response_buckets=response_buckets,
            pad_id=tokenizer.pad_id,
            clock=clock,
        )
        for i in range(config.num_searchers)
    ]
    evaluator = make_evaluator(config, task, tokenizer, decoder, rewards)
    if evaluator.num_skipped:
        skipped = evaluator.num_skipped
        progress.note(f"{skipped} held-out prompts exceed task.max_prompt_tokens: skipped")

    def place_batch(batch: Batch) -> Batch:
        return jax.device_put(batch, placement.batch_sharding)

    trainer = Trainer(
        state=state,
        train_step=make_train_step(
            model_config, optimizer, schedule, step_settings(config, tokenizer.eos_ids)
        ),
        buffer=buffer,
        outboxes=outboxes,
        transport=transport,
        num_prompts=config.batch.num_prompts,
        group_size=config.objective.group_size,
        prompt_buckets=prompt_buckets,
        response_buckets=response_buckets,
        pad_id=tokenizer.pad_id,
        policy_temperature=config.search.sampling_temperature,
        place_batch=place_batch,
        log_event=schedule_log.append,
        clock=clock,
    )
    run = Run(
        config=config,
        workdir=folder,
        task=task,
        trainer=trainer,
        searchers=searchers,
        streams=streams,
        outboxes=outboxes,
        buffer=buffer,
        transport=transport,
        rewards=rewards,
        evaluator=evaluator,
        decoder=decoder,
        checkpoints=checkpoints,
        metrics=MultiWriter([metrics_log, progress, *extra_writers]),
        progress=progress,
        schedule_log=schedule_log,
        metrics_log=metrics_log,
        clock=clock,
    )
    if host_state is not None:
        run.restore(host_state)
    _forget_after(run, trainer.step_index)
    return run


def _forget_after(run: Run, step: int) -> None:
    """Drop log lines of work that was done after the restored checkpoint and is now redone.

    A metrics line of step n was written after update n; schedule events carry the number of
    updates done when they began.
    """

    def is_kept_metric(record: Mapping[str, Any]) -> bool:
        if "eval/n" in record:
            return record["step"] <= run.last_eval_step
        return record["step"] <= step

    merged = [outbox.committed[0] - outbox.num_rounds for outbox in run.outboxes]

    def is_kept_event(record: Mapping[str, Any]) -> bool:
        if record["event"] == "eval":
            return record["step"] <= run.last_eval_step
        if record["event"] == "round":  # an interruption may save rounds merged at this very step
            return record["round"] < merged[record["searcher"]]
        # Weights are published again at the restored step, which changes nothing.
        return record["step"] < step or (record["event"] == "sync" and record["step"] == step)

    run.metrics_log.keep(is_kept_metric)
    run.schedule_log.keep(is_kept_event)
