# SPDX-License-Identifier: Apache-2.0
"""GRPO of TRL under the workload of `tba_jax.bench.time_to_accuracy`: one whole process.

    python time_to_accuracy_trl.py JOB.json

This file imports nothing of tba_jax, so that it may run in its own environment. TRL's settings are
chosen for speed without changing its mathematics: float32 without autocast (slower on a CPU), no
gradient checkpointing, the whole batch in one forward pass, no reference model (its default), the
fused optimiser, no saving and no reporting. Losses, clipping and advantages are its defaults.

Invariant: the job's log file gets a line at the end of the first step and a line for each
evaluation, immediately.
"""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

# names under which its packages are imported
PACKAGES = ("torch", "transformers", "trl", "datasets")

_INTEGER = re.compile(r"-?[0-9]+")


def main(argv: list[str]) -> int:
    job = json.loads(Path(argv[0]).read_text())
    torch, transformers, trl, datasets = map(importlib.import_module, PACKAGES)
    transformers.set_seed(job["seed"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    rows = job["num_prompts"] * job["group_size"]
    settings = trl.GRPOConfig(
        output_dir=str(Path(job["log"]).parent / "trl"),
        seed=job["seed"],
        max_steps=job["num_steps"],
        per_device_train_batch_size=rows,
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        temperature=1.0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="linear",
        warmup_steps=job["warmup_steps"],
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=settings,
        train_dataset=datasets.Dataset.from_list(job["problems"]),
    )
    trainer.add_callback(_watch(transformers.TrainerCallback, trainer, tokenizer, job))
    trainer.train()
    return 0


def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return 1.0 for each completion whose last integer is the answer, otherwise 0.0."""
    last = [(_INTEGER.findall(text) or [""])[-1] for text in completions]
    return [
        float(found != "" and int(found) == int(a)) for found, a in zip(last, answer, strict=True)
    ]


def _watch(base: type, trainer: Any, tokenizer: Any, job: dict[str, Any]) -> Any:
    """Return a callback that writes the log lines between two steps."""
    log = open(job["log"], "a")

    def write(line: dict[str, Any]) -> None:
        log.write(json.dumps(line) + "\n")
        log.flush()

    class Watch(base):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step
            if step == 1:
                write({"step": 1})
            if step % job["eval_period"] == 0 or step == job["num_steps"]:
                accuracy = evaluate(trainer.model, tokenizer, job)
                write({"step": step, "accuracy": accuracy})

    return Watch()


def evaluate(model: Any, tokenizer: Any, job: dict[str, Any]) -> float:
    """Return the share of held-out problems that greedy responses solve."""
    torch, transformers, *_ = map(importlib.import_module, PACKAGES)
    held_out = job["held_out"]
    was_training = model.training
    model.eval()
    batch = tokenizer(
        [problem["prompt"] for problem in held_out],
        return_tensors="pt",
        padding=True,
        padding_side="left",
        return_token_type_ids=False,
    )
    with torch.no_grad():
        out = model.generate(
            **batch,
            generation_config=transformers.GenerationConfig(
                do_sample=False,
                max_new_tokens=job["max_new_tokens"],
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            ),
        )
    model.train(was_training)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = reward(texts, [problem["answer"] for problem in held_out])
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
