# SPDX-License-Identifier: Apache-2.0
"""Other decoders under the workload of `tba_jax.bench.decode`, one process each.

    python decode_peers.py JOB.json

`hf` is `generate` of transformers, with a dynamic and a static cache; `tunix` is the sampler of
google-tunix. Both load the checkpoint with their own loader and receive all rows in one call. This
file does not import tba_jax, so that peers may run in their own environment.

Invariant: warm-up runs the measured programs for a few tokens, and no peer does unnecessary work
(tunix gets a tokenizer that does nothing).
"""

import functools
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# peer -> names under which its packages are imported
PACKAGES = {"hf": ("torch", "transformers"), "tunix": ("tunix", "jax")}

# A call takes (seed, maximum tokens per response) and returns (lengths of all responses, time of
# the first token by time.perf_counter).
Call = Callable[[int, int], tuple[list[int], float]]


def main(argv: list[str]) -> int:
    """Run one job and write its result to the file that the job names."""
    job = json.loads(Path(argv[0]).read_text())
    prompts = np.load(job["prompts"])
    start = time.perf_counter()
    result, calls = {"hf": _hf, "tunix": _tunix}[job["side"]](job, prompts)
    result["load_s"] = time.perf_counter() - start
    result["runs"] = {name: _measure(call, job) for name, call in calls.items()}
    Path(job["result"]).write_text(json.dumps(result))
    return 0


def _measure(call: Call, job: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    call(job["seed"] + 1, 2)
    warm_up_s = time.perf_counter() - start
    start, cpu_start = time.perf_counter(), time.process_time()
    lengths, first = call(job["seed"], job["max_new_tokens"])
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "warm_up_s": warm_up_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "first_token_s": first - start,
        "prefill_s": first - start,
        "decode_s": start + wall_s - first,
        "lengths": lengths,
    }


def _hf(job: dict[str, Any], prompts: np.ndarray) -> tuple[dict[str, Any], dict[str, Call]]:
    torch, transformers = map(importlib.import_module, PACKAGES["hf"])
    device = "cuda" if job["platform"] == "gpu" else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"])
    ).to(device)
    # `generate` replaces None by the checkpoint's value, so the value is set here.
    model.generation_config.eos_token_id = job["eos_ids"] or None
    model.generation_config.pad_token_id = job["pad_id"]
    whole = torch.tensor(prompts, dtype=torch.int64, device=device)

    class Watch(transformers.StoppingCriteria):
        """Recorder of the time of the first token, which stops generation at `length` tokens.

        A smaller max_new_tokens would need another static cache.
        """

        def __init__(self, length: int):
            self.length, self.first = length, 0.0

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            if not self.first:
                if device == "cuda":
                    torch.cuda.synchronize()
                self.first = time.perf_counter()
            is_done = input_ids.shape[1] >= self.length
            return torch.full((len(input_ids),), is_done, device=input_ids.device)

    def call(seed: int, limit: int, cache: str) -> tuple[list[int], float]:
        torch.manual_seed(seed)
        # On CPU nothing is compiled, so short prompts are sufficient for the warm-up.
        is_short = limit < job["max_new_tokens"] and device == "cpu"
        tokens = whole[:, :16] if is_short else whole
        watch = Watch(tokens.shape[1] + limit)
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=job["max_new_tokens"],
            num_return_sequences=job["num_samples"],
            cache_implementation=cache,
            stopping_criteria=transformers.StoppingCriteriaList([watch]),
        )
        return _lengths(out[:, tokens.shape[1] :].cpu().numpy(), job["eos_ids"]), watch.first

    if device == "cpu":
        # Waiting threads can be slower than one thread on busy cores; use the faster setting.
        trials = {n: 0.0 for n in (len(os.sched_getaffinity(0)), 1)}
        for num_threads in (1, *trials):
            torch.set_num_threads(num_threads)
            _, first = call(job["seed"] + 1, min(8, job["max_new_tokens"] - 1), job["variants"][0])
            trials[num_threads] = time.perf_counter() - first
        torch.set_num_threads(min(trials, key=lambda n: trials[n]))
    result = {
        "versions": _versions("torch", "transformers"),
        "num_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    return result, {name: functools.partial(call, cache=name) for name in job["variants"]}


def _lengths(responses: np.ndarray, eos_ids: list[int]) -> list[int]:
    """Return the number of tokens of each row up to its first EOS, with the EOS."""
    is_eos = np.isin(responses, eos_ids)
    first = np.where(is_eos.any(1), is_eos.argmax(1) + 1, responses.shape[1])
    return [int(n) for n in first]


def _tunix(job: dict[str, Any], prompts: np.ndarray) -> tuple[dict[str, Any], dict[str, Call]]:
    import jax
    import jax.numpy as jnp

    sampler_lib = importlib.import_module("tunix.generate.sampler")
    model, config = _tunix_model(job)
    prompt_tokens, most = prompts.shape[1], job["max_new_tokens"]

    # The second call compares scalars of its state with those of the first call; compile that here.
    bool(jnp.array(0) == jnp.array(0))
    sampler = _watched(sampler_lib.Sampler, prompt_tokens, most)(
        model,
        _Numbers(job["pad_id"]),
        sampler_lib.CacheConfig(
            cache_size=prompt_tokens + most,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
    )
    rows = [" ".join(map(str, row)) for row in prompts for _ in range(job["num_samples"])]

    def call(seed: int, limit: int) -> tuple[list[int], float]:
        sampler.limit = limit
        out = sampler(
            rows,
            max_generation_steps=most,
            max_prompt_length=prompt_tokens,
            eos_tokens=job["eos_ids"] or [-1],
            temperature=1.0,
            top_p=1.0,
            seed=seed,
        )
        # Tunix drops the EOS token; add it, because every side counts it.
        return [min(len(row) + 1, most) for row in out.tokens], sampler.first

    result = {
        "versions": _versions("google-tunix", "jax", "jaxlib", "flax"),
        "num_threads": len(os.sched_getaffinity(0)),
        "device": jax.devices()[0].device_kind,
    }
    return result, {name: call for name in job["variants"]}


def _tunix_model(job: dict[str, Any]) -> tuple[Any, Any]:
    """Return the Tunix model of a Qwen2 checkpoint, and its Tunix config."""
    import jax.numpy as jnp

    model_lib = importlib.import_module("tunix.models.qwen2.model")
    params_lib = importlib.import_module("tunix.models.qwen2.params")
    hf_config = json.loads((Path(job["model"]) / "config.json").read_text())
    if hf_config["model_type"] != "qwen2":
        raise SystemExit(
            f"the tunix peer loads qwen2 checkpoints only, got {hf_config['model_type']}; leave "
            "tunix out of --peers"
        )
    num_heads = hf_config["num_attention_heads"]
    rope = hf_config.get("rope_parameters") or {}
    dtype = getattr(jnp, job["dtype"])
    config = model_lib.ModelConfig(
        num_layers=hf_config["num_hidden_layers"],
        vocab_size=hf_config["vocab_size"],
        embed_dim=hf_config["hidden_size"],
        hidden_dim=hf_config["intermediate_size"],
        num_heads=num_heads,
        head_dim=hf_config.get("head_dim") or hf_config["hidden_size"] // num_heads,
        num_kv_heads=hf_config["num_key_value_heads"],
        rope_theta=int(rope.get("rope_theta", hf_config.get("rope_theta", 10000))),
        norm_eps=hf_config["rms_norm_eps"],
        use_tied_embedding=hf_config["tie_word_embeddings"],
        dtype=dtype,
        param_dtype=dtype,
    )
    return params_lib.create_model_from_safe_tensors(job["model"], config, dtype=dtype), config


def _watched(sampler_class: Any, prompt_tokens: int, most: int) -> Any:
    """Return a subclass of Tunix's sampler that records the time of the first token.

    Its attribute `limit` ends generation after that number of tokens, because a smaller
    max_generation_steps would compile another program.
    """
    import jax

    class Watched(sampler_class):
        limit, first = most, 0.0

        def __init__(self, *args: Any):
            super().__init__(*args)
            prefill = self._compiled_prefill_fn

            def watched(*args: Any, **kwargs: Any) -> Any:
                state = jax.block_until_ready(prefill(*args, **kwargs))
                self.first = time.perf_counter()
                return state

            self._compiled_prefill_fn = watched

        def init_sample_state(self, *args: Any, **kwargs: Any) -> Any:
            state = super().init_sample_state(*args, **kwargs)
            if self.limit == most:
                return state
            # The prefill draws the first token, at index prompt_tokens; the loop draws the others.
            return state.replace(total_sampling_steps=prompt_tokens + self.limit - 1)

    return Watched


class _Numbers:
    """A tokenizer of decimal numbers for tunix, which takes text only."""

    def __init__(self, pad_id: int):
        self._pad_id = pad_id

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return self._pad_id


def _versions(*packages: str) -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": sys.version.split()[0], **found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
