"""Conversations to documents in which only what the assistant writes is a target.

The rendered text is cut where an assistant turn begins and ends, and each part
is encoded on its own: so the prompt's ids are exactly those that a model is
given when it is asked to answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from torchtitan.tools.logging import logger

from torchtitan_ext.data.packing import Document, next_token_document
from torchtitan_ext.data.processors import Completion, Messages, Processor
from torchtitan_ext.data.sources import Record
from torchtitan_ext.errors import UserError

ASSISTANT = "assistant"
_PROBE = "zqxprobexqz"
_ASKED = [{"role": "user", "content": "x"}]


class Span(NamedTuple):
    """Characters [start, stop) of the rendered text that the assistant writes."""

    start: int
    stop: int


Tools = list[Any]
"""Descriptions of what the assistant may call, as the template takes them."""


def render(tokenizer: Any, messages: Messages, *, prompt: bool = False, tools: Tools | None = None) -> str:
    """The conversation as text; ``prompt`` ends it where the assistant begins.

    Errors: UserError with the template's own reason, or for one that cannot be read.
    """
    try:
        more = {"tools": tools} if tools else {}
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, **more)
    # A template's own expressions raise TypeError, such as a filter for mappings on a text.
    except (jinja2.TemplateError, TypeError) as error:
        raise UserError(f"the chat template refuses a conversation: {error}") from error


def render_open(tokenizer: Any, messages: Messages) -> str:
    """The conversation as text that ends within its last message, which a model is to go on with.

    Errors: UserError with the template's own reason, or if the last message is not in the text.
    """
    *before, last = messages
    text = render(tokenizer, [*before, {**last, "content": f"{last['content']}{_PROBE} "}])
    begun, probe, rest = text.rpartition(_PROBE)
    if not probe:
        raise UserError("the chat template leaves out the last message, so that nothing can go on with it")
    # A template that strips messages would strip this one too.
    return begun if rest.startswith(" ") else begun.rstrip()


def assistant_spans(
    tokenizer: Any, messages: Messages, text: str, *, tools: Tools | None = None
) -> list[Span]:
    """Where each assistant turn begins and ends in ``text``, its end marker included.

    First by rendering the conversation up to each turn. A template whose
    rendering of a turn depends on what follows (Qwen3's, which leaves out
    earlier reasoning) fails that; then by the template's own markers.

    Errors: UserError when neither finds every turn.
    """
    turns = [k for k, message in enumerate(messages) if message["role"] == ASSISTANT]
    spans = _spans_by_prefix(tokenizer, messages, text, turns, tools=tools)
    return spans if spans is not None else _spans_by_marker(tokenizer, messages, text, turns)


def _spans_by_prefix(
    tokenizer: Any, messages: Messages, text: str, turns: list[int], *, tools: Tools | None
) -> list[Span] | None:
    spans = []
    for k in turns:
        if k == 0:
            # Many templates refuse an empty conversation.
            return None
        before = render(tokenizer, messages[:k], prompt=True, tools=tools)
        upto = text if k == len(messages) - 1 else render(tokenizer, messages[: k + 1], tools=tools)
        if not (text.startswith(upto) and upto.startswith(before)):
            return None
        stop = _without_blank_end(text, len(before), len(upto), messages[k]["content"])
        spans.append(Span(len(before), stop))
    return spans


def _without_blank_end(text: str, start: int, stop: int, content: str) -> int:
    """Leave out blanks after the end marker: generation stops at the marker."""
    answer = content.strip()
    # The first place: an answer such as ">" stands in the marker too. A rewritten one stands nowhere.
    at = text.find(answer, start, stop)
    tail = text[at + len(answer) : stop] if at >= 0 else text[start:stop]
    return stop - (len(tail) - len(tail.rstrip())) if tail.strip() else stop


def _closing(tokenizer: Any) -> str:
    """What the template writes behind an answer, without blanks around it."""
    answered = render(tokenizer, [*_ASKED, {"role": ASSISTANT, "content": _PROBE}])
    return answered.partition(_PROBE)[2].strip()


def turn_end_id(tokenizer: Any) -> int | None:
    """The special token with which the template ends an answer; often another one than EOS.

    It is a target, and blanks behind it are not, so an answer must end there. None: a template that
    ends an answer with plain text or nothing, or refuses a conversation of two turns.
    """
    try:
        ids = tokenizer.encode(_closing(tokenizer))
    except UserError:
        return None
    return ids[0] if ids and ids[0] in tokenizer.special_ids else None


def _spans_by_marker(tokenizer: Any, messages: Messages, text: str, turns: list[int]) -> list[Span]:
    asked, begun = render(tokenizer, _ASKED), render(tokenizer, _ASKED, prompt=True)
    opening = begun[len(asked) :] if begun.startswith(asked) else ""
    closing = _closing(tokenizer)
    spans: list[Span] = []
    if opening and closing:
        at = text.find(opening)
        while at >= 0:
            start = at + len(opening)
            end = text.find(closing, start)
            stop = end + len(closing) if end >= 0 else len(text)
            spans.append(Span(start, stop))
            at = text.find(opening, stop)
    answers = [messages[k]["content"].rpartition("</think>")[2].strip() for k in turns]
    if len(spans) != len(turns) or any(
        a not in text[s.start : s.stop] for a, s in zip(answers, spans, strict=True)
    ):
        raise UserError(
            "the chat template gives no way to find the assistant's turns: its text for a conversation does "
            "not begin with its text for the first turns, and its turn markers do not match the messages"
        )
    return spans


def encode_segments(tokenizer: Any, segments: Sequence[tuple[str, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of texts put together, and for each id whether its segment is a target; int64 and bool [T]."""
    ids = [
        np.asarray(tokenizer.encode(text, add_bos=False, add_eos=False), dtype=np.int64)
        for text, _ in segments
    ]
    flags = [np.full(len(part), learned) for part, (_, learned) in zip(ids, segments, strict=True)]
    return np.concatenate(ids), np.concatenate(flags).astype(bool)


def _cut(text: str, spans: list[Span]) -> list[tuple[str, bool]]:
    segments, at = [], 0
    for span in spans:
        segments += [(text[at : span.start], False), (text[span.start : span.stop], True)]
        at = span.stop
    return [(part, learned) for part, learned in [*segments, (text[at:], False)] if part]


def _name_of(described: Any) -> str:
    """The name in a tool's description or call, in OpenAI's layout or without its wrapping."""
    inner = described.get("function") or described if isinstance(described, dict) else {}
    return str(inner.get("name", "")) if isinstance(inner, dict) else ""


def _check_tools(messages: Messages, tools: Tools, text: str) -> None:
    """Errors: UserError for a template that leaves out tools, or calls, which would become silence."""
    for name in map(_name_of, tools):
        if name not in text:
            raise UserError(f"the chat template leaves out tools (one is {name!r})")
    for i, message in enumerate(messages):
        calls: Any = message.get("tool_calls") or []
        for name in map(_name_of, calls):
            if name not in text:
                raise UserError(f"the chat template leaves out tool_calls (message {i} calls {name!r})")


def tools_of(record: dict[str, Any]) -> Tools:
    """The field ``tools`` of a record: a list, or JSON text of one, as tables hold it; else empty."""
    value = record.get("tools") or []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"tools is not JSON ({error})") from error
    if not isinstance(value, list):
        raise UserError(f"tools is {type(value).__name__}, expected a list")
    return value


def encode_conversation(
    tokenizer: Any, conversation: Messages | Completion, *, tools: Tools | None = None
) -> Document | None:
    """A document of a conversation, or None when the assistant says nothing.

    EOS is added, as a target, where the template does not end the last answer with it.
    """
    if isinstance(conversation, Completion):
        segments = [
            (text, learned) for text, learned in zip(conversation, (False, True), strict=True) if text
        ]
        last_is_answer = bool(conversation.completion)
    else:
        text = render(tokenizer, conversation, tools=tools)
        _check_tools(conversation, tools or [], text)
        segments = _cut(text, assistant_spans(tokenizer, conversation, text, tools=tools))
        last_is_answer = conversation[-1]["role"] == ASSISTANT
    if not any(learned for _, learned in segments):
        return None
    ids, learned = encode_segments(tokenizer, segments)
    if isinstance(conversation, Completion) and getattr(tokenizer, "wants_bos", False):
        ids, learned = np.insert(ids, 0, tokenizer.bos_id), np.insert(learned, 0, False)
    eos_id = tokenizer.eos_id
    last_answer = int(np.flatnonzero(learned)[-1]) if learned.any() else 0
    if eos_id is not None and eos_id not in ids[last_answer:]:
        ids, learned = np.append(ids, eos_id), np.append(learned, last_is_answer)
    return next_token_document(ids, learned)


def check_tokenizer(tokenizer: Any, *, where: str) -> None:
    """Errors: UserError for a tokenizer that puts a blank before each part it encodes."""
    joined = tokenizer.decode([*tokenizer.encode("Hello"), *tokenizer.encode("there")])
    if joined != "Hellothere":
        raise UserError(f"{where}: the tokenizer does not keep parts of a text together (got {joined!r})")


def _without_answer(conversation: Messages | Completion) -> str:
    if isinstance(conversation, Completion):
        return "with an empty completion"
    roles = ", ".join(dict.fromkeys(message["role"] for message in conversation))
    return f"without a message of the role {ASSISTANT!r} (one has {roles})"


def chat_encoder(
    tokenizer: Any, *, choose: Callable[[set[str]], Processor], where: str
) -> Callable[[Sequence[Record]], list[Document | None]]:
    """An encoder of conversations; ``choose`` gives the processor for the fields of a record."""
    check_tokenizer(tokenizer, where=where)
    told = False

    def encode_one(record: Record) -> Document | None:
        nonlocal told
        if not isinstance(record, dict):
            raise UserError(f"{where}: a chat record needs fields, got {type(record).__name__}")
        try:
            conversation = choose(set(record))(record)
            document = encode_conversation(tokenizer, conversation, tools=tools_of(record))
        except UserError as error:
            raise UserError(f"{where}: {error} in the record {str(record)[:120]!r}") from error
        if document is None and not told:
            told = True
            logger.warning(f"{where}: conversations {_without_answer(conversation)} are left out")
        return document

    return lambda records: [encode_one(record) for record in records]
