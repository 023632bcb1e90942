# SPDX-License-Identifier: Apache-2.0
"""The gsm8k preset on the real data with a real, tiny, pretrained model."""

import json
import math

import pytest
from commands import ROOT, losses, run

from tba_jax.models.tokenizer import Tokenizer
from tba_jax.tasks.registry import get_task

DATA = ROOT.parent / "shared" / "data" / "gsm8k"
MODEL = ROOT.parent / "shared" / "models" / "stories260k"
# The middle of the lengths: about every second problem is longer.
MAX_PROMPT_TOKENS = 160

pytestmark = pytest.mark.skipif(
    not (DATA.is_dir() and MODEL.is_dir()), reason=f"{DATA} or {MODEL} is absent"
)

# The stories model never gives a right answer, so that there would be nothing to learn from. The
# task's own reward plus a little for a varied text makes responses differ.
REWARD = """
from tba_jax.rewards.numeric import gsm8k_reward

def reward(prompts, completions, answer, **columns):
    assert all(prompt.startswith("[MATH_TASK] Problem:\\n") for prompt in prompts), prompts
    assert gsm8k_reward(prompts, answer, answer) == [1.0] * len(answer), answer
    graded = gsm8k_reward(prompts, completions, answer)
    return [right + len(set(text)) / 100 for right, text in zip(graded, completions)]
"""


OVERRIDES = (
    f"task.data_path={DATA}",
    "task.reward=varied:reward",
    f"task.max_prompt_tokens={MAX_PROMPT_TOKENS}",
    f"model.path={MODEL}",
    *(f"model.{name}_dtype=float32" for name in ("param", "compute")),
    "placement=shared",
    "num_searchers=1",
    "num_steps=4",
    "batch.num_prompts=2",
    "objective.group_size=4",
    "search.samples_per_prompt=4",
    "search.initial_fill=0",
    "search.max_new_tokens=48",
    "eval.period=0",
)


@pytest.mark.slow
def test_gsm8k_trains_and_evaluates_on_real_problems(cache, tmp_path):
    (tmp_path / "varied.py").write_text(REWARD)
    workdir = tmp_path / "run"
    done = run(workdir, *OVERRIDES, cache=cache, config="configs/math.py:gsm8k", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = losses(workdir)
    assert sorted(found) == [1, 2, 3, 4]
    assert all(math.isfinite(loss) and loss > 0 for loss in found.values())

    # Exactly the first 16 test problems that fit are asked, and the others are counted.
    task, tokenizer = get_task("gsm8k", str(DATA)), Tokenizer.load(str(MODEL))
    fits = []
    for index in range(task.size("eval")):
        if len(tokenizer.encode(task.problem("eval", index)[0], add_bos=True)) <= MAX_PROMPT_TOKENS:
            fits.append(index)
        if len(fits) == 16:
            break
    num_skipped = fits[-1] + 1 - len(fits)
    report = json.loads((workdir / "report.json").read_text())
    for when in ("before", "after"):
        evaluation = report["eval"][when]
        assert (evaluation["n"], evaluation["num_skipped"]) == (16, num_skipped)
        assert evaluation["num_failed"] == 0
    assert [sample["prompt"] for sample in report["samples"]] == [
        task.problem("eval", index)[0] for index in fits[: len(report["samples"])]
    ]
    assert report["ledger"]["rejected"] == {}

    # Training prompts are skipped too, visibly.
    skipped = report["skipped_prompts"]
    assert skipped["eval"] == num_skipped and skipped["train"] > 0
    assert f"{num_skipped} held-out prompts exceed task.max_prompt_tokens" in done.stdout
