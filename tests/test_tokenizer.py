# SPDX-License-Identifier: Apache-2.0
"""The tokenizer wrapper, on a word-level tokenizer made here and on that of stories260k."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tba_jax.tokenizer import Tokenizer

STORIES = Path(__file__).parents[1] / ".." / "shared" / "models" / "stories260k"
needs_stories = pytest.mark.skipif(
    not STORIES.is_dir(), reason="../shared/models/stories260k is absent"
)


def make_folder(path, *, special=("bos", "eos", "pad"), template=None, declared=None):
    """A folder with a word-level tokenizer: <bos> 0, <eos> 1, <pad> 2, a 3, b 4, . 5."""
    words = ["<bos>", "<eos>", "<pad>", "a", "b", "."]
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="b")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(words[:3])
    library.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {f"{name}_token": f"<{name}>" for name in special}
    if template:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if declared is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    return Tokenizer.load(path)


def test_ids_of_text_with_and_without_bos(tmp_path):
    tokenizer = make_folder(tmp_path)
    ids = tokenizer.encode("a b .", add_bos=True)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, [0, 3, 4, 5])
    np.testing.assert_array_equal(tokenizer.encode("a b .", add_bos=False), [3, 4, 5])
    np.testing.assert_array_equal(tokenizer.encode("a <eos>", add_bos=False), [3, 1])
    assert tokenizer.encode("", add_bos=False).shape == (0,)


def test_text_of_ids_leaves_special_tokens_out_and_spaces_alone(tmp_path):
    tokenizer = make_folder(tmp_path)
    ids = np.array([0, 3, 5, 1], np.int32)
    assert tokenizer.decode(ids) == "a ."  # a clean-up would write "a."
    assert tokenizer.decode(ids, skip_special=False) == "<bos> a . <eos>"
    assert tokenizer.batch_decode([ids, [4], []]) == ["a .", "b", ""]


@pytest.mark.parametrize(
    ("special", "declared", "bos_id", "eos_ids", "pad_id"),
    [
        (("bos", "eos", "pad"), None, 0, (1,), 2),
        (("eos",), None, None, (1,), 1),
        ((), None, None, (), 0),
        (("eos",), [2, 1, 5], None, (1, 2, 5), 1),
        ((), 5, None, (5,), 5),
    ],
)
def test_special_ids(tmp_path, special, declared, bos_id, eos_ids, pad_id):
    tokenizer = make_folder(tmp_path, special=special, declared=declared)
    assert tokenizer.bos_id == bos_id
    assert tokenizer.eos_ids == eos_ids
    assert tokenizer.pad_id == pad_id
    assert tokenizer.vocab_size == 6
    first = tokenizer.encode("a", add_bos=True)
    np.testing.assert_array_equal(first, [3] if bos_id is None else [bos_id, 3])


def test_eos_of_config_json_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert make_folder(tmp_path).eos_ids == (1, 4)


def test_chat_template_ends_where_the_assistant_begins(tmp_path):
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    template = (
        "{{ bos_token }}{% for m in messages %} {{ m['role'] }}: {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %} assistant:{% endif %}"
    )
    tokenizer = make_folder(tmp_path, template=template)
    text = tokenizer.format_chat([{"role": "user", "content": "a b"}])
    assert text == "<bos> user: a b assistant:"


def test_missing_chat_template_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="no chat template; use plain prompts"):
        make_folder(tmp_path).format_chat([{"role": "user", "content": "a"}])


def test_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json and no tokenizer\.model there"):
        Tokenizer.load(tmp_path)


def test_the_library_is_not_imported_before_a_tokenizer_is_loaded():
    code = "import sys, tba_jax.tokenizer; print('transformers' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    assert out.stdout == "False\n"


@needs_stories
def test_stories_tokenizer_round_trips():
    tokenizer = Tokenizer.load(STORIES)
    golden = json.loads((Path(__file__).parent / "golden" / "stories260k.json").read_text())
    np.testing.assert_array_equal(
        tokenizer.encode(golden["prompt"], add_bos=True), golden["prompt_ids"]
    )
    assert tokenizer.decode(golden["greedy_ids"]) == golden["text"]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2,), 0)
    assert tokenizer.vocab_size == 512
