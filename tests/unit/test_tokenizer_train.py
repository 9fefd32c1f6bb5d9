"""tools/train_tokenizer.py: same files each time, a folder that loads, and clear errors."""

from __future__ import annotations

import pytest

from tests.unit.test_data_common import loader, write_jsonl
from tools.train_tokenizer import SPECIALS, main
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.errors import UserError


@pytest.fixture
def data(tmp_path):
    texts = ["the cat sat on the mat", "the dog sat on the log", "ein Zoë-Café ✓"] * 5
    return str(write_jsonl(tmp_path / "d.jsonl", [{"text": t} for t in texts]))


def train(data: str, out, *more: str) -> int:
    return main(
        ["--dataset", "text", "--dataset_path", data, "--vocab_size", "285", "--out", str(out), *more]
    )


def test_deterministic_and_usable(data, tmp_path):
    assert train(data, tmp_path / "a") == train(data, tmp_path / "b") == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    tokenizer = Tokenizer.Config().build(tokenizer_path=str(tmp_path / "a"))
    assert tokenizer.kind == "hf" and tokenizer.get_vocab_size() == 285
    for text in ("the cat", "ünknown ✓ 漢字\n\t x"):
        assert tokenizer.decode(tokenizer.encode(text, add_bos=True, add_eos=True)) == text
    assert len(tokenizer.encode("the cat sat")) <= 6
    assert None not in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.mask_id)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(chat)
    assert ids.count(tokenizer.token_to_id("<|im_start|>")) == 2
    setup = DataLoader.Config(dataset="text", dataset_path=data, prefetch=0)
    inputs, _ = next(iter(loader(setup, tokenizer=tokenizer, seq_len=8)))
    assert inputs["input"].max() < 285


def test_transformers_reads_the_folder(data, tmp_path):
    transformers = pytest.importorskip("transformers")
    train(data, tmp_path / "a")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "a"))
    ours = Tokenizer.Config().build(tokenizer_path=str(tmp_path / "a"))
    text = "the dog <|im_end|> Zoë"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    # As documents in training start, by default.
    assert ours.wants_bos and theirs(text).input_ids == ours.encode(text, add_bos=True)
    assert (theirs.bos_token_id, theirs.pad_token_id, theirs.mask_token_id) == (
        ours.bos_id,
        ours.pad_id,
        ours.mask_id,
    )
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert theirs.apply_chat_template(talk, tokenize=False) == ours.apply_chat_template(talk)


def test_chat_data_and_a_limit(tmp_path, capsys):
    data = str(write_jsonl(tmp_path / "d.jsonl", [{"question": "aaaa", "answer": "bbbb"}] * 9))
    argv = ["--dataset", "chat", "--dataset_path", data, "--vocab_size", "4000", "--max_documents", "3"]
    main([*argv, "--out", str(tmp_path / "a")])
    assert "of the 4000 tokens asked for" in capsys.readouterr().out


def test_errors(data, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        train(data, tmp_path / "there")
    with pytest.raises(UserError, match=f"expected {256 + len(SPECIALS)}"):
        train(data, tmp_path / "a", "--vocab_size", "100")
    with pytest.raises(UserError, match="must be 1 or more"):
        train(data, tmp_path / "a", "--min_frequency", "0")
    with pytest.raises(UserError, match="did you mean 'text'"):
        main(["--dataset", "texd", "--out", str(tmp_path / "a")])
    empty = str(write_jsonl(tmp_path / "e.jsonl", [{"text": ""}]))
    with pytest.raises(UserError, match="no text to train on"):
        train(empty, tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="a was not written: .*Not a directory"):
        train(data, tmp_path / "file" / "a")
    assert not (tmp_path / "a").exists() and not list(tmp_path.glob("*.partial*"))
