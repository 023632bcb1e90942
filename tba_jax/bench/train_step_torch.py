# SPDX-License-Identifier: Apache-2.0
"""The train step of `tba_jax.bench.train_step` in torch, with transformers and AdamW of torch.

    python train_step_torch.py JOB.json

This file does not import tba_jax, so that it may run in its own environment. Its options save time
without changing results: logits of response positions only (`logits_to_keep`), and the fused
optimiser.

Invariant: weights and batch are those of the other sides, and the loss of the first step is
reported.
"""

import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("torch", "transformers")


def main(argv: list[str]) -> int:
    """Run one job and write its result to the file that the job names."""
    job = json.loads(Path(argv[0]).read_text())
    Path(job["result"]).write_text(json.dumps(measure(job)))
    return 0


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return step times, CPU time, peak memory, and the loss of the first, untimed step."""
    torch, transformers = map(importlib.import_module, PACKAGES)
    device = "cuda" if job["platform"] == "gpu" else "cpu"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"])
    ).to(device)
    model.train()
    matrices = [x for x in model.parameters() if x.ndim >= 2]
    others = [x for x in model.parameters() if x.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": job["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=job["learning_rate"],
        betas=(0.9, 0.999),
        eps=1e-8,
        fused=True,
    )
    arrays = np.load(job["batch"])
    p, k, s = arrays["tokens"].shape
    t, beta = job["response_tokens"], job["beta"]

    def tensor(x: np.ndarray, dtype: Any) -> Any:
        return torch.tensor(x).to(device, dtype)

    tokens = tensor(arrays["tokens"].reshape(p * k, s), torch.int64)
    rewards = tensor(arrays["rewards"], torch.float32)
    reference = tensor(arrays["reference_logprob"], torch.float32)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens, use_cache=False, logits_to_keep=t + 1).logits[:, :-1].float()
        chosen = logits.gather(-1, tokens[:, -t:, None])[..., 0] - logits.logsumexp(-1)
        residual = chosen.sum(1).reshape(p, k) - reference - rewards / beta
        centred = residual - residual.mean(1, keepdim=True).detach()
        loss = beta / 2 * centred.square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip_norm"])
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    first_loss = step()
    times = []
    cpu_start = time.process_time()
    for _ in range(job["steps"]):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return {
        "loss": first_loss,
        "step_s": times,
        "cpu_s": (time.process_time() - cpu_start) / job["steps"],
        "device_peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "max_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "num_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
