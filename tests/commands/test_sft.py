# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: it learns the responses, ends them, and refuses unusable files."""

import json

import jax
import numpy as np
import pytest
from fake_models import load_folder

from tba_jax.commands import sft
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.models.hf import folders
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.run.model_parts import START_MODEL
from tba_jax.tasks import arithmetic


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_model_learns_to_write_its_responses_and_to_end_them(tmp_path, capsys):
    rows = [{"response": "1+1"}, {"prompt": "2", "response": "-2+7"}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "model"
    arguments = [f"--model={START_MODEL}", f"--data={data}", f"--out={out}", "--num_steps=60"]
    assert sft.main([*arguments, "--batch_size=4", "--learning_rate=3e-3"]) == 0
    printed = capsys.readouterr().out
    assert "step 60 of 60" in printed
    config, params, _ = load_folder(out)
    tokenizer = Tokenizer.load(out)
    decoder = Decoder(
        config,
        compute_dtype=np.float32,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        prompt_buckets=(4,),
        max_length=12,
    )
    prompts = [tokenizer.encode(row.get("prompt", ""), add_bos=True) for row in rows]
    decoded = decoder.decode(
        params,
        prompts,
        num_samples=1,
        key=jax.random.key(0),
        settings=SamplingSettings(8, temperature=0.0),
    )
    texts = tokenizer.batch_decode(decoded.tokens[:, 0])
    assert texts == ["1+1", "-2+7"] and decoded.has_eos.all()
    assert sft.main(arguments) == 1 and "is not empty" in capsys.readouterr().err


def test_every_row_comes_once_per_pass_in_an_order_of_the_seed():
    rows = [(np.array([1], np.int32), np.array([i], np.int32)) for i in range(6)]

    def order(seed):
        stream = sft.batches(rows, 2, 0, seed)
        return [next(stream)[0][:, 0, 1].tolist() for _ in range(6)]

    first = order(0)
    assert sorted(sum(first[:3], [])) == sorted(sum(first[3:], [])) == list(range(6))
    assert order(0) == first != order(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ('{"response": "1"}\n{"response": 1}', "line 2: want an object with text under 'response'"),
        ("[1]", "line 1: want an object"),
        ('{"response": ', "line 1: not JSON"),
        ('{"response": "' + "1" * 600 + '"}', "was made for 512; shorten them"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, capsys, text, message):
    data = tmp_path / "rows.jsonl"
    data.write_text(text)
    assert sft.main([f"--model={START_MODEL}", f"--data={data}", f"--out={tmp_path / 'm'}"]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "m").exists()


def test_the_embedded_attacker_writes_sums():
    folder = folders.resolve("embedded:attacker_model")
    config, params, _ = load_folder(folder)
    tokenizer = Tokenizer.load(folder)
    decoder = Decoder(
        config,
        compute_dtype=np.float32,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        prompt_buckets=(1,),
        max_length=13,
    )
    decoded = decoder.decode(
        params,
        [tokenizer.encode("", add_bos=True)],
        num_samples=128,
        key=jax.random.key(0),
        settings=SamplingSettings(12),
    )
    texts = tokenizer.batch_decode(
        [row[:n] for row, n in zip(decoded.tokens[0], decoded.lengths[0], strict=True)]
    )
    right = [
        len(text) == arithmetic.MAX_PROMPT_CHARS
        and text[::2].isdigit()
        and set(text[1::2]) <= set("+-")
        for text in texts
    ]
    # 99.8 % of 1,024 did; 5 misses in 128 would be a chance below 1e-6.
    assert sum(right) >= 124 and len(set(texts)) > 120
