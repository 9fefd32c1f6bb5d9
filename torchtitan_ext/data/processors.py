"""Records to conversations, by name.

A processor returns messages (``role``, ``content``), which the chat template
renders, or a :class:`Completion`, whose two texts are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torchtitan_ext.errors import UserError, unknown


class Completion(NamedTuple):
    """A prompt and its continuation, without a template."""

    prompt: str
    completion: str


Messages = list[dict[str, str]]
Processor = Callable[[dict[str, Any]], "Messages | Completion"]


def _get(record: dict[str, Any], field: str) -> Any:
    if field not in record:
        raise UserError(f"no field {field!r} (fields: {', '.join(sorted(record))})")
    return record[field]


def _text(value: Any, what: str) -> str:
    """Text, also from a list of ``{"type": "text", "text": ...}`` parts."""
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "".join(p["text"] for p in value)
    if not isinstance(value, str):
        raise UserError(f"{what} is {type(value).__name__}, expected text")
    return value


def check_messages(value: Any) -> Messages:
    """A list of messages with a role and a text. Errors: UserError that names the message."""
    if not isinstance(value, list) or not value:
        raise UserError(f"messages is {type(value).__name__}, expected a list with at least one message")
    return [_message(message, i) for i, message in enumerate(value)]


def _message(value: Any, i: int) -> dict[str, str]:
    """Message ``i``; one that calls a tool may have no content, or null."""
    if isinstance(value, dict) and value.get("tool_calls") and value.get("content") is None:
        value = {**value, "content": ""}
    if not isinstance(value, dict) or "role" not in value or "content" not in value:
        raise UserError(f"message {i} has no 'role' and 'content': {str(value)[:80]!r}")
    role = _text(value["role"], f"role of message {i}")
    return {**value, "role": role, "content": _text(value["content"], f"message {i}")}


def messages(record: dict[str, Any]) -> Messages:
    """``messages``: a list of ``{"role", "content"}``."""
    return check_messages(_get(record, "messages"))


def sharegpt(record: dict[str, Any]) -> Messages:
    """``conversations``: a list of ``{"from", "value"}``."""
    roles = {
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "assistant": "assistant",
        "system": "system",
    }
    turns = _get(record, "conversations")
    if not isinstance(turns, list):
        raise UserError(f"conversations is {type(turns).__name__}, expected a list")
    for turn in turns:
        if not isinstance(turn, dict) or turn.get("from") not in roles:
            raise UserError(
                f"a turn must have 'from' (one of {', '.join(roles)}) and 'value': {str(turn)[:80]!r}"
            )
    return check_messages([{"role": roles[t["from"]], "content": t.get("value")} for t in turns])


def prompt_completion(record: dict[str, Any]) -> Messages:
    """``prompt`` and ``completion``: texts of a user and an assistant turn, or lists of messages."""
    prompt, completion = _get(record, "prompt"), _get(record, "completion")
    first = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    second = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    return check_messages([*first, *second])


def completion(record: dict[str, Any]) -> Completion:
    """``prompt`` and ``completion`` joined as they are, without a chat template."""
    return Completion(
        _text(_get(record, "prompt"), "prompt"), _text(_get(record, "completion"), "completion")
    )


def gsm8k(record: dict[str, Any]) -> Messages:
    """``question`` and ``answer``."""
    return _pair(_text(_get(record, "question"), "question"), _text(_get(record, "answer"), "answer"))


def alpaca(record: dict[str, Any]) -> Messages:
    """``instruction``, optional ``input``, and ``output``."""
    instruction = _text(_get(record, "instruction"), "instruction")
    extra = _text(record.get("input") or "", "input")
    return _pair(
        f"{instruction}\n\n{extra}" if extra else instruction, _text(_get(record, "output"), "output")
    )


def _pair(user: str, assistant: str) -> Messages:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


PROCESSORS: dict[str, Processor] = {
    "messages": messages,
    "sharegpt": sharegpt,
    "prompt_completion": prompt_completion,
    "completion": completion,
    "gsm8k": gsm8k,
    "alpaca": alpaca,
}
_SIGNS = {
    "messages": {"messages"},
    "sharegpt": {"conversations"},
    "prompt_completion": {"prompt", "completion"},
    "gsm8k": {"question", "answer"},
    "alpaca": {"instruction", "output"},
}


def register_processor(name: str, processor: Processor) -> None:
    """Add a processor; a name that is taken by another is an error."""
    if PROCESSORS.get(name, processor) is not processor:
        raise ValueError(f"processor {name!r} is registered already")
    PROCESSORS[name] = processor


def check_processor(name: str) -> None:
    """Errors: UserError for a name that is neither ``auto`` nor in the registry."""
    if name != "auto" and name not in PROCESSORS:
        raise unknown("processor (dataloader.processor)", name, [*PROCESSORS, "auto"])


def resolve_processor(name: str, fields: set[str], *, where: str) -> Processor:
    """The processor of a name; ``auto`` takes the one whose fields a record has."""
    check_processor(name)
    if name == "auto":
        found = next((n for n, signs in _SIGNS.items() if signs <= fields), None)
        if found is None:
            raise UserError(
                f"{where}: no processor fits the fields {', '.join(sorted(fields))}; "
                f"set processor (allowed: {', '.join(sorted(PROCESSORS))})"
            )
        name = found
    return PROCESSORS[name]
