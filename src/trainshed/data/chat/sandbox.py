"""The Jinja environment of chat templates: sandboxed, bounded, and with the functions that transformers gives them.

A template is a program that comes with a model. It may loop for ever or double a string forty times, so time and sizes
are bounded: loops and macros check the time as they go, operators that make large values check sizes. This module
needs jinja2; `template.py` imports it when the first template is compiled.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from trainshed.errors import InputError

MAX_SECONDS = 5.0
"""Processor time that the template may take for one conversation, however often it is rendered."""

MESSAGES_OF_MAX_SECONDS = 100
"""Conversations of more messages than this get more time, in proportion."""

MAX_CHARACTERS = 64 * 1024 * 1024
"""Longest text that a template may write or hold."""

STEPS_BETWEEN_CHECKS = 64
"""The clock is read every so many steps: reading it costs more than a step."""

_MAX_POWER_BITS = 4096
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{7,})")

Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation."""


class TemplateFailure(InputError):
    """A template does not take a conversation, or is not a template at all."""


class TemplateOverrun(TemplateFailure):
    """A template takes too long, or writes too much."""


class RenderBudget:
    """The processor time that is left for one conversation."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.thread_time() + self._seconds
        self._steps = 0

    def step(self) -> None:
        """Count one step of the template."""
        self._steps += 1
        if self._steps % STEPS_BETWEEN_CHECKS == 0 and time.thread_time() > self._end:
            raise TemplateOverrun(
                f"the chat template takes more than {self._seconds:g} seconds for one conversation",
                hint="it may loop for ever: write another template",
            )


@dataclass
class RenderState:
    """One rendering while it goes on: how much is written, and where `{% generation %}` blocks are."""

    budget: RenderBudget
    length: int = 0
    blocks: list[tuple[int, str]] = field(default_factory=list)
    """Where each block begins, and its text."""

    def write(self, piece: str) -> None:
        """Count what the template writes."""
        self.length += len(piece)
        _check_length(self.length)
        self.budget.step()


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles one template. `now` is the clock of `strftime_now`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        self._rendering = threading.local()
        self.has_generation_blocks = False
        self.asks_for_date = False
        self._now = now
        self.filters["tojson"] = _to_json
        self.filters["_step"] = _count_step
        self.filters["_concat"] = _concatenate
        self.globals.update(raise_exception=_refuse, strftime_now=self._format_now)  # type: ignore[arg-type]
        # It writes as much text as it is asked for.
        self.globals.pop("lipsum", None)

    @property
    def state(self) -> RenderState:
        """The rendering of this thread."""
        return self._rendering.state

    def run(self, template: jinja2.Template, variables: Mapping[str, Any], state: RenderState) -> str:
        """Render a template of this environment."""
        self._rendering.state = state
        pieces: list[str] = []
        for piece in template.generate(**variables):
            state.write(piece)
            pieces.append(piece)
        text = "".join(pieces)
        if not all(text.startswith(block, start) for start, block in state.blocks):
            raise TemplateFailure(
                "the chat template has a {% generation %} block inside of a macro, a filter or {% set %}",
                hint="write the block around what is written out",
            )
        return text

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        return super()._generate(_Bounds().visit(source), *rest, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Check what an operator would make before it makes it."""
        if operator == "+":
            if isinstance(left, str) and isinstance(right, str):
                _check_length(len(left) + len(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _check_length(len(value) * max(times, 0))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
                raise TemplateOverrun("the chat template computes a number that is too large")
        elif isinstance(left, str) and _WIDE_FIELD.search(left):
            raise TemplateOverrun("the chat template formats text with a field that is too wide")
        return self.binop_table[operator](left, right)

    def _format_now(self, form: str) -> str:
        self.asks_for_date = True
        return self._now().strftime(form)


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}`: what the assistant writes, as transformers marks it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own class attribute

    def parse(self, parser: Any) -> nodes.Node:
        """Make it a call of `_note_span` with the block as its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_generation_blocks = True  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("_note_span"), [], [], body).set_lineno(line)

    def _note_span(self, caller: Callable[[], str]) -> str:
        text = caller()
        state: RenderState = self.environment.state  # type: ignore[attr-defined]
        state.blocks.append((state.length, text))
        return text


class _Bounds(NodeTransformer):
    """Puts a step into every loop and macro, and makes `~` check sizes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_step(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_concat", [], [], None, None).set_lineno(node.lineno)

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.Filter(nodes.Const(0), "_step", [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno, override=True))
        return node


# Both take the context because Jinja would otherwise call them once, when it compiles the template.


@pass_context
def _count_step(context: Any, value: Any) -> Any:
    context.environment.state.budget.step()
    return value


@pass_context
def _concatenate(context: Any, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise TemplateOverrun(
            f"the chat template writes more than {MAX_CHARACTERS:,} characters",
            hint="leave such conversations out, or write another template",
        )


def _refuse(text: str) -> None:
    raise jinja2.TemplateError(text)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
