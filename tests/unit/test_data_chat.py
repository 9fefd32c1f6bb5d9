"""Chat: only what the assistant writes is a target, in every turn and under every kind of template."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_data_common import (
    IGNORE,
    batch_rows,
    byte_tokenizer,
    documents_of,
    finite_rows,
    loader,
    write_jsonl,
)
from torchtitan_ext.data import chat_templates
from torchtitan_ext.data.chat import assistant_spans, encode_conversation, render, render_open, turn_end_id
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.processors import PROCESSORS, Completion, register_processor, resolve_processor
from torchtitan_ext.errors import UserError

# Writes an empty thought before the last answer only, as reasoning models' templates do.
THINKING = (
    "{% for m in messages %}{{ '[' + m.role + ']\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
    "{{ '[end]\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
# No generation prompt at all: the prompt itself ends with a marker.
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
UNUSABLE = "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
]


def tokenizer_with(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.set_chat_template(template)
    return tokenizer


def learned(tokenizer, document) -> list[str]:
    """The runs of targets as text, specials shown."""
    runs, current = [], []
    for label in [*document.labels.tolist(), IGNORE]:
        if label != IGNORE:
            current.append(label)
        elif current:
            runs.append(tokenizer.decode(current, skip_special_tokens=False))
            current = []
    return runs


@pytest.mark.parametrize(
    ("template", "runs"),
    [
        (chat_templates.DEFAULT, ["hello<|eos|>", "bye<|eos|>"]),
        (chat_templates.CHATML, ["hello<|im_end|>", "bye<|im_end|>", "<|eos|>"]),
        (chat_templates.LLAMA3, ["hello<|eot_id|>", "bye<|eot_id|><|eos|>"]),
        (THINKING, ["hello[end]", "<think>\n\n</think>\n\nbye[end]", "<|eos|>"]),
        (INSTRUCT, [" hello<|eos|>", " bye<|eos|>"]),
    ],
)
def test_all_assistant_turns_are_targets_and_nothing_else(template, runs):
    tokenizer = tokenizer_with(template)
    document = encode_conversation(tokenizer, TALK)
    assert document is not None
    assert learned(tokenizer, document) == runs
    text = render(tokenizer, TALK)
    shown = tokenizer.decode(document.tokens, skip_special_tokens=False)
    assert shown.removesuffix("<|eos|>").strip() == text.removesuffix("<|eos|>").strip()
    kept = document.labels[:-1] != IGNORE
    assert (document.labels[:-1][kept] == document.tokens[1:][kept]).all() and document.labels[-1] == IGNORE


def test_prompt_ids_are_those_of_generation():
    tokenizer = byte_tokenizer()
    document = encode_conversation(tokenizer, TALK[:3])
    prompt = tokenizer.encode(tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True))
    assert document is not None
    assert document.tokens[: len(prompt)].tolist() == prompt
    first = int((document.labels != IGNORE).argmax())
    assert first == len(prompt) - 1


contents = st.text(alphabet="ab \n<|>", max_size=8) | st.sampled_from(["|>", "_end|>", "<|im_end|>", "eos"])


@settings(deadline=None, max_examples=60)
@given(
    turns=st.lists(st.tuples(contents, contents), min_size=1, max_size=4),
    template=st.sampled_from([chat_templates.DEFAULT, chat_templates.CHATML, INSTRUCT]),
)
def test_spans_hold_every_answer_and_end_with_its_marker(turns, template):
    tokenizer = tokenizer_with(template)
    talk = []
    for user, assistant in turns:
        talk += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    text = render(tokenizer, talk)
    spans = assistant_spans(tokenizer, talk, text)
    assert len(spans) == len(turns)
    for span, (_, assistant) in zip(spans, turns, strict=True):
        marker = "<|im_end|>" if template == chat_templates.CHATML else "<|eos|>"
        assert assistant + marker in text[span.start : span.stop]
        assert text[span.start : span.stop].endswith(marker)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(spans))


def test_an_answer_that_the_template_rewrites_ends_with_its_marker_too():
    tokenizer = tokenizer_with(
        chat_templates.CHATML.replace("message['content']", "message['content'] | upper")
    )
    document = encode_conversation(tokenizer, TALK)
    assert document is not None
    assert learned(tokenizer, document) == ["HELLO<|im_end|>", "BYE<|im_end|>", "<|eos|>"]


CALLING = chat_templates.CHATML.replace(
    "+ '<|im_end|>", "}}{% for c in message.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ '<|im_end|>"
)


@pytest.mark.parametrize(
    "left, right", [("{% ", " %}"), ("{%- ", " -%}"), ("{%", "%}\n"), ("\n  {%- ", "-%}  ")]
)
def test_a_template_that_marks_what_the_assistant_writes(left, right):
    """transformers' tag, in its text and in what is a target."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = (
        "{% for m in messages %}{{ '[' + m.role + ']\n' }}{% if m.role == 'assistant' %}"
        f"{left}generation{right}{{{{ m.content + eos_token }}}}{left}endgeneration{right}"
        "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
    )
    tokenizer = tokenizer_with(template)
    texts, marked = utils.render_jinja_template([TALK], chat_template=template, eos_token="<|eos|>",
                                                return_assistant_tokens_mask=True)  # fmt: skip
    text = render(tokenizer, TALK)
    assert text == texts[0]
    spans = [text[span.start : span.stop].strip() for span in assistant_spans(tokenizer, TALK, text)]
    assert spans == [text[start:stop].strip() for start, stop in marked[0]] == ["hello<|eos|>", "bye<|eos|>"]


def test_a_broken_template_is_an_error_where_it_is_used():
    tokenizer = tokenizer_with("{% for m in messages %}\n{% whatever %}{% endfor %}")
    assert tokenizer.decode(tokenizer.encode("text")) == "text"
    with pytest.raises(UserError, match=r"^byte: the chat template cannot be read \(line 2: .*whatever"):
        encode_conversation(tokenizer, TALK)
    assert turn_end_id(tokenizer) is None
    # The last one set counts.
    tokenizer.set_chat_template(chat_templates.DEFAULT)
    assert encode_conversation(tokenizer, TALK) is not None
    strict = tokenizer_with("{% for name, value in messages[0].content | items %}{{ name }}{% endfor %}")
    with pytest.raises(UserError, match="refuses a conversation: Can only get item pairs"):
        encode_conversation(strict, TALK)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_turn_that_calls_a_tool_needs_no_content(content):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turn = {"role": "assistant", **content, "tool_calls": [call]}
    talk = PROCESSORS["messages"]({"messages": [TALK[1], turn, {"role": "tool", "content": "2"}, TALK[4]]})
    tokenizer = tokenizer_with(CALLING)
    document = encode_conversation(tokenizer, talk)
    assert document is not None
    assert learned(tokenizer, document)[:2] == [json.dumps(call) + "<|im_end|>", "bye<|im_end|>"]
    # Without the call in the text the model would learn to say nothing.
    with pytest.raises(UserError, match=r"leaves out tool_calls \(message 1 calls 'add'\)"):
        encode_conversation(tokenizer_with(chat_templates.CHATML), talk)


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_record_reach_the_template(as_text, tmp_path):
    """As the prompt of the answer has them; in every rendering by which the turns are found."""
    listing = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": "<int>"}}}]
    record = {"messages": TALK, "tools": json.dumps(tools) if as_text else tools}
    tokenizer = tokenizer_with(listing + chat_templates.DEFAULT)
    data = write_jsonl(tmp_path / "d.jsonl", [record])
    (batch,) = loader(chat(data), tokenizer=tokenizer, seq_len=512)
    document, plain = batch_rows(batch)[0], encode_conversation(tokenizer, TALK)
    before = tokenizer.encode(json.dumps(tools[0]) + "\n")
    assert plain is not None and document[0][: len(before)] == before
    assert document[0][len(before) : len(before) + len(plain.tokens)] == plain.tokens.tolist()
    assert [x for x in document[2] if x != IGNORE] == plain.labels[plain.labels != IGNORE].tolist()
    with pytest.raises(UserError, match=r"leaves out tools \(one is 'add'\)"):
        loader(chat(data))


def test_a_talk_that_ends_with_the_user():
    tokenizer = byte_tokenizer()
    document = encode_conversation(tokenizer, TALK[:4])
    assert document is not None and learned(tokenizer, document) == ["hello<|eos|>"]


def test_eos_is_added_although_the_user_wrote_one():
    tokenizer = tokenizer_with(chat_templates.CHATML)
    talk = [{"role": "user", "content": "a<|eos|>b"}, {"role": "assistant", "content": "c"}]
    document = encode_conversation(tokenizer, talk)
    assert document is not None and learned(tokenizer, document) == ["c<|im_end|>", "<|eos|>"]


def test_no_answer_no_document():
    assert encode_conversation(byte_tokenizer(), TALK[:2]) is None
    assert encode_conversation(byte_tokenizer(), Completion("a", "")) is None


def test_unusable_template_and_refusing_template():
    with pytest.raises(UserError, match="no way to find the assistant"):
        encode_conversation(tokenizer_with(UNUSABLE), TALK)
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        encode_conversation(tokenizer_with(refusing), TALK)


STRIPPED = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"


@pytest.mark.parametrize("template", [chat_templates.CHATML, chat_templates.LLAMA3, INSTRUCT, STRIPPED])
@pytest.mark.parametrize("begun", ["```python\n", "Answer: ", "The [answer]"])
def test_an_open_end_is_the_last_message_without_what_follows(template, begun):
    """As transformers has it with continue_final_message."""
    theirs = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    talk = [*TALK[:-1], {"role": "assistant", "content": begun}]
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (wanted,), _ = theirs([talk], chat_template=template, continue_final_message=True, **special)
    assert render_open(tokenizer_with(template), talk) == wanted
    assert wanted.rstrip().endswith(begun.rstrip())


def test_an_open_end_needs_the_last_message():
    with pytest.raises(UserError, match="leaves out the last message"):
        render_open(tokenizer_with("{{ messages[0].content }}"), TALK)


def test_completion_without_template():
    tokenizer = byte_tokenizer()
    document = encode_conversation(tokenizer, Completion("2+2=", "4"))
    assert document is not None
    assert tokenizer.decode(document.tokens, skip_special_tokens=False) == "<|bos|>2+2=4<|eos|>"
    assert learned(tokenizer, document) == ["4<|eos|>"]


RECORDS = {
    "messages": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "gsm8k": {"question": "q", "answer": "a"},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
}


@pytest.mark.parametrize("name", RECORDS)
def test_processors_and_their_automatic_choice(name):
    record = RECORDS[name]
    assert resolve_processor("auto", set(record), where="x") is PROCESSORS[name]
    assert PROCESSORS[name](record) == RECORDS["messages"]["messages"]


def test_processor_details():
    alpaca = PROCESSORS["alpaca"]({"instruction": "add", "input": "1 2", "output": "3"})
    assert alpaca[0]["content"] == "add\n\n1 2"
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert PROCESSORS["messages"]({"messages": [parts]})[0]["content"] == "ab"
    lists = PROCESSORS["prompt_completion"]({"prompt": TALK[:2], "completion": TALK[2:3]})
    assert [m["content"] for m in lists] == ["be brief", "hi", "hello"]
    register_processor("messages", PROCESSORS["messages"])
    with pytest.raises(ValueError, match="registered already"):
        register_processor("messages", PROCESSORS["gsm8k"])


def chat(path, **kwargs) -> DataLoader.Config:
    kwargs = {"infinite": False, "shuffle": "none", "prefetch": 0, **kwargs}
    return DataLoader.Config(dataset="chat", dataset_path=str(path), **kwargs)


def test_loader_keeps_conversations_whole(tmp_path):
    records = [{"question": f"q{i}", "answer": "a" * (i + 1)} for i in range(12)]
    data = write_jsonl(tmp_path / "d.jsonl", records)
    rows = finite_rows(chat(data), seq_len=64)
    tokenizer = byte_tokenizer()
    answers = [tokenizer.decode([x for x in row[2] if x != IGNORE]) for row in rows]
    assert "".join(answers) == "".join(r["answer"] for r in records)
    for tokens, positions, _ in rows:
        for i, p in enumerate(positions):
            # Every document starts with the user's marker or is padding.
            assert p > 0 or tokens[i] in (ord("<"), tokenizer.pad_id)


@settings(deadline=None, max_examples=25)
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=14), seq_len=st.integers(64, 130))
def test_conversations_are_packed_and_those_that_do_not_fit_are_counted(tmp_path_factory, sizes, seq_len):
    """Supervised fine-tuning on packed rows: answers whole, apart by their positions, none cut."""
    records = [{"question": "q", "answer": "a"}, *({"question": "q", "answer": "b" * n} for n in sizes)]
    data = write_jsonl(tmp_path_factory.mktemp("chat") / "d.jsonl", records)
    one = loader(chat(data, long_documents="drop"), seq_len=seq_len)
    rows = [row for batch in one for row in batch_rows(batch)]
    tokenizer = byte_tokenizer()
    lengths = [
        len(d.tokens) for r in records if (d := encode_conversation(tokenizer, PROCESSORS["gsm8k"](r)))
    ]
    fit = [r["answer"] for r, n in zip(records, lengths, strict=True) if n <= seq_len]
    documents = [(t, [x for x in lab if x != IGNORE]) for t, lab in documents_of(rows)]
    # Every answer is the target of one run of positions 0, 1, 2, ..., and EOS.
    targets = [tokenizer.decode(lab) for _, lab in documents if lab]
    assert targets == fit
    counts = one.counters()
    assert counts["dropped"] == len(records) - len(fit) and counts["split"] == 0
    assert counts["documents"] == len(fit)
    # Greedy: a row is left only when the next conversation does not fit into what remains.
    assert len(rows) == greedy_rows([n for n in lengths if n <= seq_len], seq_len)


def greedy_rows(lengths: list[int], seq_len: int) -> int:
    rows, left = 0, 0
    for n in lengths:
        rows, left = (rows, left - n) if n <= left else (rows + 1, seq_len - n)
    return rows


def test_a_run_does_not_go_on_under_another_chat_template(tmp_path):
    """Its rows would hold other text; a checkpoint of an earlier version does not say."""
    data = write_jsonl(tmp_path / "d.jsonl", [{"messages": TALK}] * 4)
    state = loader(chat(data)).state_dict()
    loader(chat(data)).load_state_dict(state)
    other = loader(chat(data), tokenizer=tokenizer_with(chat_templates.CHATML))
    with pytest.raises(UserError, match=r"cannot be resumed: sources\[0\].template: '.*' in the checkpoint"):
        other.load_state_dict(state)
    older = json.loads(state["fingerprint"])
    del older["sources"][0]["template"]
    other.load_state_dict({**state, "fingerprint": json.dumps(older)})


@pytest.mark.parametrize("ordering", ["none", "full"])
def test_records_that_do_not_fit_are_broken_ones(ordering, tmp_path, caplog):
    """Far behind the first ones, which are checked at the start, they would end a run in its midst."""
    good = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{i}"}]}
        for i in range(20)
    ]
    bad = [{"foo": 1}, {"messages": []}, {"messages": [{"role": "user"}]}]
    data = write_jsonl(tmp_path / "d.jsonl", [*good[:10], bad[0], *good[10:], *bad[1:]])
    setup = chat(data, shuffle=ordering)
    with pytest.raises(UserError, match="no processor fits|at least one message|has no 'role'"):
        finite_rows(setup, seq_len=64)
    kept = chat(data, shuffle=ordering, broken_lines="skip")
    one = loader(kept, seq_len=64)
    rows = [row for batch in one for row in batch_rows(batch)]
    plain = write_jsonl(tmp_path / "good.jsonl", good)
    if ordering == "none":
        assert rows == finite_rows(chat(plain, shuffle=ordering), seq_len=64)
    assert one.counters()["broken"] == 3 and one.counters()["documents"] == 20
    assert sum("left out, as others of its kind" in r.getMessage() for r in caplog.records) == 1


def test_conversations_without_an_answer_are_left_out_and_said_so_once(tmp_path, caplog):
    """Another name for the role would leave out everything."""
    turns = [{"role": "user", "content": "q"}, {"role": "model", "content": "a"}]
    data = write_jsonl(tmp_path / "d.jsonl", [{"messages": turns}] * 3)
    with caplog.at_level("WARNING"):
        assert finite_rows(chat(data), seq_len=64) == []
    said = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert said == [
        "dataloader (chat): conversations without a message of the role 'assistant' (one has user, model) "
        "are left out"
    ]


@pytest.mark.parametrize(
    ("record", "kwargs", "message"),
    [
        ({"a": 1}, {}, r"^dataloader \(chat\): processor = 'auto': no processor fits the fields a"),
        ({"question": "q"}, {"processor": "gsm8k"}, "no field 'answer'"),
        ({"question": 3, "answer": "a"}, {}, "question is int, expected text"),
        ({"messages": []}, {}, "expected a list with at least one message"),
        ({"messages": TALK, "tools": "[{"}, {}, "tools is not JSON"),
        ({"messages": TALK, "tools": {"name": "f"}}, {}, "tools is dict, expected a list"),
        ({"messages": [{"role": "user"}]}, {}, "message 0 has no 'role' and 'content'"),
        ({"question": "q", "answer": "a"}, {"processor": "gsm8"}, "did you mean 'gsm8k'"),
    ],
)
def test_wrong_records_are_refused_at_construction(tmp_path, record, kwargs, message):
    data = write_jsonl(tmp_path / "d.jsonl", [record])
    with pytest.raises(UserError, match=message):
        loader(chat(data, **kwargs))


def test_chat_needs_a_path_and_text_is_no_chat(tmp_path):
    with pytest.raises(UserError, match="needs dataset_path"):
        loader(DataLoader.Config(dataset="chat"))
    (tmp_path / "d.txt").write_text("hello")
    with pytest.raises(UserError, match="needs fields, got str"):
        loader(chat(tmp_path / "d.txt"))
