# SPDX-License-Identifier: Apache-2.0
"""GRPO of TRL under the workloads of `tba_jax.bench.rl_step` and `tba_jax.bench.time_to_accuracy`.

    python trl_peer.py JOB.json

This file imports nothing of tba_jax but the class of a job's environment, so that it may run in its
own environment. TRL's settings are chosen for speed without changing its mathematics: float32
without autocast (slower on a CPU), no gradient checkpointing, the fused optimiser, no saving and no
reporting. Losses, clipping and advantages are its defaults.

Invariant: a timed step is a whole step, and its parts are TRL's own calls. A run that trains to an
accuracy writes a log line after its first step and after each evaluation, without buffering.
"""

import importlib
import json
import re
import resource
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# names under which its packages are imported
PACKAGES = ("torch", "transformers", "trl", "datasets")
_TEMPLATE = (
    "{% for m in messages %}{{ bos_token if m.role == 'user' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
)


def main(argv: list[str]) -> int:
    """Run the job of a benchmark; a job with held-out problems trains to an accuracy."""
    job = json.loads(Path(argv[0]).read_text())
    importlib.import_module("transformers").set_seed(job["seed"])
    (train_to_accuracy if "held_out" in job else time_steps)(job)
    return 0


def _trainer(
    job: dict[str, Any], model: Any, tokenizer: Any, rows: Any, own: dict[str, Any], **settings: Any
) -> Any:
    """Return a trainer with some arguments and settings of its own."""
    trl, datasets = map(importlib.import_module, ("trl", "datasets"))
    return trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
        args=trl.GRPOConfig(
            seed=job["seed"],
            temperature=1.0,
            learning_rate=job["learning_rate"],
            optim="adamw_torch_fused",
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        ),
        **own,
    )


def _watch(trainer: Any, begin: Callable[[], None], end: Callable[[int], None]) -> None:
    """Call `begin` before each step of a trainer, and `end` with the number of steps after it."""

    callback = importlib.import_module("transformers").TrainerCallback()
    callback.on_step_begin = lambda *given, **more: begin()
    callback.on_step_end = lambda args, state, *given, **more: end(state.global_step)
    trainer.add_callback(callback)


# --- timed steps -------------------------------------------------------------


def time_steps(job: dict[str, Any]) -> None:
    """Time a few whole steps with a reference model; write the result of the job."""
    transformers = importlib.import_module("transformers")
    folder, rows = Path(job["folder"]), job["prompts"] * job["group"]
    prompts = [json.loads(line) for line in (folder / "data" / "train.jsonl").open()]
    trainer = _trainer(
        job,
        str(folder / "model"),
        # The class that transformers chooses by the type of the model cannot read this tokenizer.
        transformers.PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        prompts,
        {"reward_funcs": runpy.run_path(str(folder / "reward.py"))["share_of_even"]},
        output_dir=str(folder / "trl"),
        max_steps=job["warm_steps"] + job["steps"],
        per_device_train_batch_size=job["peer_micro_batch_rows"],
        gradient_accumulation_steps=rows // job["peer_micro_batch_rows"],
        num_generations=job["group"],
        max_completion_length=job["response_tokens"],
        beta=job["beta"],
        model_init_kwargs={"dtype": "float32"},
    )
    generate, now = trainer._generate_single_turn, time.perf_counter
    steps: list[dict[str, float]] = []
    lengths: list[int] = []

    def generate_timed(*args: Any, **kwargs: Any) -> Any:
        start = now()
        out = generate(*args, **kwargs)
        steps[-1]["search_s"] += now() - start
        lengths.extend(len(ids) for ids in out[0])
        return out

    def end(step: int) -> None:
        steps[-1]["step_s"] += now()
        steps[-1]["train_s"] = steps[-1]["step_s"] - steps[-1]["search_s"]

    trainer._generate_single_turn = generate_timed
    _watch(trainer, lambda: steps.append({"step_s": -now(), "search_s": 0.0}), end)
    trainer.train()
    timed = steps[job["warm_steps"] :]
    result = {
        **{part: statistics.median(step[part] for step in timed) for part in timed[0]},
        "mean_response_tokens": sum(lengths) / len(lengths),
        "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    Path(job["result"]).write_text(json.dumps(result))


# --- training to an accuracy -------------------------------------------------


def train_to_accuracy(job: dict[str, Any]) -> None:
    """Train with the whole batch in one forward pass and no reference model; write the log."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(job["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    own, problems, limits = {"reward_funcs": reward}, job["problems"], {}
    if "environment" in job:
        limits["max_tool_calling_iterations"] = job["max_turns"] - 1
        own = _with_environment(model, tokenizer, job)
        problems = [{**x, "prompt": [{"role": "user", "content": x["prompt"]}]} for x in problems]
    trainer = _trainer(
        job,
        model,
        tokenizer,
        problems,
        own,
        output_dir=str(Path(job["log"]).parent / "trl"),
        max_steps=job["num_steps"],
        per_device_train_batch_size=job["num_prompts"] * job["group_size"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        lr_scheduler_type="linear",
        warmup_steps=job["warmup_steps"],
        **limits,
    )

    with open(job["log"], "a", buffering=1) as log:

        def end(step: int) -> None:
            if step == 1:
                print(json.dumps({"step": 1}), file=log)
            if step % job["eval_period"] == 0 or step == job["num_steps"]:
                accuracy = evaluate(trainer.model, tokenizer, job)
                print(json.dumps({"step": step, "accuracy": accuracy}), file=log)

        _watch(trainer, lambda: None, end)
        trainer.train()


def _with_environment(model: Any, tokenizer: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Prepare a model whose turns end with ":"; return the trainer's environment and reward.

    TRL samples a turn, parses a call of the tool from it, and appends the tool's result.
    """
    environment = _environment_class(job)

    class Tools:
        def reset(self, prompt: Any, **row: Any) -> None:
            self._inner = environment()
            self._inner.init(prompt[-1]["content"])

        def step(self) -> str:
            """Return the running totals."""
            return self._inner.step(job["stop"])[0]

    def graded(completions: Any, environments: Any, **columns: Any) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        return [x._inner.step(text)[1] for x, text in zip(environments, texts, strict=True)]

    def parse_response(ids: Any, **context: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "step", "arguments": {}}}
        calls = {"tool_calls": [call]} if text.endswith(job["stop"]) else {}
        return {"role": "assistant", "content": text, **calls}

    tokenizer.chat_template = _TEMPLATE
    tokenizer.response_template, tokenizer.parse_response = "own", parse_response
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(job["stop"])]
    model.generation_config.eos_token_id = ends
    return {"reward_funcs": graded, "environment_factory": Tools}


def _environment_class(job: dict[str, Any]) -> Any:
    sys.path.append(job["package"])
    module, _, name = job["environment"].partition(":")
    return getattr(importlib.import_module(module), name)


def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Return 1.0 for each completion whose last integer is the answer, otherwise 0.0."""
    last = [(re.findall(r"-?[0-9]+", text) or [""])[-1] for text in completions]
    return [
        float(found != "" and int(found) == int(a)) for found, a in zip(last, answer, strict=True)
    ]


def evaluate(model: Any, tokenizer: Any, job: dict[str, Any]) -> float:
    """Return the share of held-out problems that greedy responses solve."""
    prompts = [problem["prompt"] for problem in job["held_out"]]
    model.eval()
    if "environment" in job:
        rewards = _episodes(model, tokenizer, prompts, job)
    else:
        texts = _greedy(model, tokenizer, prompts, job)
        rewards = reward(texts, [problem["answer"] for problem in job["held_out"]])
    model.train()
    return sum(rewards) / len(rewards)


def _episodes(model: Any, tokenizer: Any, prompts: list[str], job: dict[str, Any]) -> list[float]:
    """Return the reward of a greedy episode for each prompt; a token is a character."""
    environment = _environment_class(job)
    games = [environment() for _ in prompts]
    for game, prompt in zip(games, prompts, strict=True):
        game.init(prompt)
    texts, rewards = list(prompts), [0.0] * len(prompts)
    live = list(range(len(prompts)))
    for _ in range(job["max_turns"]):
        turns = _greedy(model, tokenizer, [texts[i] for i in live], job) if live else []
        going = []
        for i, turn in zip(live, turns, strict=True):
            room = job["max_new_tokens"] - (len(texts[i]) - len(prompts[i]))
            observation, rewards[i], is_done = games[i].step(turn[:room])
            texts[i] += turn[:room] + observation
            if not is_done and len(texts[i]) - len(prompts[i]) < job["max_new_tokens"]:
                going.append(i)
        live = going
    return rewards


def _greedy(model: Any, tokenizer: Any, prompts: list[str], job: dict[str, Any]) -> list[str]:
    """Return the text of a greedy response to each prompt."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    batch = tokenizer(
        prompts,
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
                eos_token_id=model.generation_config.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            ),
        )
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
