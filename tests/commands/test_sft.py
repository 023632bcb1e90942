# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: it learns the responses, ends them, and refuses unusable files."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_models import load_folder, scored_tokens
from qwen_tokenizer import qwen_like_tokenizer

from tba_jax.commands import sft
from tba_jax.commands.entry_point import run_command
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.models import model as models
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.run.model_parts import START_MODEL
from tba_jax.settings import ConfigError
from tba_jax.tasks.examples import read_examples

# The chat template of Qwen3-8B, byte for byte (Apache 2.0).
QWEN3 = Path(__file__).parents[1] / "data" / "qwen3.jinja"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_model_learns_to_write_its_responses_and_to_end_them(tmp_path, capsys):
    rows = [{"response": "1+1"}, {"prompt": "2", "response": "-2+7"}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "model"
    arguments = [f"--model={START_MODEL}", f"--data={data}", f"--out={out}"]
    rate = "--config.optimizer.learning_rate=cosine(3e-3, 0)"
    sizes = ["--config.num_steps=40", "--config.batch.num_prompts=4"]
    assert sft.main([*arguments, *sizes, rate]) == 0
    assert "step 40 of 40" in capsys.readouterr().out
    config, params, _ = load_folder(out)
    tokenizer = Tokenizer.load(out)
    ids = {"eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    decoder = Decoder(config, compute_dtype=np.float32, prompt_tokens=4, max_length=12, **ids)
    prompts = [tokenizer.encode(row.get("prompt", ""), add_bos=True) for row in rows]
    greedy = SamplingSettings(8, temperature=0.0)
    key = jax.random.key(0)
    decoded = decoder.decode(params, prompts, num_samples=1, key=key, settings=greedy)
    texts = tokenizer.batch_decode([row[0].tokens for row in decoded])
    assert texts == ["1+1", "-2+7"] and all(row[0].has_eos for row in decoded)
    with pytest.raises(ValueError, match="the folder is not empty. Give a new one"):
        sft.main(arguments)


USER, THOUGHT = {"role": "user", "content": "7+5"}, "<think>\nhm\n</think>\n\n12<|im_end|>"
ANSWER = {"role": "assistant", "reasoning_content": "hm", "content": "12"}
ROWS = [
    {"prompt": "7+5", "completion": "<think>hm</think>12"},
    {"messages": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n12"}]},
    {"prompt": [USER], "completion": [ANSWER]},
]


def test_an_answer_is_trained_on_with_its_thinking(tmp_path):
    """With Qwen3's template, and with one that drops thinking everywhere."""
    qwen_like_tokenizer(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(QWEN3.read_text())
    tokenizer, data = Tokenizer.load(tmp_path), write_rows(tmp_path / "a.jsonl", ROWS)

    def texts(source, chat):
        rows = read_examples(str(source), "train", tokenizer, chat)
        return [[tokenizer.decode(part, skip_special=False) for part in row] for row in rows]

    asked = "<|im_start|>user\n7+5<|im_end|>\n<|im_start|>assistant\n"
    assert texts(data, True) == [[asked, THOUGHT]] * 3
    answer = write_rows(tmp_path / "b.jsonl", [{"prompt": "7+5", "completion": "12"}])
    quick = f"{asked}<think>\n\n</think>\n\n"
    assert texts(answer, "enable_thinking=False") == [[quick, "12<|im_end|>"]]
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: the chat template .* \['thinks'\]"):
        texts(answer, "thinks=False")
    template.write_text(
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}<think>\n{% endif %}"
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert texts(data, True)[1] == ["7+5<think>\n", THOUGHT.removeprefix("<think>\n")]


@pytest.fixture(scope="module")
def examples_file(tmp_path_factory):
    texts = [f"{a}+{b}" for a in range(1, 8) for b in (3, 45)]
    rows = [{"prompt": x, "completion": f"{eval(x)}"} for x in texts]
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows)


def tuned(examples_file, *flags):
    """What the command computes in four steps with these flags."""
    arguments = [f"--model={START_MODEL}", f"--data={examples_file}", "--out=unused"]
    values = {"num_steps": 4, "batch.num_prompts": 8, "eval.period": 2}
    values["optimizer.learning_rate"] = "cosine(1e-3, 0)"
    given = [f"--config.{name}={value}" for name, value in values.items()]
    args, config = sft._arguments([*arguments, *given, "--eval_share=0.3", *flags])
    source = models.describe(str(START_MODEL))
    found = sft._examples(args.data, args.eval_share, config, source.load_tokenizer())
    return sft.fine_tune(source, *found, config)


@pytest.fixture(scope="module")
def plain(examples_file):
    return tuned(examples_file)


@pytest.mark.slow
def test_packed_rows_on_a_mesh_give_the_same_losses(plain, examples_file):
    mesh = ["--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.batch.micro_batch_rows=4"]
    _, losses, eval_losses = tuned(examples_file, *mesh, "--config.batch.packed_length=40")
    assert [step for step, _ in plain[2]] == [0, 2, 4]
    # float32 sums in another order; AdamW divides by the root of small second moments.
    np.testing.assert_allclose(losses, plain[1], rtol=1e-4)
    np.testing.assert_allclose(eval_losses, plain[2], rtol=1e-4)


@pytest.mark.slow
def test_the_evaluation_is_the_mean_over_held_out_tokens_of_all_batches(plain, examples_file):
    source = models.describe(str(START_MODEL))
    _, held_out = sft._examples(str(examples_file), 0.3, sft.DEFAULTS, source.load_tokenizer())
    assert len(held_out) == 4
    params, num = source.load_params(), sum(len(x.response) for x in held_out)
    total = -sum(scored_tokens(source.config, params, *x[:2]).sum() for x in held_out)
    # Another length of padding.
    np.testing.assert_allclose(plain[2][0][1], total / num, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": [], "response": []}', "wanted texts under 'prompt'"),
        ('{"response": "1"}\n{"response": 1}', "line 2: got the columns response; wanted texts"),
        ('{"response": "' + "1" * 600 + '"}', " (512). Shorten them"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, capsys, text, message):
    data = tmp_path / "rows.jsonl"
    data.write_text(text)
    argv = [f"--model={START_MODEL}", f"--data={data}", f"--out={tmp_path / 'm'}"]
    assert run_command(lambda: sft.main(argv)) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error and not (tmp_path / "m").exists()
    with pytest.raises(ConfigError, match=r"--config\.sync_period: has no effect on fine-tuning"):
        sft._arguments([*argv, "--config.sync_period=3"])
