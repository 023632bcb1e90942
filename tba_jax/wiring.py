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
from jax.sharding import Mesh
from jaxtyping import Array

from tba_jax import lora, sharding
from tba_jax.checkpointing import Checkpoints
from tba_jax.config import Config, validate_devices
from tba_jax.data import PromptStream
from tba_jax.decoding.engine import Decoder
from tba_jax.evaluation import Evaluation, Evaluator
from tba_jax.metrics import JsonlWriter, MultiWriter, ProgressDisplay
from tba_jax.models import families, hf_weights
from tba_jax.models.shardings import param_shardings
from tba_jax.models.transformer import TransformerConfig
from tba_jax.outbox import Outbox
from tba_jax.parts import (
    abstract_state,
    adapter_shardings,
    make_decoder,
    make_evaluator,
    make_gold,
    make_metrics,
    make_optimizer_from,
    make_publication,
    make_reference_program_from,
    make_rewards,
    make_step_shardings,
    make_task,
    model_path,
    on_device,
    packed_row_buckets,
    place_run,
    policy_config,
    reference_shardings,
    sampling_settings,
    searcher_shardings,
    start_weights,
    step_settings,
)
from tba_jax.reference import Reference
from tba_jax.replay_buffer import ReplayBuffer
from tba_jax.rewards.source import RewardSource
from tba_jax.searcher import Searcher
from tba_jax.tasks import Task
from tba_jax.tokenizer import Tokenizer
from tba_jax.train_step import TrainState, make_init_state, make_train_step
from tba_jax.trainer import Trainer
from tba_jax.trajectory import Batch, PackedBatch, length_buckets
from tba_jax.weight_sync import (
    CheckpointTransport,
    MemoryTransport,
    MergingTransport,
    Transport,
    make_publish_program,
)


@dataclasses.dataclass
class Run:
    """The parts of one run, and the counters that belong to none of them.

    Attributes:
        rewards: what training learns from; gold: what judges the win rate, if anything.
        clock: seconds of running time, accumulated over resumes.
        before: the first evaluation with its sample texts, None until it is done.
        after: the newest one.
        last_eval_step: step of the newest finished evaluation, -1 before the first.
        base_fingerprint: of the weights that adapters are trained on; "" where all are trained.
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
    gold: RewardSource | None
    evaluator: Evaluator
    decoder: Decoder
    placement: sharding.Placement
    model_config: TransformerConfig
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
    base_fingerprint: str = ""

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
                    "base_fingerprint": self.base_fingerprint,
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
        weights = start_weights(
            self.config,
            self.model_config,
            self.placement.trainer_mesh,
            self.placement.searcher_meshes[0],
        )
        self.record_evaluation(0, self.evaluator.run(weights), start)

    def close_rewards(self) -> None:
        """Stop what computes rewards."""
        self.rewards.close()
        if self.gold is not None:
            self.gold.close()

    def abort(self) -> None:
        """Release what would outlive a failure; waits little for storage, which may have failed."""
        self.close_rewards()
        self.checkpoints.abandon(timeout_s=30.0)
        self.progress.close()
        self.metrics.close()
        self.schedule_log.close()

    def close(self) -> None:
        """Release processes, threads and files; complete what is being written."""
        self.close_rewards()
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
        ValueError: model folder, data or reward function are not usable, or the model is not the
            one that the adapters of a checkpoint were trained on; says which and why.
        CheckpointError: the newest checkpoint is not readable.
    """
    folder = Path(workdir).absolute()
    devices = jax.local_devices()
    validate_devices(config, len(devices))
    placement = place_run(config, devices)
    task = make_task(config)
    # Before the model, which may take minutes to load: data that cannot be read ends the run.
    progress.note(f"{task.name}: {task.train_size():,} prompts, {task.eval_size():,} held out")
    folder_of_model = hf_weights.resolve(model_path(config))
    tokenizer = Tokenizer.load(folder_of_model)
    # Searcher 0 runs evaluations, on the weights that it has.
    evaluation_mesh = placement.searcher_meshes[0]
    searcher_devices = [mesh.devices.flat[0] for mesh in placement.searcher_meshes]
    rewards = make_rewards(config, task, tokenizer, searcher_devices)
    gold = make_gold(config, task, tokenizer, evaluation_mesh.devices.flat[0])
    model_config = families.transformer_config(hf_weights.load_config(folder_of_model))
    policy = policy_config(config, model_config)
    has_adapters = policy.adapters is not None
    shardings = make_step_shardings(config, model_config, placement.trainer_mesh)
    optimizer, schedule = make_optimizer_from(config)
    prompt_buckets = length_buckets(config.task.max_prompt_tokens, config.batch.num_length_buckets)
    response_buckets = length_buckets(config.search.max_new_tokens, config.batch.num_length_buckets)
    checkpoints = Checkpoints(str(folder / "checkpoints"), keep=config.checkpoint.keep)
    is_new = checkpoints.latest_step() is None
    references: dict[Any, Reference] = {}
    params, base, host_state = None, None, None
    if is_new or has_adapters or config.reference.placement == "searcher":
        progress.phase("loading the model")
        _, params, _ = hf_weights.load(
            folder_of_model,
            param_dtype=jnp.dtype(config.model.param_dtype),
            shardings=shardings.base if has_adapters else shardings.state.params,
        )
    if config.reference.placement == "searcher":
        references = _references(config, policy, tokenizer.eos_ids, placement, params)
    if has_adapters:
        base = params
        params = lora.init_adapters(policy, config.seed, shardings.state.params)
    if is_new:
        state = make_init_state(optimizer, shardings)(params)
    else:
        del params
        progress.phase("restoring the newest checkpoint")
        target = abstract_state(config, model_config, placement.trainer_mesh)
        _, state, host_state = checkpoints.restore(target)
        state = TrainState(*state) if not isinstance(state, TrainState) else state
        if has_adapters:
            lora.check_base(folder_of_model, host_state["run"][1]["base_fingerprint"])

    transport = _transport(config, policy, placement, folder, base)
    # The synchronous driver itself decides how far searchers run ahead.
    outbox_bytes = config.search.outbox_bytes if config.driver == "async" else sys.maxsize
    outboxes = [Outbox(outbox_bytes) for _ in range(config.num_searchers)]
    buffer = ReplayBuffer(**config.replay, seed=config.seed)
    schedule_log = JsonlWriter(folder / "schedule.jsonl")
    metrics_log = JsonlWriter(folder / "metrics.jsonl")
    decoders = _decoders(config, model_config, tokenizer, placement)
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
            decoder=decoders[placement.searcher_meshes[i]],
            transport=transport,
            outbox=outboxes[i],
            rewards=on_device(rewards, placement.searcher_meshes[i].devices.flat[0]),
            reference=references.get(placement.searcher_meshes[i]),
            decode_text=tokenizer.batch_decode,
            response_kind=task.response_kind,
            first_kind=first_kind,
            key=root_key,
            prompts_per_round=config.search.prompts_per_round,
            samples_per_prompt=config.search.samples_per_prompt,
            settings=sampling_settings(config),
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

    @functools.cache
    def start_params() -> Any:
        if evaluation_mesh in references:
            return references[evaluation_mesh].params
        return start_weights(config, model_config, placement.trainer_mesh, evaluation_mesh)

    metrics = make_metrics(config, tokenizer, model_config, gold, start_params)
    evaluator = make_evaluator(config, task, tokenizer, decoders[evaluation_mesh], rewards, metrics)
    if evaluator.num_skipped:
        skipped = evaluator.num_skipped
        progress.note(f"{skipped} held-out prompts exceed task.max_prompt_tokens: skipped")

    def place_batch(batch: Batch | PackedBatch) -> Batch | PackedBatch:
        return jax.device_put(batch, shardings.batch)

    train_step = make_train_step(
        policy, optimizer, schedule, step_settings(config, tokenizer.eos_ids), shardings
    )
    frozen = (base,) if has_adapters else ()
    trainer = Trainer(
        state=state,
        train_step=lambda state, batch: train_step(state, batch, *frozen),
        buffer=buffer,
        outboxes=outboxes,
        transport=transport,
        num_prompts=config.batch.num_prompts,
        group_size=config.objective.group_size,
        prompt_buckets=prompt_buckets,
        response_buckets=response_buckets,
        pad_id=tokenizer.pad_id,
        policy_temperature=config.search.sampling_temperature,
        packed_length=config.batch.packed_length,
        row_buckets=packed_row_buckets(config),
        max_nonfinite_steps=config.optimizer.max_nonfinite_steps,
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
        gold=gold,
        evaluator=evaluator,
        decoder=decoders[placement.searcher_meshes[0]],
        placement=placement,
        model_config=model_config,
        checkpoints=checkpoints,
        metrics=MultiWriter([metrics_log, progress, *extra_writers]),
        progress=progress,
        schedule_log=schedule_log,
        metrics_log=metrics_log,
        clock=clock,
        base_fingerprint=hf_weights.fingerprint(folder_of_model) if has_adapters else "",
    )
    if host_state is not None:
        run.restore(host_state)
    _forget_after(run, trainer.step_index)
    return run


def _references(
    config: Config,
    policy: TransformerConfig,
    eos_ids: tuple[int, ...],
    placement: sharding.Placement,
    params: Any,
) -> dict[Mesh, Reference]:
    """A reference scorer for each set of searcher devices.

    Its parameters are its own; with adapters they are frozen and those of the trainer's devices are
    shared with the trainer.
    """
    plain = dataclasses.replace(policy, adapters=None)
    mesh = placement.publication_mesh
    if policy.adapters is None or mesh != placement.trainer_mesh:
        # A copy, because the train state will be made of `params` and then donated; or because
        # they span processes.
        copy = make_publish_program(
            jnp.dtype(config.model.param_dtype), None, param_shardings(plain, mesh)
        )
        params = copy(params)
    programs: dict[Any, Callable[..., Array]] = {}
    references = {}
    for mesh in dict.fromkeys(placement.searcher_meshes):
        key = mesh if mesh.size > 1 else None  # one program serves any one device
        if key not in programs:
            programs[key] = make_reference_program_from(config, plain, eos_ids, mesh)
        own = sharding.hand_over(params, reference_shardings(plain, mesh))
        references[mesh] = Reference(programs[key], own)
    return references


def _transport(
    config: Config,
    policy: TransformerConfig,
    placement: sharding.Placement,
    workdir: Path,
    base: Any,
) -> Transport:
    """The weight transport; where adapters are trained they alone travel, and `base` stays."""
    plain = dataclasses.replace(policy, adapters=None)
    dtype = jnp.dtype(config.model.rollout_dtype)
    meshes = placement.searcher_meshes
    layout, published = make_publication(config, plain, placement.publication_mesh)
    wanted = [searcher_shardings(plain, mesh) for mesh in meshes]
    merges = {}
    if policy.adapters is not None:
        # Each set of devices has the base once, in the decoder's layout.
        weights = make_publish_program(dtype, layout, published)(base)
        for mesh, where in zip(meshes, wanted, strict=True):
            if mesh not in merges:
                own = sharding.hand_over(weights, where)
                merges[mesh] = functools.partial(lora.merge, own, config=policy)
        layout = None
        published = lora.split(param_shardings(policy, placement.publication_mesh))[1]
        wanted = [adapter_shardings(policy, mesh) for mesh in meshes]
    transport: Transport
    if config.sync.transport == "memory":
        transport = MemoryTransport(dtype, wanted, layout, published)
    else:
        transport = CheckpointTransport(
            str(workdir),
            keep=config.sync.keep,
            dtype=dtype,
            shardings=wanted,
            layout=layout,
            published=published,
        )
    return MergingTransport(transport, [merges[mesh] for mesh in meshes]) if merges else transport


def _decoders(
    config: Config,
    model_config: TransformerConfig,
    tokenizer: Tokenizer,
    placement: sharding.Placement,
) -> dict[Mesh, Decoder]:
    """The decoder of each set of searcher devices; one serves all that have one device each."""
    decoders: dict[Any, Decoder] = {}
    for mesh in placement.searcher_meshes:
        key = mesh if mesh.size > 1 else None
        if key not in decoders:
            decoders[key] = make_decoder(config, model_config, tokenizer, mesh)
    return {m: decoders[m if m.size > 1 else None] for m in placement.searcher_meshes}


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
