# SPDX-License-Identifier: Apache-2.0
"""GRPO of TRL under the workload of `tba_jax.bench.rl_step`: a few whole steps.

    python rl_step_trl.py JOB.json

This file imports nothing of tba_jax, so that it may run in its own environment. TRL uses float32
without autocast (slower on a CPU), no gradient checkpointing, the fused optimiser, a reference
model (a KL coefficient above 0), no saving and no reporting; other settings are its defaults.

Invariant: a timed step is a whole step, and its parts are TRL's own calls.
"""

import importlib
import importlib.metadata
import json
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import Any

# names under which its packages are imported
PACKAGES = ("torch", "transformers", "trl", "datasets")


def main(argv: list[str]) -> int:
    """Run one job and write its result to the file that the job names."""
    job = json.loads(Path(argv[0]).read_text())
    torch, transformers, trl, datasets = map(importlib.import_module, PACKAGES)
    transformers.set_seed(job["seed"])
    folder = Path(job["folder"])
    prompts = [json.loads(line) for line in (folder / "data" / "train.jsonl").open()]
    trainer = _timed(trl.GRPOTrainer)(
        model=str(folder / "model"),
        reward_funcs=runpy.run_path(str(folder / "reward.py"))["share_of_even"],
        args=_settings(trl, job),
        # By the file: the class that goes with the model's type would read it as its own.
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        train_dataset=datasets.Dataset.from_list(prompts),
    )
    if trainer.model.dtype != torch.float32:
        raise ValueError(f"TRL loaded the model as {trainer.model.dtype}, wanted float32")
    trainer.add_callback(_watch(transformers.TrainerCallback, trainer))
    trainer.train()
    asked = {len(trainer.processing_class(x["prompt"])["input_ids"]) for x in prompts}
    if asked != {job["prompt_tokens"]}:
        raise ValueError(f"TRL read prompts of {asked} tokens, wanted {job['prompt_tokens']}")
    result = {
        "steps": trainer.steps[job["warm_steps"] :],
        "mean_response_tokens": sum(trainer.lengths) / len(trainer.lengths),
        "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "num_threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    Path(job["result"]).write_text(json.dumps(result))
    return 0


def _settings(trl: Any, job: dict[str, Any]) -> Any:
    micro_batches = job["prompts"] * job["group"] // job["peer_micro_batch_rows"]
    return trl.GRPOConfig(
        output_dir=str(Path(job["folder"]) / "trl"),
        seed=job["seed"],
        max_steps=job["warm_steps"] + job["steps"],
        per_device_train_batch_size=job["peer_micro_batch_rows"],
        gradient_accumulation_steps=micro_batches,
        num_generations=job["group"],
        max_completion_length=job["response_tokens"],
        temperature=1.0,
        beta=job["beta"],
        learning_rate=job["learning_rate"],
        model_init_kwargs={"dtype": "float32"},
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _timed(base: type) -> type:
    """Return a trainer that measures sampling and the rest of the work before training."""

    class Timed(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.steps: list[dict[str, float]] = []
            self.lengths: list[int] = []
            self.decode_s = self.search_s = 0.0

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = super()._generate_single_turn(*args, **kwargs)
            self.decode_s += time.perf_counter() - start
            self.lengths += [len(ids) for ids in out[0]]
            return out

        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            out = super()._generate_and_score_completions(*args, **kwargs)
            self.search_s += time.perf_counter() - start
            return out

    return Timed


def _watch(base: type, trainer: Any) -> Any:
    """Return a callback that times a step, from its first micro-batch to its update."""

    class Watch(base):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()
            trainer.decode_s = trainer.search_s = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step_s = time.perf_counter() - self.start
            trainer.steps.append(
                {
                    "step_s": step_s,
                    "decode_s": trainer.decode_s,
                    "reference_s": trainer.search_s - trainer.decode_s,
                    "train_s": step_s - trainer.search_s,
                    "rest_s": 0.0,
                }
            )

    return Watch()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
