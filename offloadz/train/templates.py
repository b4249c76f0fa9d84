"""Chat templates: from a dialogue to one text, and where in that text the answers stand.

This room knows Jinja and nothing of tokens; ids and masks are made in `tokens.py`.  Where the answers stand is found by
rendering again: the messages before an answer with the generation prompt, the messages up to it, and the messages up to
it with a marker in place of the answer.  Its one trade-off: about three short renderings an answer (0.1 ms each) buy
masks that need no `{% generation %}` in a template.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offloadz.plan.errors import ConfigError
from offloadz.train.forms import Message, RecordError, Tools

Span = tuple[int, int]

BUILT_IN_TEMPLATES: dict[str, str] = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token or '' }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    # Gemma and Mistral have no system turn: it goes in front of the first question.
    "gemma": (
        "{{ bos_token or '' }}{% set ns = namespace(first='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% if not loop.first %}"
        "{{ raise_exception('a system message must come first') }}{% endif %}"
        "{% set ns.first = (m['content'] | trim) + '\\n\\n' %}"
        "{% elif m['role'] not in ['user', 'assistant'] %}"
        "{{ raise_exception('the gemma template knows no role ' + m['role']) }}{% else %}"
        "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') + '\\n' }}"
        "{% if m['role'] == 'user' %}{{ ns.first }}{% set ns.first = '' %}{% endif %}"
        "{{ (m['content'] | trim) + '<end_of_turn>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token or '' }}{% set ns = namespace(first='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% if not loop.first %}"
        "{{ raise_exception('a system message must come first') }}{% endif %}"
        "{% set ns.first = m['content'] + '\\n\\n' %}"
        "{% elif m['role'] == 'user' %}{{ '[INST] ' + ns.first + m['content'] + '[/INST]' }}{% set ns.first = '' %}"
        "{% elif m['role'] == 'assistant' %}{{ ' ' + (m['content'] | trim) + (eos_token or '') }}"
        "{% else %}{{ raise_exception('the mistral template knows no role ' + m['role']) }}{% endif %}{% endfor %}"
    ),
}

BUILT_IN_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
}
"""What each writes that should be a token of its own."""

# Llama's own templates print today's date unless they are given one: the same data would become other tokens tomorrow,
# and a run resumed after midnight would not be the same run.  This is the date those templates themselves fall back to.
_FIXED_DATE = "26 Jul 2024"
# Stands in place of an answer to learn what a template writes before and after it.  Letters and digits only, so that no
# filter (trim, tojson, escape) changes it.
_MARKER = "Q7offloadzQ7answerQ7"


class ChatTemplate:
    """A template with the tokenizer's special tokens filled in; `name` says where it came from."""

    def __init__(self, text: str, name: str, special_tokens: dict[str, Any]):
        """Compile `text`; a template that does not parse is a `ConfigError`."""
        import jinja2

        self.text, self.name = text, name
        self.tokens: tuple[str, ...] = ()
        """What it writes that should be a token of its own, where that is known."""
        self._values = {**special_tokens, "date_string": _FIXED_DATE}
        self._tools: Tools = None
        self.has_markers = "generation %}" in text or "generation -%}" in text
        try:
            self.render([{"role": "user", "content": "x"}], False)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"data.chat_template: {name} does not parse at line {error.lineno}: {error.message}; mend the template"
            ) from error
        except RecordError:
            pass  # a template may refuse this dialogue; real ones are told apart with file and line

    def with_tools(self, tools: Tools) -> ChatTemplate:
        """This template writing `tools` (as a chat API takes them) into every text; refused if it knows none."""
        if not tools:
            return self
        if "tools" not in self.text:
            raise RecordError(f"{self.name} has no place for 'tools'; set data.chat_template to one that writes them")
        bound = copy.copy(self)
        bound._tools = tools
        return bound

    def render(self, messages: Sequence[Message], prompt: bool) -> str:
        """The text of `messages`, with the beginning of an assistant's turn after it when `prompt`."""
        return self._render(messages, prompt, markers=False)[0]

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of `messages` and the character spans inside the template's `{% generation %}` blocks."""
        return self._render(messages, False, markers=True)

    def _render(self, messages: Sequence[Message], prompt: bool, markers: bool) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=list(self._tools) if self._tools else None,
                chat_template=self.text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=markers,
                **self._values,
            )
        except jinja2.TemplateSyntaxError:
            raise
        except (jinja2.TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
            raise RecordError(f"the chat template refuses it: {error}") from error
        texts, spans = rendered
        return str(texts[0]), [(int(a), int(b)) for a, b in spans[0]] if markers else []


def template_text(choice: str) -> str:
    """The text of a built-in template or of a template file."""
    return BUILT_IN_TEMPLATES.get(choice) or Path(choice).expanduser().read_text(encoding="utf-8-sig")


def find_template(tokenizer: Any, choice: str) -> ChatTemplate:
    """The template that `data.chat_template = choice` means: a file, a built-in name, or "" for the tokenizer's own."""
    special = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    known = " | ".join(BUILT_IN_TEMPLATES)
    if choice in BUILT_IN_TEMPLATES:
        template = ChatTemplate(BUILT_IN_TEMPLATES[choice], f"built-in template {choice!r}", special)
        template.tokens = BUILT_IN_TOKENS[choice]
        return template
    if choice:
        path = Path(choice).expanduser()
        if not path.is_file():
            near = difflib.get_close_matches(choice, list(BUILT_IN_TEMPLATES), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"data.chat_template = {choice!r}: there is no such file and no such built-in ({known}){hint}"
            )
        try:
            return ChatTemplate(path.read_text(encoding="utf-8-sig"), f"template file {choice}", special)
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.chat_template = {choice!r} is not UTF-8 text: {error}") from error
    try:
        own = tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(
            "data: records that are dialogues need a chat template and this tokenizer has none; "
            f"set data.chat_template to a file or to one of the built-in ones: {known} (and model.add_tokens to the "
            "special tokens that it writes and the tokenizer lacks)"
        ) from error
    return ChatTemplate(own, "the tokenizer's own template", special)


def end_token_of(tail: str) -> str:
    """What ends a turn: the tail without the line break behind it, which no model has to say to stop."""
    return tail.rstrip() or tail


def _around(template: ChatTemplate, messages: Sequence[Message], turn: int) -> tuple[str, str]:
    """The text before and after answer `turn`, as the template writes them when it is the last message."""
    marked = [*messages[:turn], {"role": messages[turn]["role"], "content": _MARKER}]
    text = template.render(marked, False)
    if text.count(_MARKER) != 1:
        raise RecordError(
            f"{template.name} writes the answer of message {turn + 1} {text.count(_MARKER)} times; once is needed"
        )
    before, after = text.split(_MARKER)
    if not after:
        raise RecordError(
            f"{template.name} writes nothing after an assistant's answer, so the model would never learn to stop; "
            "set data.chat_template to one that ends its turns, or give the tokenizer an end token"
        )
    return before, after


def _try_render(template: ChatTemplate, messages: Sequence[Message], prompt: bool) -> str | None:
    try:
        return template.render(messages, prompt) if messages else None
    except RecordError:
        return None


def _span_of_turn(template: ChatTemplate, messages: Sequence[Message], turn: int, full: str, floor: int) -> Span | None:
    """Where answer `turn` stands in `full`: from behind its header to the end of what ends the turn; None: not found.

    `floor` is the end of the answer before.  The start is where the generation prompt ends, since that is where a
    model begins to write; where the prompt is no prefix of the dialogue, or the template has none, it is the answer's
    own first character.
    """
    answer = messages[turn]["content"]
    before, tail = _around(template, messages, turn)
    end_token = end_token_of(tail)
    question = _try_render(template, messages[:turn], False)
    prompt = _try_render(template, messages[:turn], True)
    start = None
    if prompt is not None and prompt != question and full.startswith(prompt) and len(prompt) >= floor:
        start = len(prompt)
    upto = full if turn == len(messages) - 1 else template.render(messages[: turn + 1], False)
    if full.startswith(upto) and upto.endswith(tail):
        # The usual template: what stands there does not depend on what follows.
        if start is None and full.startswith(before):
            # No prompt: a header is the template's, mere white space (Mistral's) is what the model writes first.
            header = before.removeprefix(question) if question is not None else before
            start = len(before) if header.strip() else len(before) - len(header)
        if start is not None and floor <= start <= len(upto) - len(tail):
            return start, len(upto) - len(tail) + len(end_token)
    # A template that rewrites earlier turns (Qwen3 drops their thoughts): find the answer with its end behind it.
    if question is not None and full.startswith(question):
        floor = max(floor, len(question))
    elif start is None:
        return None
    begin = floor if start is None else start
    if messages[turn].get("tool_calls"):
        # What a template makes of calls is its own: all up to the end of the turn, if it is known where that begins.
        at = full.find(end_token, begin) if start is not None and end_token.strip() else -1
        return (begin, at + len(end_token)) if at >= 0 else None
    for written in (answer, answer.strip()):
        at = full.find(written + end_token, begin)
        if at >= 0 and (start is None or end_token not in full[start:at]):
            return (at if start is None else start), at + len(written) + len(end_token)
    at = full.find(end_token, begin) if start is not None and end_token.strip() else -1
    if at > begin and answer.strip().endswith(full[begin:at].strip()):
        return begin, at + len(end_token)
    return None


def assistant_spans(template: ChatTemplate, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """Render a dialogue and find its answers.

    Returns the whole text and one (start, end) of characters for each assistant message, in order, each including what
    ends the turn.  Raises `RecordError` where neither prefixes nor `{% generation %}` blocks say where an answer is.
    """
    full = template.render(messages, False)
    spans: list[Span] = []
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for turn in turns:
        span = _span_of_turn(template, messages, turn, full, spans[-1][1] if spans else 0)
        if span is None:
            return full, _spans_from_markers(template, messages, turns, full)
        spans.append(span)
    return full, spans


def _spans_from_markers(
    template: ChatTemplate, messages: Sequence[Message], turns: Sequence[int], full: str
) -> list[Span]:
    spans = template.render_marked(messages)[1] if template.has_markers else []
    if len(spans) != len(turns):
        raise RecordError(
            f"{template.name} rewrites earlier turns, so the {len(turns)} answers cannot be found in its text "
            f"({len(spans)} generation blocks); put {{% generation %}} ... {{% endgeneration %}} around the answer"
        )
    widened = []
    for (start, end), turn in zip(spans, turns, strict=True):
        end_token = end_token_of(_around(template, messages, turn)[1])
        widened.append((start, end + len(end_token) if full.startswith(end_token, end) else end))
    return widened


def turn_end(template: ChatTemplate) -> str:
    """What this template ends an assistant's turn with; RecordError where it takes no such dialogue."""
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    return end_token_of(_around(template, dialogue, 1)[1])


def fixed_date_note(template: ChatTemplate) -> list[str]:
    """A line about the date that a template prints, if it does."""
    if "strftime_now" not in template.text:
        return []
    if "date_string" not in template.text:
        return [f"{template.name} prints the current date: the same data gives other tokens on another day"]
    return [f"{template.name} prints a date; {_FIXED_DATE} is used, so that runs repeat"]
