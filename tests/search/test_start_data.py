# SPDX-License-Identifier: Apache-2.0
"""Start data: rows become groups, bad ones are named, and log-probs are those of drawing."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import load_folder

from tba_jax.config.schema import make_config
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.flow.padding import Padding
from tba_jax.flow.tickets import Ticket
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.scoring import Scoring
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import unstack_layers
from tba_jax.run.model_parts import START_MODEL, make_decoder
from tba_jax.search.config import SearchSettings
from tba_jax.search.prompts import PromptReader
from tba_jax.search.start_data import GivenScorer, load_start_tickets, make_start_program
from tba_jax.tasks.arithmetic import Arithmetic


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(str(START_MODEL))


def write(tmp_path, *rows):
    path = tmp_path / "start.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path, tokenizer, **changes):
    most = changes.pop("max_prompt_tokens", 12)
    reader = PromptReader(Arithmetic(), tokenizer, most)
    limits = {"min_new_tokens": 0, "max_new_tokens": 6, "samples_per_prompt": 2, **changes}
    return load_start_tickets(path, reader, tokenizer, SearchSettings(**limits))


def test_rows_become_groups_of_at_most_s_responses_that_end(tmp_path, tokenizer):
    rows = [(7, "1"), (3, "22"), (7, "3"), (7, "4"), (3, "22222")]
    path = write(tmp_path, *({"prompt_id": i, "response": text} for i, text in rows))
    groups = load(path, tokenizer)
    assert [(g.prompt.prompt_id, [tokenizer.decode(r) for r in g.responses]) for g in groups] == [
        (7, ["1", "3"]),
        (7, ["4"]),
        (3, ["22", "22222"]),
    ]
    assert [g.number for g in groups] == [0, 1, 2]
    assert all(r[-1] == tokenizer.eos_ids[0] for g in groups for r in g.responses)
    assert groups[0].prompt.text == Arithmetic().problem("train", 7)[0]
    assert groups[0].prompt.columns == Arithmetic().problem("train", 7)[1]


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"prompt_id": 0, "text": "1"}, {}, "want an object with text under 'response'"),
        ({"response": "1"}, {}, "prompt_id = None, want the index of a training problem"),
        ({"prompt_id": -1, "response": "1"}, {}, "prompt_id = -1, want the index"),
        ({"prompt_id": True, "response": "1"}, {}, "prompt_id = True, want the index"),
        ({"prompt_id": 0, "response": "1<eos>"}, {}, "contains an end-of-sequence token"),
        ({"prompt_id": 0, "response": "123456"}, {}, "6 tokens; wanted .* to 5 "),
        ({"prompt_id": 0, "response": "1"}, {"min_new_tokens": 2}, "1 tokens; .*min_new_tokens"),
        ({"prompt_id": 0, "response": "1"}, {"max_prompt_tokens": 1}, "max_prompt_tokens = 1"),
    ],
)
def test_a_bad_row_is_named(tmp_path, tokenizer, row, changes, message):
    path = write(tmp_path, {"prompt_id": 0, "response": "12"}, row)
    line = 1 if "max_prompt_tokens" in changes else 2
    with pytest.raises(ValueError, match=f"start.jsonl, line {line}: .*{message}"):
        load(path, tokenizer, **changes)


def test_log_probs_of_given_responses_are_those_of_drawing_them(tokenizer):
    model, params, _ = load_folder(str(START_MODEL), param_dtype=jnp.float32)
    params = unstack_layers(params, model)
    config = make_config({"task.max_prompt_tokens": 12, "search.max_new_tokens": 12})
    prompts = []
    for i in range(3):
        text, columns = Arithmetic().problem("train", i)
        prompts.append(Prompt(i, text, tokenizer.encode(text, add_bos=True), columns))
    drawn = make_decoder(config, model, tokenizer).decode(
        params,
        [p.tokens for p in prompts],
        num_samples=4,
        key=jax.random.key(0),
        settings=SamplingSettings(12, temperature=0.8, top_p=1.0, min_new_tokens=2),
        temperatures=np.full((3, 4), 0.8),
        num_slots=None,
    )
    given = [
        Ticket(i, p, tuple(y.tokens for y in drawn[i][: 4 - i])) for i, p in enumerate(prompts)
    ]
    scoring = Scoring(temperature=0.8, eos_ids=tokenizer.eos_ids, min_new_tokens=2)
    program = make_start_program(model, scoring, max_new_tokens=12)
    padding = Padding((12,), (12,), tokenizer.pad_id)
    score = GivenScorer(program, samples_per_prompt=4, temperature=0.8, padding=padding)
    for i, ticket in enumerate(given):
        group = score(params, ticket, version=5)
        assert group.prompt is prompts[i] and len(group.episodes) == 4 - i
        for j, y in enumerate(group.episodes):
            np.testing.assert_array_equal(y.tokens, ticket.responses[j])
            # Float32: one forward pass over whole sequences against a cache, token by token.
            expected = drawn[i][j].token_logprobs
            np.testing.assert_allclose(y.token_logprobs, expected, atol=2e-4)
            assert (y.version_min, y.version_max, y.temperature) == (5, 5, 0.8)
            assert (y.finish, y.is_sampled) == ("eos", None)
