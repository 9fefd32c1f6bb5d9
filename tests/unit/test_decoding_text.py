"""Streamed text: whole characters, nothing of a stop string, and in the end the whole text."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.decoding import TextStream

BYTES = Tokenizer.Config(kind="byte").build()


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    out = []
    for token in ids:
        out.append(stream.push(token))
        if stream.stopped:
            break
    return [*out, stream.flush()]


@settings(deadline=None, max_examples=80)
@given(st.text(max_size=30))
@example("naïve €5 𝄞 日本語 👩‍👩‍👧")
def test_no_piece_holds_a_broken_character(text):
    text = text.replace("\ufffd", "")
    stream = TextStream(BYTES)
    got = pieces(stream, list(text.encode("utf-8", errors="ignore")))
    want = text.encode("utf-8", errors="ignore").decode()
    assert "".join(got) == want == stream.text
    assert all("\ufffd" not in piece for piece in got)


def test_each_character_comes_with_its_last_byte():
    assert pieces(TextStream(BYTES), list("é€".encode())) == ["", "é", "", "", "€", ""]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 263), max_size=30))
@example([0xE2, 0x82, 0x41, 0xFF, 0xF0, 0x9F])
def test_invalid_bytes_neither_stall_nor_change_the_text(ids):
    stream = TextStream(BYTES)
    got = pieces(stream, ids)
    assert "".join(got) == BYTES.decode(ids)
    # At most three bytes wait.
    late = "".join(got[:-1])
    assert len(BYTES.decode(ids)) - len(late) <= 3


def test_a_stop_string_is_cut_off_and_its_beginning_is_never_shown():
    stream = TextStream(BYTES, ["\nUser:", "END"])
    got = pieces(stream, list(b"ok\nUsual E\nUser: no"))
    assert "".join(got) == stream.text == "ok\nUsual E"
    assert stream.stopped
    assert got[:7] == ["o", "k", "", "", "", "\nUsu", "a"]


def test_a_beginning_of_a_stop_string_is_given_at_the_end():
    stream = TextStream(BYTES, ["STOP"])
    assert "".join(pieces(stream, list(b"xSTO"))) == "xSTO"
    assert not stream.stopped


@settings(deadline=None, max_examples=80)
@given(text=st.text("ab€", max_size=20), stops=st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_where_a_stop_string_first_completes(text, stops):
    stream = TextStream(BYTES, stops)
    got = "".join(pieces(stream, list(text.encode())))
    ends = {s: text.find(s) + len(s) for s in stops if s in text}
    if not ends:
        assert got == text and not stream.stopped
        return
    first = min(ends.values())
    want = min(text.find(s) for s, end in ends.items() if end == first)
    assert stream.stopped and got == text[:want] == stream.text


def test_special_tokens_have_no_text():
    stream = TextStream(BYTES)
    assert pieces(stream, [104, BYTES.eos_id]) == ["h", "", ""]


@settings(deadline=None, max_examples=80)
@given(
    parts=st.lists(st.sampled_from(["a", "€", "\n", "<|eos|>", "<|mask|>"]), max_size=12),
    stops=st.lists(
        st.sampled_from(["<|eos|>", "a<|mask|>", "\n<|eos|>\n", "<|bos|>", "a\n", "|>"]), max_size=3
    ),
)
@example(parts=["a", "\n", "<|eos|>", "a"], stops=["\n<|eos|>\n", "<|eos|>"])
def test_a_stop_string_may_hold_special_tokens(parts, stops):
    """It ends the text where it is in the text with special tokens, which is told without them."""
    special = [s for s in stops if "<|" in s]
    ids, want = [], None
    for token in BYTES.encode("".join(parts)):
        ids.append(token)
        shown, text = BYTES.decode(ids, skip_special_tokens=False), BYTES.decode(ids)
        ends = [text[: text.find(s)] for s in stops if s in text]
        ends += [BYTES.decode(BYTES.encode(shown[: shown.find(s)])) for s in special if s in shown]
        if ends:
            want = min(ends, key=len)
            break
    stream = TextStream(BYTES, stops)
    got = "".join(pieces(stream, BYTES.encode("".join(parts))))
    assert stream.stopped == (want is not None)
    assert got == stream.text == (BYTES.decode(ids) if want is None else want)
