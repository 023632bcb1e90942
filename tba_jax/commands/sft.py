# SPDX-License-Identifier: Apache-2.0
"""Command: supervised fine-tuning of a language model on given responses, the stage before RL.

    python -m tba_jax.sft --model=DIR_OR_HUB_ID --data=FILE.jsonl --out=DIR [--num_steps=100] ...

Rows have the texts "prompt" and "completion" (or "response"). The loss is the mean negative
log-prob of the tokens of the responses, including end-of-sequence. Without a prompt, the response
follows the beginning-of-sequence token. The optimiser is AdamW, and the rows are shuffled in every
pass. Data may be a .jsonl or .parquet file, a folder with train and test files, or hf://NAME. A
test split, or the rows of --eval_share, give the evaluation loss.
Invariant: the same seed and file give the same model.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tba_jax.config.command_line import local_folder
from tba_jax.devices.placement import MeshShape
from tba_jax.devices.sharding import trainer_mesh
from tba_jax.flow.layout import Batch, RowLayout
from tba_jax.flow.padding import Padding, length_buckets
from tba_jax.flow.trajectory import Draw, Prompt, Trajectory
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.hf import hf_weights
from tba_jax.models.scoring import Scoring
from tba_jax.settings import Schedule
from tba_jax.tasks.examples import Example, read_examples
from tba_jax.tasks.rows import has_split
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.groups import Groups, Terms
from tba_jax.train.losses import summed
from tba_jax.train.objectives import Needs, Objective, objective
from tba_jax.train.optimizers import learning_rate_schedule, make_optimizer
from tba_jax.train.state import StepShardings, make_init_state, step_shardings
from tba_jax.train.step import StepSettings, make_log_likelihood, make_train_step

_PRINT_STEPS = 20  # steps between two printed losses
_LENGTHS = 3  # compiled lengths of prompts and of responses


@objective(Needs(sampler="any", beta="unused", total="tokens"))
def likelihood(groups: Groups, beta: Float[Array, ""] | float) -> Terms:
    """-(sum of log pi of all answer tokens) / (number of answer tokens)."""
    del beta
    return Terms(-summed(groups, groups.logp))


class Tuned(NamedTuple):
    """Result of a fine-tuning.

    Attributes:
        params: plain parameters; adapters are merged.
        losses: nats per token of each step's batch, before the step's update.
        eval_losses: (step, nats per token of the held-out examples).
    """

    params: Any
    losses: list[float]
    eval_losses: list[tuple[int, float]]


def batches(examples: Sequence[Example], layout: RowLayout, seed: int) -> Iterator[Any]:
    """Yield batches without end. Each pass has every example once, in an order from the seed."""
    rng = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < layout.num_prompts:
            waiting += rng.permutation(len(examples)).tolist()
        yield layout.batch([_draw(examples[i]) for i in waiting[: layout.num_prompts]], 0)
        del waiting[: layout.num_prompts]


def _in_order(examples: Sequence[Example], layout: RowLayout) -> Iterator[Any]:
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
    return Draw(
        prompt=Prompt(0, "", example.prompt, {}),
        trajectories=(response,),
        is_fresh=True,
        ids=(0,),
    )


def fine_tune(
    source: models.Description,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    args: argparse.Namespace,
) -> Tuned:
    """Fine-tune a model with the options of the command.

    Raises:
        ValueError: the mesh does not divide the model or does not fit the devices, a matrix of
            --lora_modules is missing, or an example is longer than a packed row.
    """
    shape = _mesh_shape(args.mesh)
    if shape.size > len(jax.devices()):
        raise ValueError(
            f"--mesh={args.mesh} has {shape.size} devices, and this machine has "
            f"{len(jax.devices())}. Lower its sizes"
        )
    mesh = trainer_mesh(np.array(jax.devices()[: shape.size]), shape)
    config = source.config
    if args.lora_rank:
        modules = args.lora_modules.split(",")
        config = lora.with_adapters(config, args.lora_rank, args.lora_alpha, modules)
    optimizer_settings = OptimizerSettings(
        learning_rate=Schedule(args.learning_rate, shape="cosine", warmup=args.warmup_steps),
        weight_decay=args.weight_decay,
    )
    rate = learning_rate_schedule(optimizer_settings.learning_rate, args.num_steps)
    optimizer = make_optimizer(optimizer_settings)
    rows = math.ceil(args.micro_batch_rows / shape.num_parts) * shape.num_parts
    settings = StepSettings(
        objective=Objective("likelihood", likelihood),
        beta=Schedule(1.0),
        scoring=Scoring(compute_dtype=args.dtype),
        micro_batch_rows=rows if rows < args.batch_size else 0,
        row_multiple=shape.num_parts,
        is_whole=True,
        remat="layers",
    )
    shardings = step_shardings(
        config, optimizer, mesh, keep_reference=False, num_prompts=args.batch_size
    )
    layout = _layout([*examples, *held_out], source.load_tokenizer().pad_id, args, settings)
    # Adapters are float32; the base weights are read and never updated.
    loaded = source.load_params(
        param_dtype=jnp.dtype(args.dtype if args.lora_rank else "float32"),
        shardings=shardings.base if args.lora_rank else shardings.state.params,
    )
    base, params = (), loaded
    if args.lora_rank:
        base = (loaded,)
        params = lora.init_adapters(config, args.seed, shardings.state.params)
    state = make_init_state(optimizer, shardings)(params)
    del params, loaded
    step = make_train_step(config, optimizer, rate, settings, shardings)
    score = make_log_likelihood(config, settings, shardings)
    stream, losses, eval_losses = batches(examples, layout, args.seed), [], []
    for i in range(args.num_steps + 1):
        is_last = i == args.num_steps
        if held_out and (is_last or i % args.eval_period == 0):
            found = [
                score(state.params, _placed(x, shardings), *base)
                for x in _in_order(held_out, layout)
            ]
            total, num = np.sum(np.array(found, np.float64), axis=0)
            eval_losses.append((i, float(-total / num)))
            print(f"step {i}: {eval_losses[-1][1]:.4f} nats per held-out token", flush=True)
        if is_last:
            break
        state, outputs = step(state, _placed(next(stream), shardings), *base)
        losses.append(float(outputs["numbers"]["loss"]))
        if i % _PRINT_STEPS == 0 or i == args.num_steps - 1:
            print(f"step {i + 1} of {args.num_steps}: {losses[-1]:.4f} nats per token", flush=True)
    params = lora.merge(base[0], state.params, config=config) if base else state.params
    return Tuned(params, losses, eval_losses)


def _layout(
    examples: Sequence[Example], pad_id: int, args: argparse.Namespace, settings: StepSettings
) -> RowLayout:
    prompt = length_buckets(max(len(x.prompt) for x in examples), _LENGTHS)
    response = length_buckets(max(len(x.response) for x in examples), _LENGTHS)
    return RowLayout(
        num_prompts=args.batch_size,
        group_size=1,
        padding=Padding(prompt, response, pad_id),
        policy_temperature=1.0,
        row_length=args.packed_length,
        row_multiple=settings.row_multiple,
        micro_batch_rows=settings.micro_batch_rows,
        is_whole=True,
        reference="none",
    )


def _placed(batch: Batch, shardings: StepShardings) -> Any:
    return jax.device_put(batch, shardings.of_batch(batch))


def _mesh_shape(text: str) -> MeshShape:
    """Return the mesh sizes in a text such as "data=2,fsdp=4"."""
    try:
        pairs = (pair.split("=") for pair in text.split(",") if pair)
        shape = MeshShape(**{name.strip(): int(size) for name, size in pairs})
        if min(shape) < 1:
            raise ValueError("sizes are at least 1")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"--mesh={text} ({error}); wanted sizes of {', '.join(MeshShape._fields)}, for example "
            "--mesh=data=2,fsdp=4"
        ) from None
    return shape


def _examples(args: argparse.Namespace, tokenizer: Any) -> tuple[list[Example], list[Example]]:
    """Return (training examples, held-out examples)."""
    examples = read_examples(args.data, "train", tokenizer)
    if args.eval_share:
        order = np.random.default_rng(args.seed).permutation(len(examples)).tolist()
        num = round(args.eval_share * len(examples))
        if not 0 < num < len(examples):
            raise ValueError(
                f"--eval_share={args.eval_share} of {len(examples)} rows are {num} rows; wanted "
                "at least one row to evaluate and one to train on"
            )
        return [examples[i] for i in order[num:]], [examples[i] for i in order[:num]]
    has_test = has_split(args.data, "test")
    return examples, read_examples(args.data, "test", tokenizer) if has_test else []


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formatter of --help that shows defaults and keeps the line breaks of the description."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tba_jax.sft",
        description=__doc__,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, default=argparse.SUPPRESS, help="Hugging Face folder or hub id")
    add("--data", required=True, default=argparse.SUPPRESS, help="file, folder or hf://NAME")
    add("--out", required=True, default=argparse.SUPPRESS, help="folder to write, new or empty")
    add("--num_steps", type=int, default=100, help="optimiser steps")
    add("--batch_size", type=int, default=64, help="rows of the data per step")
    add("--micro_batch_rows", type=int, default=0, help="rows at a time on all devices; 0: all")
    add(
        "--learning_rate",
        type=float,
        default=3e-5,
        help="peak of the learning rate, which falls to 0 as a cosine",
    )
    add("--warmup_steps", type=int, default=0, help="steps of linear warm-up from 0")
    add("--weight_decay", type=float, default=0.0, help="weight decay of matrices")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of computation")
    add("--mesh", default="data=1", help="sizes of the axes data, fsdp, expert and model")
    add(
        "--packed_length",
        type=int,
        default=0,
        help="tokens of a row with several examples; 0: one example per row",
    )
    add("--lora_rank", type=int, default=0, help="rank of adapters; 0: train all parameters")
    add("--lora_alpha", type=float, default=16.0, help="scale of adapters times their rank")
    add("--lora_modules", default="q,k,v,o", help="matrices with adapters")
    add(
        "--eval_share",
        type=float,
        default=0.0,
        help="share of the rows to hold out; 0: use the test split",
    )
    add("--eval_period", type=int, default=50, help="steps between evaluations")
    add("--seed", type=int, default=0, help="seed of the order of rows")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args = _parser().parse_args(argv)
    positive = ("num_steps", "batch_size", "learning_rate", "eval_period")
    wrong = [name for name in positive if getattr(args, name) <= 0]
    if wrong:
        raise ValueError(f"--{wrong[0]}={getattr(args, wrong[0])}; wanted a positive number")
    out = local_folder(args.out, "--out")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out={out}: the folder is not empty. Give a new one")
    source = models.describe(args.model)
    examples, held_out = _examples(args, source.load_tokenizer())
    longest = max(len(x.prompt) + len(x.response) for x in [*examples, *held_out])
    most = args.packed_length or source.config.max_positions
    if longest > most:
        what = "--packed_length has" if args.packed_length else f"{args.model} was made for"
        raise ValueError(
            f"{args.data}: prompt and response take up to {longest} tokens, and {what} {most}. "
            "Shorten them"
        )
    tuned = fine_tune(source, examples, held_out, args)
    hf_weights.save(
        Path(out),
        source.config,
        tuned.params,
        source.hf_config,
        tokenizer_files_from=source.folder,
    )
    print(f"{out}: written")
    return 0
