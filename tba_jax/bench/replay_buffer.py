# SPDX-License-Identifier: Apache-2.0
"""Command: speed and memory of a replay buffer full of small responses.

    python -m tba_jax.bench.replay_buffer --json

Fills a buffer with random responses, 100 per prompt. Measures the growth of the process's memory
per response token; the time of one merged round per response, at several fill levels, and with
every bound reached so that each insert evicts; and the time of a draw of 512 responses (32 groups
of 16). Times are medians of wall time; `draw_cpu_ms` is mean processor time, for busy machines.
Needs no accelerator.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tba_jax.flow.rounds import PhaseTimes, RoundCommit, RoundMetrics, RoundReport
from tba_jax.flow.trajectory import Group, Prompt, Trajectory
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.config import ReplaySettings

_PER_PROMPT = 100
_GROUP_SIZE = 16
_NUM_PROMPTS = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tba_jax.bench.replay_buffer")
    parser.add_argument("--num_trajectories", type=int, default=1_000_000, help="final filling")
    parser.add_argument("--mean_tokens", type=int, default=128, help="mean response length")
    parser.add_argument("--json", action="store_true", help="last line of output: a JSON object")
    args = parser.parse_args(argv)
    if args.num_trajectories < 10_000 or args.mean_tokens < 8:
        parser.error("wanted --num_trajectories of at least 10000 and --mean_tokens of at least 8")
    result = measure(args.num_trajectories, args.mean_tokens)
    for key, value in result.items():
        print(f"{key:>28}  {value}")
    if args.json:
        print(json.dumps(result))
    return 0


def measure(num_trajectories: int, mean_tokens: int) -> dict[str, float | str | dict[str, float]]:
    """Return the measurements by name."""
    rng = np.random.default_rng(0)
    num_prompts = num_trajectories // _PER_PROMPT
    buffer = _buffer(max_bytes=2**62)
    gc.collect()
    bytes_before = _process_bytes()
    insert_us: dict[str, float] = {}
    recent: deque[float] = deque(maxlen=20)
    tokens = rounds = 0
    fillings = [n for n in (10_000, 100_000) if n < num_trajectories]
    for first_sample in range(0, _PER_PROMPT, _GROUP_SIZE):
        size = min(_GROUP_SIZE, _PER_PROMPT - first_sample)
        for first in range(0, num_prompts, _NUM_PROMPTS):
            prompt_ids = range(first, min(num_prompts, first + _NUM_PROMPTS))
            commit = _round(rng, rounds, prompt_ids, size, mean_tokens)
            recent.append(
                _timed(lambda c=commit, r=rounds: buffer.merge([c], r)) / commit.generated
            )
            rounds += 1
            tokens += sum(len(y.response_tokens) for g in commit.groups for y in g.trajectories)
            if fillings and buffer.num_trajectories >= fillings[0]:
                insert_us[str(fillings.pop(0))] = 1e6 * statistics.median(recent)
    insert_us[str(num_trajectories)] = 1e6 * statistics.median(recent)
    del commit
    gc.collect()
    bytes_per_token = (_process_bytes() - bytes_before) / tokens
    overhead = (_process_bytes() - bytes_before - 8 * tokens) / buffer.num_trajectories
    counted = buffer.num_bytes / tokens
    cpu = time.process_time()
    draws = [_timed(lambda: buffer.sample(_NUM_PROMPTS, _GROUP_SIZE, rounds)) for _ in range(300)]
    draw_cpu_ms = 1e3 * (time.process_time() - cpu) / len(draws)
    many = [_timed(lambda: buffer.sample(512, _GROUP_SIZE, rounds)) for _ in range(10)]
    result = {
        "num_trajectories": buffer.num_trajectories,
        "num_prompts": buffer.num_prompts,
        "mean_tokens": tokens / buffer.num_trajectories,
        "draw_ms": 1e3 * statistics.median(draws),
        "draw_cpu_ms": draw_cpu_ms,
        "draw_p95_ms": 1e3 * sorted(draws)[int(0.95 * len(draws))],
        "draw_512_groups_ms": 1e3 * statistics.median(many),
        "bytes_per_token": bytes_per_token,
        "bytes_per_token_method": "growth of the process's resident memory",
        "bytes_per_token_counted": counted,
        "overhead_bytes_per_response": overhead,
        "insert_us": insert_us,
    }
    buffer = _buffer(max_bytes=int(buffer.num_bytes / buffer.num_trajectories * 20_000))
    for i in range(60):
        prompt_ids = range(i * _NUM_PROMPTS, (i + 1) * _NUM_PROMPTS)
        commit = _round(rng, i, prompt_ids, _GROUP_SIZE, mean_tokens)
        recent.append(_timed(lambda c=commit, i=i: buffer.merge([c], i)) / commit.generated)
    assert buffer.ledger()["evicted_bytes"] > 20 * _NUM_PROMPTS * _GROUP_SIZE / 2
    result["insert_full_us"] = 1e6 * statistics.median(recent)
    return result


def _buffer(max_bytes: int) -> ReplayBuffer:
    settings = ReplaySettings(
        recency_prob=0.5,
        priority_temperature=1.0,
        uniform_mix=0.1,
        capacity_per_prompt=_PER_PROMPT,
        max_bytes=max_bytes,
    )
    return ReplayBuffer(settings, seed=0)


def _round(
    rng: np.random.Generator, number: int, prompt_ids: Sequence[int], size: int, mean_tokens: int
) -> RoundCommit:
    groups = []
    for prompt_id in prompt_ids:
        trajectories = []
        for length in rng.integers(1, 2 * mean_tokens, size):
            trajectories.append(
                Trajectory(
                    prompt_id=prompt_id,
                    response_tokens=rng.integers(0, 150_000, length, np.int32),
                    reward=float(rng.random()),
                    reward_parts={},
                    behavior_token_logprobs=-rng.random(length, np.float32),
                    reference_logprob=-float(length),
                    version_min=number,
                    version_max=number,
                    searcher=number % 4,
                    round=number,
                    sampling_temperature=1.0,
                    finish_reason="eos",
                )
            )
        prompt = Prompt(prompt_id, f"prompt {prompt_id}", np.arange(24, dtype=np.int32), {})
        groups.append(Group(prompt, tuple(trajectories), {}))
    generated = sum(len(g.trajectories) for g in groups)
    metrics = RoundMetrics(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {})
    report = RoundReport(metrics, PhaseTimes(0.0, 0.0, 0.0, 0.0, 0.0))
    return RoundCommit(number % 4, number, number, tuple(groups), {}, generated, report)


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _process_bytes() -> int:
    """Resident memory of this process: now on Linux, at its peak elsewhere."""
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
