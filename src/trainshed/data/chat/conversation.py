"""Rows to conversations: OpenAI's messages, ShareGPT's turns, prompt and answer, Alpaca, and pairs for DPO.

Whatever a row looks like, it becomes messages as chat templates take them: `role`, `content` as one string, and beside
them `tool_calls`, `name` and the like as they are. What is wrong with a row is said in its own words: `BadSample`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from trainshed.data.chat.template import REASONING_FIELDS
from trainshed.recipe.data import SampleFormat

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that chat templates know, in any model."""

ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""What ShareGPT and others call them. Besides, `function_call` is an answer that consists of a call."""

FUNCTION_CALL = "function_call"

DEFAULT_COLUMNS: dict[SampleFormat, dict[str, tuple[str, ...]]] = {
    "text": {},
    "chat": {"messages": ("messages", "conversations", "conversation"), "tools": ("tools",), "system": ("system",)},
    "instruct": {"prompt": ("prompt",), "answer": ("answer",), "system": ("system",)},
    "alpaca": {
        "instruction": ("instruction",),
        "input": ("input",),
        "output": ("output",),
        "system": ("system",),
    },
    "preference": {
        "prompt": ("prompt",),
        "chosen": ("chosen",),
        "rejected": ("rejected",),
        "system": ("system",),
        "tools": ("tools",),
    },
}
"""Under which names the columns of a format are looked for, where `columns` does not say."""

MESSAGE_KEYS = {"role": ("role", "from"), "content": ("content", "value")}

THINKING_MARKS = ("<think>", "</think>")
"""Around the thinking at the start of an answer; some models get the first mark from their template."""

Thinking = Literal["keep", "drop"]


class BadSample(Exception):
    """A row that gives no conversation; with `fatal`, the settings are wrong and not the row."""

    def __init__(self, what: str, hint: str, *, fatal: bool = False) -> None:
        super().__init__(what)
        self.what, self.hint, self.fatal = what, hint, fatal


@dataclass(frozen=True)
class Conversation:
    """Messages to write as one text. Answers before message `first_learned` are part of the question."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    first_learned: int = 0
    thinking: dict[int, str] = field(default_factory=dict)
    """The thinking of answers that is kept, by message."""

    @property
    def answers(self) -> list[int]:
        """The messages that are answers to learn from."""
        return [
            number
            for number, message in enumerate(self.messages)
            if number >= self.first_learned and message["role"] == "assistant" and message.get("weight") != 0
        ]


def row_columns(sample_format: SampleFormat, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of all columns that a row may be read from."""
    wanted = DEFAULT_COLUMNS[sample_format]
    names = (name for column, usual in wanted.items() for name in ((columns[column],) if column in columns else usual))
    return tuple(dict.fromkeys(names))


class SampleParser:
    """Reads rows of one source."""

    def __init__(
        self,
        sample_format: SampleFormat,
        columns: Mapping[str, str],
        *,
        system: str | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        self._columns, self._system, self._thinking = dict(columns), system, thinking
        self._usual = DEFAULT_COLUMNS[sample_format]
        self._parse = {
            "chat": self._chat,
            "instruct": self._instruct,
            "alpaca": self._alpaca,
            "preference": self._preference,
        }[sample_format]

    def parse(self, row: Mapping[str, Any]) -> tuple[Conversation, ...]:
        """Return the conversation of a row; of a preference the one with the better answer, then the other."""
        return self._parse(row)

    def _chat(self, row: Mapping[str, Any]) -> tuple[Conversation, ...]:
        messages = self._messages(self._required(row, "messages"), "messages")
        return (self._conversation(row, messages),)

    def _instruct(self, row: Mapping[str, Any]) -> tuple[Conversation, ...]:
        prompt = self._turns(self._required(row, "prompt"), "prompt", "user")
        answer = self._turns(self._required(row, "answer"), "answer", "assistant")
        return (self._conversation(row, [*prompt, *answer], len(prompt)),)

    def _alpaca(self, row: Mapping[str, Any]) -> tuple[Conversation, ...]:
        instruction = _text(self._required(row, "instruction"), "instruction")
        given = self._optional(row, "input")
        question = f"{instruction}\n\n{_text(given, 'input')}" if given else instruction
        output = _text(self._required(row, "output"), "output")
        return (self._conversation(row, [_turn("user", question), _turn("assistant", output)]),)

    def _preference(self, row: Mapping[str, Any]) -> tuple[Conversation, ...]:
        pair = [self._required(row, column) for column in ("chosen", "rejected")]
        chosen, rejected = (
            self._turns(value, column, "assistant") for value, column in zip(pair, ("chosen", "rejected"), strict=True)
        )
        prompt_value = self._optional(row, "prompt")
        if prompt_value is None:
            if any(isinstance(value, str) for value in pair):
                raise BadSample(
                    "`chosen` and `rejected` are text, and there is no `prompt`: where the question ends is not known",
                    "add a column `prompt` (or name it with --columns), or write lists of messages",
                )
            prompt = _common_start(chosen, rejected)
        else:
            prompt = self._turns(prompt_value, "prompt", "user")
        if not prompt:
            raise BadSample("`chosen` and `rejected` have no message in common", "add a column `prompt`")
        # Many datasets repeat the prompt at the start of both.
        answers = [turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns for turns in (chosen, rejected)]
        if answers[0] == answers[1]:
            raise BadSample("`chosen` and `rejected` are the same", "leave such rows out")
        return tuple(self._conversation(row, [*prompt, *turns], len(prompt)) for turns in answers)

    def _conversation(
        self, row: Mapping[str, Any], messages: list[dict[str, Any]], first_learned: int = 0
    ) -> Conversation:
        """Check messages, and apply what the recipe says about system prompts and thinking."""
        if not messages:
            raise BadSample("an empty conversation", "leave such rows out")
        system = self._optional(row, "system")
        has_system = messages[0]["role"] in ("system", "developer")
        if system and has_system:
            if _text(system, "system") != messages[0]["content"]:
                raise BadSample("a system prompt in its column and another one in the messages", "remove one of them")
        elif system or (self._system and not has_system):
            text = _text(system, "system") if system else self._system
            messages, first_learned = [_turn("system", str(text)), *messages], first_learned + 1
        messages, thinking = self._with_thinking(messages)
        conversation = Conversation(messages, _tools(self._optional(row, "tools")), first_learned, thinking)
        if not conversation.answers:
            raise BadSample("there is no answer to learn from", "a conversation needs a message of the role assistant")
        for number in conversation.answers:
            message = messages[number]
            if not message["content"].strip() and not message.get("tool_calls") and number not in thinking:
                raise BadSample(f"message {number + 1} is an empty answer", "leave such conversations out")
        return conversation

    def _with_thinking(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, str]]:
        kept: list[dict[str, Any]] = []
        thinking: dict[int, str] = {}
        for number, message in enumerate(messages):
            trace = _thinking_of(message) if message["role"] == "assistant" else None
            if trace is None:
                kept.append(message)
                continue
            if self._thinking is None:
                raise BadSample(
                    f"message {number + 1} has a thinking trace, and nothing says what to do with it",
                    "write --thinking keep to learn it, or --thinking drop to remove it",
                    fatal=True,
                )
            if self._thinking == "keep":
                thinking[number] = trace.strip()
                kept.append(message)
            else:
                rest = {name: value for name, value in message.items() if name not in REASONING_FIELDS}
                kept.append(rest | {"content": visible_content(message)})
        return kept, thinking

    def _messages(self, value: Any, column: str) -> list[dict[str, Any]]:
        if isinstance(value, str):
            value = _json(value, column)
        if not isinstance(value, list):
            raise BadSample(f"`{column}` holds a JSON {_kind(value)}, not a list of messages", 'write [{"role": …}, …]')
        return [self._message(message, number) for number, message in enumerate(value, 1)]

    def _turns(self, value: Any, column: str, role: str) -> list[dict[str, Any]]:
        """Return text as one message of a role, messages as they are."""
        return [_turn(role, value)] if isinstance(value, str) else self._messages(value, column)

    def _message(self, value: Any, number: int) -> dict[str, Any]:
        place = f"message {number}"
        if not isinstance(value, dict):
            raise BadSample(
                f"{place} is a JSON {_kind(value)}, not an object", 'write {"role": "user", "content": "…"}'
            )
        keys = {wanted: self._message_key(value, wanted, place) for wanted in MESSAGE_KEYS}
        role = value.get(keys["role"])
        rest = {name: item for name, item in value.items() if name not in keys.values() and item is not None}
        content = value.get(keys["content"])
        if role == FUNCTION_CALL:
            calls = _json(content, place) if isinstance(content, str) else content
            rest["tool_calls"] = [{"type": "function", "function": call} for call in _as_list(calls)]
            role, content = "assistant", ""
        known = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
        if known not in ROLES:
            raise BadSample(
                f"{place} has the unknown role {role!r}",
                f"roles are {', '.join((*ROLES, *ROLE_ALIASES, FUNCTION_CALL))}",
            )
        if "tool_calls" in rest:
            rest["tool_calls"] = _tool_calls(rest["tool_calls"], place)
        if not rest.get("tool_calls"):
            rest.pop("tool_calls", None)
        if rest.get("weight", 1) not in (0, 1):
            raise BadSample(f"{place} has the weight {rest['weight']!r}", "write 0 (not learned) or 1, or leave it out")
        return {"role": known, "content": _content(content, place), **rest}

    def _message_key(self, message: Mapping[str, Any], wanted: str, place: str) -> str:
        usual = (self._columns[wanted],) if wanted in self._columns else MESSAGE_KEYS[wanted]
        name = next((name for name in usual if name in message), None)
        if name is None and wanted == "role":
            raise BadSample(
                f"{place} has no `{usual[0]}`",
                f"its keys are {_names(message)}: name the right one with --columns {wanted}=NAME",
            )
        return name or usual[0]

    def _required(self, row: Mapping[str, Any], column: str) -> Any:
        value = self._optional(row, column)
        if value is None:
            names = " or ".join(f"`{name}`" for name in self._names_of(column))
            null = any(name in row for name in self._names_of(column))
            raise BadSample(
                f"{names} is null" if null else f"there is no {names}",
                "fill or drop such rows"
                if null
                else f"its columns are {_names(row)}: name the right one with --columns {column}=NAME",
            )
        return value

    def _optional(self, row: Mapping[str, Any], column: str) -> Any:
        if column not in self._usual:
            return None
        return next((row[name] for name in self._names_of(column) if row.get(name) is not None), None)

    def _names_of(self, column: str) -> tuple[str, ...]:
        return (self._columns[column],) if column in self._columns else self._usual[column]


def split_thinking(content: str) -> tuple[str | None, str]:
    """Split the content of an answer into its thinking (None: it has none) and what a reader sees."""
    begin, end = THINKING_MARKS
    before, mark, after = content.partition(end)
    thinking = before.lstrip()
    if not mark or (begin in before and not thinking.startswith(begin)):
        return None, content  # an answer that writes about such marks
    return thinking.removeprefix(begin), after.lstrip()


def visible_content(message: Mapping[str, Any]) -> str:
    """Return the content of an answer without its thinking."""
    return split_thinking(message["content"])[1]


def _thinking_of(message: Mapping[str, Any]) -> str | None:
    """Return the thinking of an answer, wherever it is; None if it has none."""
    field_value = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if field_value is not None:
        return _text(field_value, "reasoning_content")
    return split_thinking(message["content"])[0]


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _common_start(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with which both conversations begin; the last of each is an answer in any case."""
    common: list[dict[str, Any]] = []
    for message, same in zip(one[:-1], other[:-1], strict=False):
        if message != same:
            break
        common.append(message)
    return common


def _content(value: Any, place: str) -> str:
    """Return a message's content as one text: parts of text are put together, nothing is an empty text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadSample(f"{place} has a JSON {_kind(value)} as its content", "write a text, or a list of parts of text")
    texts: list[str] = []
    for part in value:
        if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise BadSample(
                f"{place} has a part of the type {kind!r} in its content", 'only {"type": "text", "text": "…"} is read'
            )
    return "".join(texts)


def _tool_calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects: on the wire OpenAI has them as text, templates do not."""
    calls = _json(value, place) if isinstance(value, str) else value
    checked: list[dict[str, Any]] = []
    for call in _as_list(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadSample(
                f"{place} has a tool call without a name",
                'write {"type": "function", "function": {"name": "…", "arguments": {…}}}',
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            arguments = _json(arguments, f"a tool call of {place}")
        function = function | {"arguments": {} if arguments in (None, "") else arguments}
        checked.append(call | {"function": function} if "function" in call else function)
    return checked


def _tools(value: Any) -> list[Any] | None:
    tools = _json(value, "tools") if isinstance(value, str) and value.strip() else value
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadSample(
            f"`tools` holds a JSON {_kind(tools)}, not a list of objects", "write JSON schemas of functions"
        )
    return tools


def _json(text: Any, place: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadSample(f"{place} holds text that is not JSON: {error}", "write valid JSON there") from None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadSample(f"`{column}` holds a JSON {_kind(value)}, not text", "write the text as a string")
    return value


def _names(mapping: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in mapping) or "none"


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    names[bytes] = "string that is not UTF-8"
    return names.get(type(value), "number")
