# SPDX-License-Identifier: Apache-2.0
"""Settings that a run chooses itself."""

import jax
import pytest

from tba_jax.config.schema import flatten, make_config
from tba_jax.planning import choices
from tba_jax.run.model_parts import describe_model

CONFIG = make_config({"search.max_new_tokens": 256, "task.max_prompt_tokens": 256})


def rows(memory_bytes):
    model_config = describe_model(CONFIG).config
    return choices.fitting_rows(CONFIG, model_config, jax.local_devices()[:1], memory_bytes)


def test_rows_of_a_micro_batch_fit_the_memory():
    assert rows(64 * 2**30) == (0, "")
    fewer, line = rows(1000 * 2**20)
    fewest, _ = rows(300 * 2**20)
    assert 0 < fewest < fewer < 256 and 256 % fewer == 0
    assert f"batch.micro_batch_rows={fewer} of 256 rows" in line and "of 1.0 GiB" in line


def test_a_resumed_run_takes_what_it_chose(monkeypatch):
    """On another machine and with other data, the choice would be another."""
    monkeypatch.setattr(choices, "with_lengths", lambda config: pytest.fail("chosen again"))
    chosen = {"task.max_prompt_tokens": 64, "batch.micro_batch_rows": 32, "eval.max_new_tokens": 7}
    left_open = make_config({"task.max_prompt_tokens": 0})
    config, lines = choices.choose(left_open, flatten(make_config(chosen)))
    assert lines == [] and flatten(config) == flatten(make_config(chosen))


def test_a_given_value_stays():
    given = make_config({"batch.micro_batch_rows": 48})
    assert choices.choose(given, {}) == (given, [])
