"""Chat templates: which one a conversation is written by, and the text that it gives.

A template is the tokenizer's own, one of our catalog (`templates/`), or a file. Preparing data has no clock: where a
template asks for today's date it gets `FIXED_DATE`, so that the same rows give the same tokens on any day.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.errors import InputError, MissingExtra, TrainshedError
from trainshed.storage import open_store, parse

if TYPE_CHECKING:
    from trainshed.data.chat.sandbox import RenderBudget, Span, TemplateEnvironment
    from trainshed.storage import StoreOptions


FIXED_DATE = datetime(2024, 7, 26)
"""What templates get for today's date: the date that Llama 3.1's own template falls back to."""

CATALOG = resources.files("trainshed.data.chat") / "templates"
"""The folder of our own templates, one .jinja file for each name."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which datasets keep the thinking of an answer; templates read the first or the second."""

MARKER = re.compile(r"<[|｜][^<>|｜\s]{1,64}[|｜]>|<(?:start|end)_of_turn>")
"""What templates write to mean a special token. `[INST]` is not here: older models have it as ordinary text."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TemplateSource:
    """A template as its text; `with_tools` is used instead for conversations with tools, where a model has one."""

    name: str
    text: str
    with_tools: str | None = None

    @property
    def sha256(self) -> str:
        """The hash of all its text."""
        return hashlib.sha256("\0".join((self.text, self.with_tools or "")).encode()).hexdigest()


def catalog_names() -> list[str]:
    """Return the names of our own templates."""
    return sorted(file.name.removesuffix(".jinja") for file in CATALOG.iterdir() if file.name.endswith(".jinja"))


def find_template(
    wanted: str | None, tokenizer: Tokenizer, *, folder: Path | None = None, options: StoreOptions | None = None
) -> TemplateSource:
    """Return the template of a name, of a .jinja file (a relative path starts at `folder`), or the tokenizer's own."""
    if wanted is None:
        own = tokenizer.chat_templates
        if "default" not in own:
            raise InputError(
                "this tokenizer has no chat template",
                where=tokenizer.address,
                hint=f"write --template with one of {', '.join(catalog_names())}, or with a .jinja file",
            )
        return TemplateSource("the tokenizer's own", own["default"], own.get("tool_use"))
    if wanted in catalog_names():
        return TemplateSource(wanted, (CATALOG / f"{wanted}.jinja").read_text("utf-8"))
    if not wanted.endswith(".jinja"):
        raise InputError(
            f"there is no chat template {wanted!r}",
            hint=f"write --template with one of {', '.join(catalog_names())}, or with a .jinja file",
        )
    address = wanted if folder is None or "://" in wanted else str(folder / wanted)
    store, path = open_store(parse(address), options)
    if store.head(path) is None:
        raise InputError("there is no such template", where=address, hint="its path is relative to the recipe file")
    try:
        return TemplateSource(wanted, store.read(path).decode())
    except UnicodeDecodeError:
        raise InputError("this template is not UTF-8", where=address) from None


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text, and the characters of its `{% generation %}` blocks."""

    text: str
    generation_spans: tuple[Span, ...] = ()


class ChatTemplate:
    """A compiled template, with the special tokens that it may name."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] | None = None
    ) -> None:
        self._source, self._special_tokens = source, dict(special_tokens)
        self._now = now or (lambda: FIXED_DATE)

    @cached_property
    def _compiled(self) -> tuple[TemplateEnvironment, Any]:
        try:
            import jinja2

            from trainshed.data.chat import sandbox
        except ImportError:
            raise MissingExtra.named("data", "writing a conversation") from None
        environment = sandbox.TemplateEnvironment(self._now)
        try:
            return environment, environment.from_string(self._source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise _failure(error) from None

    @property
    def has_generation_blocks(self) -> bool:
        """Whether the template itself marks what the assistant writes."""
        return self._compiled[0].has_generation_blocks

    @property
    def asks_for_date(self) -> bool:
        """Whether it has asked for today's date so far."""
        return self._compiled[0].asks_for_date

    def new_budget(self, messages: int = 1) -> RenderBudget:
        """Return the time for one conversation, which is rendered about twice for each answer."""
        from trainshed.data.chat.sandbox import MAX_SECONDS, MESSAGES_OF_MAX_SECONDS, RenderBudget

        return RenderBudget(MAX_SECONDS * max(1.0, messages / MESSAGES_OF_MAX_SECONDS))

    def render(
        self,
        messages: Iterable[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        budget: RenderBudget | None = None,
    ) -> RenderedChat:
        """Write a conversation; raises `TemplateFailure`, or `TemplateOverrun` where it takes too long."""
        from trainshed.data.chat.sandbox import RenderState

        environment, template = self._compiled
        state = RenderState(budget or self.new_budget())
        variables = {
            "messages": [_with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        try:
            text = environment.run(template, variables, state)
        except TrainshedError:
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            raise _failure(error) from None
        return RenderedChat(text, tuple((start, start + len(block)) for start, block in state.blocks))

    def literal_markers(self) -> set[str]:
        """Return what looks like a special token in the text of the template itself."""
        from jinja2 import nodes

        environment, _ = self._compiled
        tree = environment.parse(self._source)
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return {marker for text in texts for marker in MARKER.findall(text)}


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Give a message's thinking the names that templates read it by, as transformers does."""
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _failure(error: Exception) -> InputError:
    from trainshed.data.chat.sandbox import TemplateFailure

    text = str(error) if str(error) else type(error).__name__
    return TemplateFailure(
        f"the chat template does not take this conversation: {text}",
        hint="messages have a `role` (system, user, assistant) and a `content`",
    )
