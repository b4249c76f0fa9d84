"""The forms of records: what a JSON object of each form must hold, and the one thing it becomes.

A record becomes a text, a prompt with its completion, or a dialogue; nothing after this room knows more than these.
Files and places are in `files.py`, tokens in `tokens.py`.  What a record holds and this room does not understand is an
error when training without it would mean something else (weights of messages, thoughts beside the answer, pictures).

Its one trade-off: Alpaca records become dialogues for the model's chat template instead of the prompt text of the
original, because a model that is then used through its template should be trained through it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

Message = dict[str, Any]
"""`role` and `content`, and `tool_calls` where an assistant makes some."""
Tools = list[dict[str, Any]] | None

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}
"""What stands in `from`, and the role it means."""
FORM_OF_KEY = {
    "messages": "messages",
    "text": "text",
    "conversations": "sharegpt",
    "instruction": "alpaca",
    "prompt": "prompt_completion",
}
"""The key by which a record shows its form."""
FORMS = tuple(FORM_OF_KEY.values())
_CHANGES_MEANING = ("weight", "train", "loss", "reasoning_content", "thinking", "images", "audio", "function_call")
"""Keys of a message that other trainers act on: to leave them out in silence would train something else."""


class RecordError(ValueError):
    """One record cannot be trained on; who knows its place adds file and line."""


class SeveralForms(RecordError):
    """A record shows several forms: the user must say which is meant, skipping would not help."""


class Completion(NamedTuple):
    """A text of which only the second part is trained."""

    prompt: str
    completion: str


class Dialogue(NamedTuple):
    """Messages for a chat template, with the tools that it is told of."""

    messages: list[Message]
    tools: Tools = None


Value = str | Completion | Dialogue


def form_of(record: dict[str, Any]) -> str:
    """The form that a record shows by its keys; RecordError where it shows none, SeveralForms for several."""
    shown = sorted({form for key, form in FORM_OF_KEY.items() if record.get(key) is not None})
    if not shown:
        keys = ", ".join(repr(key) for key in FORM_OF_KEY)
        raise RecordError(f"none of the keys {keys}, so its form is not known")
    if len(shown) > 1:
        raise SeveralForms(f"could be {' or '.join(shown)}; say which with data.format")
    return shown[0]


def value_of(record: dict[str, Any], form: str) -> Value:
    """What a record of a form says; RecordError with the reason where it says nothing that can be trained on."""
    return _READERS[form](record)


def _text(record: dict[str, Any]) -> Value:
    return _string(record, "text", may_be_empty=False)


def _messages(record: dict[str, Any]) -> Value:
    return Dialogue(_list_of_messages(_filled_list(record, "messages"), "message"), _tools(record))


def _sharegpt(record: dict[str, Any]) -> Value:
    """`conversations` of `from` and `value`; a `system` beside them goes in front."""
    turns = _filled_list(record, "conversations")
    messages = [_sharegpt_turn(turn, number) for number, turn in enumerate(turns, 1)]
    return Dialogue(_system(record) + messages, _tools(record))


def _sharegpt_turn(turn: Any, number: int) -> Message:
    name = f"turn {number}"
    _require_object(turn, name)
    if "from" not in turn and "role" in turn:
        return _message(turn, name)
    for key in ("from", "value"):
        if key not in turn:
            raise RecordError(f"{name} has no {key!r} key")
    _refuse_meaning(turn, name)
    speaker = turn["from"]
    if speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise RecordError(f"{name} is from {speaker!r}; needed is one of {known}")
    role = SHAREGPT_ROLES[speaker]
    return {"role": role, "content": _checked(turn["value"], f"the value of {name}", role != "assistant")}


def _alpaca(record: dict[str, Any]) -> Value:
    """`instruction` with `input` below it is the question, `output` the answer; `history` holds earlier pairs."""
    messages = _system(record)
    for number, pair in enumerate(record.get("history") or [], 1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RecordError(f"entry {number} of 'history' is no pair of question and answer")
        question = _checked(pair[0], f"question {number} of 'history'", may_be_empty=False)
        answer = _checked(pair[1], f"answer {number} of 'history'", may_be_empty=False)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    instruction = _string(record, "instruction", may_be_empty=True)
    extra = _checked(record["input"], "'input'", may_be_empty=True) if record.get("input") is not None else ""
    question = "\n\n".join(part for part in (instruction, extra) if part.strip())
    if not question:
        raise RecordError("'instruction' is empty")
    answer = _string(record, "output", may_be_empty=False)
    return Dialogue([*messages, {"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _prompt_completion(record: dict[str, Any]) -> Value:
    """Two texts, or two lists of messages of which the second is trained."""
    if not isinstance(record.get("prompt"), list):
        return Completion(_string(record, "prompt", True), _string(record, "completion", False))
    asked = _list_of_messages(_filled_list(record, "prompt"), "message", " of 'prompt'")
    answers = _list_of_messages(_filled_list(record, "completion"), "message", " of 'completion'")
    if any(message["role"] == "assistant" for message in asked):
        raise RecordError(
            "'prompt' holds answers, which would be trained like those of 'completion'; that is not built: "
            "use the 'messages' form, with data.train_on = 'last' where only the last answer counts"
        )
    return Dialogue(asked + answers, _tools(record))


_READERS: dict[str, Callable[[dict[str, Any]], Value]] = {
    "text": _text,
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
}


def _list_of_messages(messages: list[Any], word: str, of: str = "") -> list[Message]:
    return [_message(message, f"{word} {number}{of}") for number, message in enumerate(messages, 1)]


def _message(message: Any, name: str) -> Message:
    _require_object(message, name)
    for key in ("role", "content"):
        if key not in message:
            raise RecordError(f"{name} has no {key!r} key")
    role = message["role"]
    if role not in ROLES:
        raise RecordError(f"{name} has the role {role!r}; needed is one of {', '.join(ROLES)}")
    _refuse_meaning(message, name)
    calls, content = message.get("tool_calls"), message["content"]
    if not calls:
        return {"role": role, "content": _checked(content, f"the content of {name}", role != "assistant")}
    if role != "assistant" or not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RecordError(f"'tool_calls' of {name}: needed is a list of objects, of an assistant")
    content = "" if content is None else _checked(content, f"the content of {name}", may_be_empty=True)
    return {"role": role, "content": content, "tool_calls": calls}


def _refuse_meaning(message: dict[str, Any], name: str) -> None:
    for key in _CHANGES_MEANING:
        if message.get(key) is not None:
            raise RecordError(f"{name} has the key {key!r}, which is not built; take it out")


def _tools(record: dict[str, Any]) -> Tools:
    tools = record.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RecordError(f"'tools' is a {type(tools).__name__}; needed is a list of objects, as a chat API takes them")
    return tools


def _system(record: dict[str, Any]) -> list[Message]:
    text = record.get("system")
    if text is None or text == "":
        return []
    return [{"role": "system", "content": _checked(text, "'system'", may_be_empty=True)}]


def _require_object(value: Any, name: str) -> None:
    if not isinstance(value, dict):
        raise RecordError(f"{name} is a {type(value).__name__}; needed is an object")


def _filled_list(record: dict[str, Any], key: str) -> list[Any]:
    if key not in record:
        raise RecordError(f"no {key!r} key")
    if not isinstance(record[key], list):
        raise RecordError(f"{key!r} is a {type(record[key]).__name__}; needed is a list")
    if not record[key]:
        raise RecordError(f"{key!r} is empty")
    return record[key]  # type: ignore[no-any-return]


def _string(record: dict[str, Any], key: str, may_be_empty: bool) -> str:
    if key not in record:
        raise RecordError(f"no {key!r} key")
    return _checked(record[key], repr(key), may_be_empty)


_HALF = re.compile("[\ud800-\udfff]")


def _checked(value: Any, name: str, may_be_empty: bool) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{name} is a {type(value).__name__}; needed is a string")
    if not may_be_empty and not value.strip():
        raise RecordError(f"{name} is empty")
    half = _HALF.search(value)
    if half:
        raise RecordError(f"{name} holds half a character (a lone surrogate) at {half.start()}")
    return value
