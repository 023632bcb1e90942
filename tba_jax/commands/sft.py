# SPDX-License-Identifier: Apache-2.0
r"""Command: supervised fine-tuning of a language model on given responses, the stage before RL.

    python -m tba_jax.sft --model=DIR_OR_HUB_ID --data=FILE.jsonl --out=DIR \
        --config.num_steps=100 --config.batch.num_prompts=64 \
        --config.optimizer.learning_rate="cosine(3e-5, 0, warmup=10)" [--config.FIELD=VALUE]

The settings are those of training (docs/config.md): num_steps, seed, eval.period,
model.compute_dtype, task.chat, and the sections batch, optimizer, lora and mesh.

Rows have the texts "prompt" and "completion" (or "response"), or a chat in them or in "messages".
The last answer of a chat, with its thinking, is trained on. The model's chat template formats
chats, and texts if task.chat=True. The loss is the mean negative log-prob of the tokens of the
responses with end-of-sequence. Without a prompt, the response follows the beginning-of-sequence
token. The rows are shuffled in every pass. Data may be a .jsonl, .json or .parquet file, a folder
with train and test files, or hf://NAME. A test split or --eval_share gives the evaluation loss.
Invariant: the same seed and file give the same model.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tba_jax.commands.entry_point import make_parser
from tba_jax.config.command_line import local_folder, override
from tba_jax.config.schema import Config, difference, flatten, replace
from tba_jax.devices.placement import MeshShape, trainer_mesh
from tba_jax.flow.layout import Batch, RowLayout
from tba_jax.flow.padding import Padding, length_buckets
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.hf import hf_weights
from tba_jax.models.logprobs import Scoring
from tba_jax.settings import ConfigError, Schedule
from tba_jax.tasks.examples import Example, read_examples
from tba_jax.tasks.rows import has_split
from tba_jax.train.config import BatchSettings
from tba_jax.train.groups import Groups, Terms
from tba_jax.train.losses import summed
from tba_jax.train.objectives import Needs, Objective, objective
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import make_init_state, step_shardings
from tba_jax.train.step import StepSettings, make_reference_pass, make_train_step

_RATE = Schedule(3e-5, shape="cosine")
DEFAULTS = replace(Config(), {"batch.num_prompts": 64, "optimizer.learning_rate": _RATE})
_SETTINGS = ("num_steps", "seed", "eval.period", "model.compute_dtype", "task.chat")
_SETTINGS += ("batch.", "optimizer.", "lora.", "mesh.")
_PRINT_STEPS = 20  # steps between two printed losses
_LENGTHS = 3  # compiled lengths of prompts and of responses


@objective(Needs(sampler="any", beta="unused", total="tokens"))
def likelihood(groups: Groups, beta: Float[Array, ""] | float) -> Terms:
    """-(sum of log pi of all answer tokens) / (number of answer tokens)."""
    del beta
    return Terms(-summed(groups, groups.logp))


def batches(examples: Sequence[Example], layout: RowLayout, seed: int) -> Iterator[Batch]:
    """Yield batches without end. Each pass has every example once, in an order from the seed."""
    rng = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < layout.num_prompts:
            waiting += rng.permutation(len(examples)).tolist()
        yield layout.batch([_draw(examples[i]) for i in waiting[: layout.num_prompts]], 0)
        del waiting[: layout.num_prompts]


def _in_order(examples: Sequence[Example], layout: RowLayout) -> Iterator[Batch]:
    """Yield every example once, in batches; the last batch may have empty rows."""
    size = layout.num_prompts
    for start in range(0, len(examples), size):
        draws = [_draw(x) for x in examples[start : start + size]]
        empty = draws[0]._replace(trajectories=(), ids=())
        yield layout.batch([*draws, *[empty] * (size - len(draws))], 0)


def _draw(example: Example) -> Draw:
    response = Trajectory(
        prompt_id=0,
        response_tokens=example.response,
        reward=0.0,
        reward_parts={},
        behavior_token_logprobs=np.zeros(len(example.response), np.float32),
        version_min=-1,
        version_max=-1,
        searcher=0,
        ticket=0,
        sampling_temperature=1.0,
        finish_reason="eos",
    )
    return Draw(Prompt(0, "", example.prompt, {}), (response,), is_fresh=True, ids=(0,))


def fine_tune(
    source: models.Description,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    settings: Config,
) -> tuple[Any, list[float], list[tuple[int, float]]]:
    """Fine-tune a model with the settings of the command.

    Returns:
        Plain parameters, with adapters merged; nats per token of each step's batch, before the
        step's update; (step, nats per token of the held-out examples).

    Raises:
        ValueError: the mesh does not divide the model or does not fit the devices, a matrix of
            lora.modules is missing, or an example is longer than a packed row.
    """
    shape = MeshShape(**dataclasses.asdict(settings.mesh))
    if shape.size > len(jax.devices()):
        raise ValueError(
            f"config.mesh has {shape.size} devices, and this machine has {len(jax.devices())}. "
            "Lower its sizes"
        )
    batch, adapters, dtype = settings.batch, settings.lora, settings.model.compute_dtype
    mesh = trainer_mesh(np.array(jax.devices()[: shape.size]), shape)
    config = source.config
    if adapters.rank:
        config = lora.with_adapters(config, adapters.rank, adapters.alpha, adapters.modules)
    rate = settings.optimizer.learning_rate.over(settings.num_steps)
    optimizer = make_optimizer(settings.optimizer)
    rows = math.ceil(batch.micro_batch_rows / shape.num_parts) * shape.num_parts
    step_settings = StepSettings(
        objective=Objective("likelihood", likelihood),
        beta=Schedule(1.0),
        scoring=Scoring(compute_dtype=dtype),
        micro_batch_rows=rows if rows < batch.num_prompts else 0,
        row_multiple=shape.num_parts,
        is_whole=True,
        remat="layers",
    )
    shardings = step_shardings(
        config, optimizer, mesh, keep_reference=False, num_prompts=batch.num_prompts
    )
    pad_id = source.load_tokenizer().pad_id
    layout = _layout([*examples, *held_out], pad_id, batch, step_settings)

    def placed(batch: Batch) -> Any:
        return jax.device_put(batch, shardings.of_batch(batch))

    # Adapters are float32; the base weights are read and never updated.
    loaded = source.load_params(
        param_dtype=jnp.dtype(dtype if adapters.rank else "float32"),
        shardings=shardings.base if adapters.rank else shardings.state.params,
    )
    base, params = (), loaded
    if adapters.rank:
        base = (loaded,)
        params = lora.init_adapters(config, settings.seed, shardings.state.params)
    state = make_init_state(optimizer, shardings)(params)
    del params, loaded
    step = make_train_step(config, optimizer, rate, step_settings, shardings)
    score = make_reference_pass(config, step_settings, shardings)
    scored = dataclasses.replace(layout, reference="scored")
    stream, losses, eval_losses = batches(examples, layout, settings.seed), [], []
    for i in range(settings.num_steps + 1):
        is_last = i == settings.num_steps
        if held_out and (is_last or settings.eval.period and i % settings.eval.period == 0):
            found = [score(state.params, placed(x), *base) for x in _in_order(held_out, scored)]
            total = sum(np.asarray(logprobs, np.float64).sum() for logprobs in found)
            eval_losses.append((i, float(-total / sum(len(x.response) for x in held_out))))
            print(f"step {i}: {eval_losses[-1][1]:.4f} nats per held-out token", flush=True)
        if is_last:
            break
        state, outputs = step(state, placed(next(stream)), *base)
        losses.append(float(outputs["numbers"]["loss"]))
        if i % _PRINT_STEPS == 0 or i == settings.num_steps - 1:
            print(
                f"step {i + 1} of {settings.num_steps}: {losses[-1]:.4f} nats per token", flush=True
            )
    params = lora.merge(base[0], state.params, config=config) if base else state.params
    return params, losses, eval_losses


def _layout(
    examples: Sequence[Example], pad_id: int, batch: BatchSettings, settings: StepSettings
) -> RowLayout:
    prompt = length_buckets(max(len(x.prompt) for x in examples), _LENGTHS)
    response = length_buckets(max(len(x.response) for x in examples), _LENGTHS)
    return RowLayout(
        num_prompts=batch.num_prompts,
        group_size=1,
        padding=Padding(prompt, response, pad_id),
        policy_temperature=1.0,
        row_length=batch.packed_length,
        row_multiple=settings.row_multiple,
        micro_batch_rows=settings.micro_batch_rows,
        is_whole=True,
        reference="none",
    )


def _examples(
    data: str, eval_share: float, config: Config, tokenizer: Any
) -> tuple[list[Example], list[Example]]:
    """Return (training examples, held-out examples)."""
    read = functools.partial(read_examples, data, tokenizer=tokenizer, chat=config.task.chat)
    examples = read("train")
    if eval_share:
        order = np.random.default_rng(config.seed).permutation(len(examples)).tolist()
        num = round(eval_share * len(examples))
        if not 0 < num < len(examples):
            raise ValueError(
                f"--eval_share={eval_share} of {len(examples)} rows are {num} rows; wanted at "
                "least one row to evaluate and one to train on"
            )
        return [examples[i] for i in order[num:]], [examples[i] for i in order[:num]]
    return examples, read("test") if has_split(data, "test") else []


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Return the options and the settings of --config.FIELD=VALUE.

    Raises:
        ConfigError: a setting has no effect on fine-tuning, or a wrong value.
    """
    parser = make_parser("sft", __doc__)
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder or hub id")
    add("--data", required=True, help="file, folder or hf://NAME")
    add("--out", required=True, help="folder to write, new or empty")
    add("--eval_share", type=float, default=0.0, help="share to hold out; 0: test split")
    args, overrides = parser.parse_known_args(argv)
    config = override(DEFAULTS, overrides)
    for line in difference(flatten(DEFAULTS), flatten(config)):
        if not line.startswith(_SETTINGS):
            field, _, _ = line.partition(":")
            raise ConfigError(
                f"--config.{field}: has no effect on fine-tuning. Leave it out; the settings are "
                f"{', '.join(_SETTINGS)}"
            )
    return args, config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args, config = _arguments(argv)
    out = local_folder(args.out, "--out")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out={out}: the folder is not empty. Give a new one")
    source = models.describe(args.model)
    tokenizer = source.load_tokenizer()
    examples, held_out = _examples(args.data, args.eval_share, config, tokenizer)
    longest = max(len(x.prompt) + len(x.response) for x in [*examples, *held_out])
    packed = config.batch.packed_length
    if longest > (packed or source.config.max_positions):
        what = f"batch.packed_length={packed}" if packed else f"the context of {args.model}"
        raise ValueError(
            f"{args.data}: prompt and response take up to {longest} tokens, more than {what}"
            f"{'' if packed else f' ({source.config.max_positions})'}. Shorten them"
        )
    params, _, _ = fine_tune(source, examples, held_out, config)
    hf_weights.save(out, source.config, params, source.hf_config, source.folder)
    print(f"{out}: written")
    return 0
