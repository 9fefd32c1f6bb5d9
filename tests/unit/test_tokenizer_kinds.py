"""Tokenizers: bytes, Hugging Face folders in their many shapes, tiktoken ranks, and the mask token."""

from __future__ import annotations

import base64
import json
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_data_common import byte_tokenizer
from torchtitan_ext.data.tokenizer_cores import LAYOUTS
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.errors import UserError


def build(path="", **kwargs) -> Tokenizer:
    return Tokenizer.Config(**kwargs).build(tokenizer_path=str(path))


def write_ranks(path, merges: int = 20):
    """256 bytes and a few pairs of letters, as tiktoken writes them."""
    tokens = [bytes([b]) for b in range(256)] + [bytes([97 + i, 98 + i]) for i in range(merges)]
    lines = [base64.b64encode(t) + b" " + str(i).encode() for i, t in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return len(tokens)


def write_hf(folder, *, config: dict | None = None, files: dict | None = None, extra: list | None = None):
    """A folder with a byte-level BPE tokenizer of 258 tokens and ``extra`` added ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"he": 256, "ll": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in extra or []])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, value in (files or {}).items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / name).write_text(text)
    return folder


@settings(deadline=None, max_examples=80)
@given(text=st.text(max_size=30), add_bos=st.booleans(), add_eos=st.booleans())
def test_bytes_round_trip(text, add_bos, add_eos):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_bos=add_bos, add_eos=add_eos, parse_special=False)
    assert tokenizer.decode(ids) == text.encode(errors="replace").decode()
    assert (ids[:1] == [256]) == add_bos and (ids[-1:] == [257]) == add_eos
    array = tokenizer.encode_documents([text], add_bos=add_bos, add_eos=add_eos)[0]
    assert array.tolist() == ids


@settings(deadline=None, max_examples=80)
@given(ids=st.lists(st.integers(-5, 400), max_size=20))
def test_decoding_any_ids_never_fails(ids):
    tokenizer = byte_tokenizer()
    assert isinstance(tokenizer.decode(ids), str)
    assert isinstance(tokenizer.decode(torch.tensor(ids, dtype=torch.int64), skip_special_tokens=False), str)
    assert tokenizer.decode(ids) == tokenizer.decode([i for i in ids if 0 <= i < 256])


def test_byte_vocabulary_and_specials():
    tokenizer = byte_tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id) == (256, 257, 258, 259)
    assert tokenizer.get_vocab_size() == tokenizer.vocab_size == 260
    assert tokenizer.encode("a<|mask|>b") == [97, 259, 98]
    assert tokenizer.encode_documents(["a<|mask|>"])[0].tolist() == list(b"a<|mask|>")
    assert tokenizer.decode([97, 259], skip_special_tokens=False) == "a<|mask|>"
    assert tokenizer.id_to_token(10) == "<0x0A>" and tokenizer.id_to_token(260) is None


def test_auto_finds_what_is_there(tmp_path):
    assert build().kind == build("does/not/exist").kind == build(tmp_path).kind == "byte"
    write_ranks(tmp_path / "qwen.tiktoken")
    assert build(tmp_path).kind == build(tmp_path / "qwen.tiktoken").kind == "tiktoken"
    write_hf(tmp_path)
    assert build(tmp_path).kind == build(tmp_path / "tokenizer.json").kind == "hf"
    assert build(tmp_path, kind="tiktoken").kind == "tiktoken"


@pytest.mark.parametrize("kind", ["hf", "tiktoken"])
def test_a_named_kind_must_be_there(tmp_path, kind):
    with pytest.raises(UserError, match="needs a tokenizer path"):
        build("", kind=kind)
    with pytest.raises(UserError, match="needs a tokenizer path, got 'nowhere'"):
        build("nowhere", kind=kind)
    with pytest.raises(UserError, match="holds no"):
        build(tmp_path, kind=kind)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", "mask_token": "<m>"}, {}),
        (
            {f"{r}_token": {"content": t, "__type": "AddedToken"}
             for r, t in {"bos": "<s>", "eos": "</s>", "pad": "<p>", "mask": "<m>"}.items()},
            {},
        ),
        ({}, {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"},
                                          "pad_token": "<p>", "mask_token": "<m>"}}),
        (None, {"config.json": {"bos_token_id": 258, "eos_token_id": [259, 7], "pad_token_id": 260,
                                "mask_token_id": 261}}),
        ({"bos_token": "<s>", "eos_token": "</s>"},
         {"generation_config.json": {"pad_token_id": 260},
          "config.json": {"mask_token_id": 261, "eos_token_id": 1}}),
    ],
)  # fmt: skip
def test_special_tokens_of_hf_folders(tmp_path, config, files):
    tokenizer = build(write_hf(tmp_path, config=config, files=files, extra=["<s>", "</s>", "<p>", "<m>"]))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id) == (258, 259, 260, 261)
    assert tokenizer.get_vocab_size() == 262
    ids = tokenizer.encode("hello", add_bos=True, add_eos=True)
    assert ids[0] == 258 and ids[-1] == 259 and ids[1] == 256
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello</s>"
    assert tokenizer.decode([-1, 99999, *ids]) == "hello"


def test_special_tokens_that_tokenizer_json_lacks_are_added(tmp_path):
    decoder = {"258": {"content": "<s>", "special": True}, "259": {"content": "<x>", "special": True}}
    config = {"bos_token": "<s>", "added_tokens_decoder": decoder, "additional_special_tokens": ["<y>"],
              "extra_special_tokens": {"image": "<z>"}}  # fmt: skip
    tokenizer = build(write_hf(tmp_path, config=config))
    assert [tokenizer.token_to_id(t) for t in ("<s>", "<x>", "<y>", "<z>")] == [258, 259, 260, 261]
    assert tokenizer.get_vocab_size() == 262
    assert tokenizer.encode("<y>") == [260]
    # Text of a document is text, whatever it looks like.
    assert len(tokenizer.encode_documents(["<y>"])[0]) == 3
    assert tokenizer.encode("<y>", parse_special=False) == tokenizer.encode_documents(["<y>"])[0].tolist()


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "T{{ messages[0].content }}"},
        {"chat_template.json": {"chat_template": "T{{ messages[0].content }}"}},
        {"tokenizer_config.json": {"chat_template": "T{{ messages[0].content }}"}},
        {"tokenizer_config.json": {"chat_template": [
            {"name": "default", "template": "T{{ messages[0].content }}"},
            {"name": "tool", "template": "U"}]}},
        {"tokenizer_config.json": {"chat_template": {"default": "T{{ messages[0].content }}"}}},
    ],
)  # fmt: skip
def test_chat_template_in_every_place(tmp_path, files):
    tokenizer = build(write_hf(tmp_path, files=files))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "Tx"


def test_chat_template_knows_special_tokens_and_has_a_default(tmp_path):
    config = {"bos_token": "<s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    assert build(write_hf(tmp_path / "a", config=config)).apply_chat_template([{"content": "x"}]) == "<s>x"
    text = build(write_hf(tmp_path / "b")).apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True
    )
    assert text == "<|user|>\nx\n<|assistant|>\n"


def test_chat_templates_written_for_transformers(tmp_path):
    """As its own tokenizers render them: with marks of what an assistant wrote, and what it passes."""
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- if tools is not none or documents is not none %}TOOLS{% endif %}"
        "{% for m in messages %}\n"
        "  {%- generation %}\n  {{ m.content }}\n{%- endgeneration -%}\n end"
        "{% endfor %}{% generation %}\nx{% endgeneration %}\n{%+ generation +%} y {%+ endgeneration +%} z"
    )
    folder = write_hf(tmp_path, config={"eos_token": "<s>"}, files={"chat_template.jinja": template})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "{% generation %}"}]
    assert build(folder).apply_chat_template(talk) == theirs.apply_chat_template(talk, tokenize=False)


def test_no_bos_where_the_tokenizer_says_so(tmp_path):
    assert not build(write_hf(tmp_path / "a", config={"bos_token": "<s>", "add_bos_token": False})).wants_bos
    assert build(write_hf(tmp_path / "b", config={"bos_token": "<s>"})).wants_bos
    assert not build(write_hf(tmp_path / "c", config={"bos_token": None})).wants_bos


@pytest.mark.parametrize("puts", [True, False])
@pytest.mark.parametrize("says", [True, False, None])
def test_whether_a_tokenizer_has_bos_before_every_text(says, puts, tmp_path):
    from tokenizers import Tokenizer as Tokens
    from tokenizers.processors import TemplateProcessing

    config = {"bos_token": "<s>", **({} if says is None else {"add_bos_token": says})}
    folder = write_hf(tmp_path, config=config, extra=["<s>"])
    if puts:
        inner = Tokens.from_file(str(folder / "tokenizer.json"))
        special = [("<s>", inner.token_to_id("<s>"))]
        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
        inner.save(str(folder / "tokenizer.json"))
    assert build(folder).core.adds_bos == (puts if says is None else says)


def test_a_role_that_is_an_ordinary_entry_is_left_out_of_texts(tmp_path):
    tokenizer = build(write_hf(tmp_path, config={"eos_token": "ll"}))
    assert tokenizer.eos_id == 257
    assert tokenizer.decode([256, 257]) == "he" and tokenizer.decode([257], skip_special_tokens=False) == "ll"


def test_broken_hf_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        build(tmp_path)
    write_hf(tmp_path, files={"tokenizer_config.json": "{"})
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not valid JSON"):
        build(tmp_path)


def test_vocab_and_merges(tmp_path):
    whole = build(write_hf(tmp_path / "a"))
    model = json.loads((tmp_path / "a" / "tokenizer.json").read_text())["model"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (tmp_path / "b" / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    assert build(tmp_path / "b").encode("hello ✓") == whole.encode("hello ✓")


def test_qwen_layout(tmp_path):
    n = write_ranks(tmp_path / "qwen.tiktoken")
    tokenizer = build(tmp_path)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [tokenizer.token_to_id(t) for t in names] == [n, n + 1, n + 2]
    assert (
        tokenizer.eos_id == tokenizer.pad_id == n and tokenizer.bos_id is None and tokenizer.mask_id is None
    )
    # With the real 151,643 ranks: <|file_sep|> 151664, <tool_response> 151665, </think> 151668.
    assert tokenizer.token_to_id("<|file_sep|>") == n + 21
    assert tokenizer.token_to_id("<tool_response>") == n + 22
    assert tokenizer.token_to_id("</think>") == n + 25
    assert tokenizer.get_vocab_size() == n + 26
    older = build(tmp_path, tiktoken_layout="qwen2_5")
    assert older.get_vocab_size() == n + 22 and older.token_to_id("<think>") is None
    ids = tokenizer.encode("<|im_start|>ab<think>")
    assert ids == [n + 1, 256, n + 24]
    assert tokenizer.decode(ids) == "ab<think>" and tokenizer.decode([*ids, 10**6, -1]) == "ab<think>"
    assert n + 1 not in tokenizer.encode_documents(["<|im_start|>"])[0]


def test_llama3_layout(tmp_path):
    n = write_ranks(tmp_path / "tokenizer.model")
    tokenizer = build(tmp_path)
    wanted = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|finetune_right_pad_id|>": 4,
              "<|start_header_id|>": 6, "<|end_header_id|>": 7, "<|eom_id|>": 8, "<|eot_id|>": 9,
              "<|python_tag|>": 10, "<|reserved_special_token_247|>": 255}  # fmt: skip
    assert {t: tokenizer.token_to_id(t) - n for t in wanted} == wanted
    assert tokenizer.get_vocab_size() == n + 256 and tokenizer.bos_id == n and tokenizer.pad_id == n + 4
    assert len(set(LAYOUTS["llama3"]["extra"])) == 256


@pytest.fixture(scope="module")
def rank_tokenizers(tmp_path_factory) -> tuple[Tokenizer, Tokenizer]:
    """Llama 3 and Qwen layouts over the same ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("tokenizer.model", "qwen.tiktoken"):
        write_ranks(folder / name)
    return build(folder / "tokenizer.model"), build(folder / "qwen.tiktoken")


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=30))
def test_tiktoken_round_trip(rank_tokenizers, text):
    llama, qwen = rank_tokenizers
    clean = text.encode(errors="replace").decode()
    # As plain text: the text may by chance be that of a special token.
    assert llama.decode(llama.encode(clean, parse_special=False)) == clean
    assert qwen.decode(qwen.encode(clean, parse_special=False)) == unicodedata.normalize("NFC", clean)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x0a\x09<unk>\x00", "line 1: not a tiktoken rank file|line 2"),
        (b"QQ== 0\nQg== 2\n", r"ranks are not 0\.\.n-1"),
        (b"", r"ranks are not 0\.\.n-1"),
        (b"QQ== 0\n", "not every single byte"),
        (b"QQ== zero\n", "line 1"),
    ],
)
def test_broken_rank_files(tmp_path, content, message):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=message):
        build(tmp_path)


def test_mask_is_added_at_the_first_free_id(tmp_path):
    n = write_ranks(tmp_path / "qwen.tiktoken")
    tokenizer = build(tmp_path, mask_token="<|mask|>")
    assert (tokenizer.mask_id, tokenizer.mask_token) == (n + 26, "<|mask|>")
    assert tokenizer.get_vocab_size() == n + 27
    assert tokenizer.encode("ab<|mask|>") == [256, n + 26]
    assert tokenizer.decode([256, n + 26]) == "ab"
    assert tokenizer.decode([256, n + 26, 256], skip_special_tokens=False) == "ab<|mask|>ab"
    assert tokenizer.token_to_id("<|mask|>") == n + 26 and tokenizer.id_to_token(n + 26) == "<|mask|>"
    far = build(tmp_path, mask_token_id=n + 100)
    assert far.mask_id == n + 100 and far.get_vocab_size() == n + 101


def test_mask_collision_is_refused_with_the_nearest_free_id(tmp_path):
    n = write_ranks(tmp_path / "qwen.tiktoken")
    taken = n + 22
    message = rf"mask_token_id {taken} already stands for '<tool_response>'.*nearest free id is {n + 26}"
    with pytest.raises(UserError, match=message):
        build(tmp_path, mask_token_id=taken)
    assert build(tmp_path, mask_token_id=taken, allow_mask_collision="allow").mask_id == taken
    assert build(tmp_path, mask_token_id=taken, tiktoken_layout="qwen2_5").mask_id == taken
    with pytest.raises(UserError, match="stands for 'ab'"):
        build(tmp_path, mask_token_id=256)
    with pytest.raises(UserError, match="an id is 0 or more"):
        build(tmp_path, mask_token_id=-1)


def test_mask_that_the_tokenizer_has(tmp_path):
    folder = write_hf(tmp_path, extra=["<|mdm_mask|>", "<|reserved_3|>", "<|other|>"])
    assert build(folder).mask_id is None
    assert build(folder, mask_token="<|mdm_mask|>").mask_id == 258
    assert build(folder, mask_token_id=258).mask_token == "<|mdm_mask|>"
    assert build(folder, mask_token_id=259).mask_id == 259
    assert build(folder, mask_token_id=259).get_vocab_size() == 261
    with pytest.raises(UserError, match="nearest free id is 261"):
        build(folder, mask_token_id=260)
    with pytest.raises(UserError, match=r"has id 258 .* but tokenizer\.mask_token_id is 300"):
        build(folder, mask_token="<|mdm_mask|>", mask_token_id=300)
    assert build("", mask_token="<|mask|>").mask_id == 259


def test_bulk_encoding_agrees_with_single(tmp_path):
    tokenizer = build(write_hf(tmp_path, config={"bos_token": "<s>", "eos_token": "</s>"}))
    texts = ["hello there", "", "✓ hell"]
    for text, array in zip(texts, tokenizer.encode_documents(texts, add_bos=True, add_eos=True), strict=True):
        assert array.dtype == np.int64
        assert array.tolist() == tokenizer.encode(text, add_bos=True, add_eos=True)
