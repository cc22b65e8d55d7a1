"""Which characters of a rendered conversation are learned.

A template with `{% generation %}` blocks says it itself. With any other template an answer is what it adds to the
messages before it: it begins where the generation prompt ends, and includes its end-of-turn token. For that the
messages up to each answer are rendered with and without it.

Some templates write an answer differently once more messages follow: Qwen 3 drops earlier thinking, gpt-oss ends
earlier answers with another token, Mistral moves the system prompt. Such an answer is found by rendering the
conversation with a mark in its place. What cannot be found is refused: "the template does not round-trip".
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainshed.data.chat.conversation import BadSample, Conversation, visible_content
from trainshed.data.chat.template import MARKER, ChatTemplate
from trainshed.recipe.data import TrainOn

if TYPE_CHECKING:
    from trainshed.data.chat.sandbox import RenderBudget, Span

ANCHOR = "\ue000answer\ue001"
"""Stands for the content of an answer while its place is looked for: private characters that no text has."""

_CHECKED_ROLES = ("system", "developer", "user", "assistant")
"""Roles whose content a template must write as it is; results of tools are often written as JSON."""


def render_learned(template: ChatTemplate, conversation: Conversation, train_on: TrainOn) -> tuple[str, list[Span]]:
    """Return a conversation as text, and the characters of it that are learned."""
    rendering = _Rendering(template, conversation, template.new_budget(len(conversation.messages)))
    answers = conversation.answers[-1:] if train_on == "last" else conversation.answers
    if train_on == "all":
        spans = [(0, len(rendering.text))]
    elif template.has_generation_blocks:
        spans = rendering.generation_spans(answers)
    else:
        spans = [rendering.answer_span(number) for number in answers]
    rendering.check_contents()
    _check_thinking(rendering.text, spans, {number: conversation.thinking.get(number, "") for number in answers})
    return rendering.text, spans


def _check_thinking(text: str, spans: list[Span], thinking: dict[int, str]) -> None:
    """Refuse a template that leaves out thinking that is to be learned."""
    learned = "\0".join(text[start:end] for start, end in spans) if any(thinking.values()) else ""
    for number, trace in thinking.items():
        if trace and trace not in learned:
            raise BadSample(
                f"the chat template leaves out the thinking of message {number + 1}, which is to be kept",
                "write --thinking drop, --train-on last if it is only that of earlier answers, or another --template",
            )


class _Rendering:
    """One conversation and its prefixes as text, each rendered once."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, budget: RenderBudget) -> None:
        self._template, self._conversation, self._budget = template, conversation, budget
        self._messages = conversation.messages
        self._prompts: dict[int, str] = {}
        self._whole = self._template.render(self._messages, conversation.tools, budget=budget)
        self.text = self._whole.text

    def generation_spans(self, answers: list[int]) -> list[Span]:
        """Return the `{% generation %}` blocks that belong to some answers."""
        spans = [span for span in self._whole.generation_spans if span[0] < span[1]]
        if answers == self._all_answers:
            return spans
        starts = [(self._start(number), number) for number in self._all_answers]
        return [
            span for span in spans if max((s for s in starts if s[0] < span[1]), default=(0, -1))[1] in set(answers)
        ]

    @cached_property
    def _all_answers(self) -> list[int]:
        return [number for number, message in enumerate(self._messages) if message["role"] == "assistant"]

    def answer_span(self, number: int) -> Span:
        """Find one answer, from the end of the generation prompt to the end of its turn."""
        start, end = self._start(number), self._end(number)
        if self.text.find(self.content(number), start, end) < 0:
            raise self.refusal(number, "what it says is not in the text")
        return start, end

    def _end(self, number: int) -> int:
        if number == len(self._messages) - 1:
            return len(self.text)
        until = self._render(self._messages[: number + 1])
        return len(until) if self.text.startswith(until) else _AnchoredAnswer(self, number).end()

    def _start(self, number: int) -> int:
        prompt = self.prompt(number)
        if self.text.startswith(prompt):
            return len(prompt)
        # A generation prompt may go further than an earlier answer does: it may open the thinking already.
        before = len(prompt) - len(self.generation_prompt(number))
        common = _common_length(self.text, prompt)
        common -= _open_mark(prompt[:common])
        return common if common > before else _AnchoredAnswer(self, number).start()

    def generation_prompt(self, number: int) -> str:
        """Return what the template writes to begin an answer."""
        before, prompt = self._render(self._messages[:number]), self.prompt(number)
        if not prompt.startswith(before):
            raise self.refusal(number, "the generation prompt changes what comes before it")
        return prompt[len(before) :]

    def prompt(self, number: int) -> str:
        """Return the messages before an answer, with the generation prompt."""
        if number not in self._prompts:
            if number == 0:
                raise self.refusal(number, "nothing comes before it")
            self._prompts[number] = self._render(self._messages[:number], add_generation_prompt=True)
        return self._prompts[number]

    def anchored(self, number: int, *, last: bool) -> tuple[str, str]:
        """Render with a mark in place of what an answer says, and return what comes before and after the mark.

        With `last`, the conversation ends with this answer.
        """
        marked = _with_anchor(self._messages[number])
        rest = [] if last else self._messages[number + 1 :]
        before, mark, after = self._render([*self._messages[:number], marked, *rest]).partition(ANCHOR)
        if not mark or ANCHOR in after:
            raise self.refusal(number, "its content is written more than once, or not at all")
        return before, after

    def check_contents(self) -> None:
        """Refuse a template that leaves out or changes what a message says."""
        at = 0
        for number, message in enumerate(self._messages):
            if message["role"] not in _CHECKED_ROLES:
                continue
            content = (visible_content(message) if message["role"] == "assistant" else message["content"]).strip()
            position = self.text.find(content, at)
            if position < 0 and content not in self.text:
                raise self.refusal(number, "what it says is not in the text")
            at = max(at, position)

    def refusal(self, number: int, why: str) -> BadSample:
        """Return the error for a message that cannot be found in the text."""
        role = self._messages[number]["role"]
        return BadSample(
            f"the chat template does not round-trip: message {number + 1} ({role}) cannot be found ({why})",
            "write another --template; one with {% generation %} blocks says itself what is learned",
        )

    def content(self, number: int) -> str:
        """Return what a reader sees of an answer; of one that only calls tools, the name of the first."""
        content = visible_content(self._messages[number]).strip()
        return content or _first_tool(self._messages[number])

    def _render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        return self._template.render(
            messages, self._conversation.tools, add_generation_prompt=add_generation_prompt, budget=self._budget
        ).text


class _AnchoredAnswer:
    """An answer that the template writes differently when more messages follow."""

    def __init__(self, rendering: _Rendering, number: int) -> None:
        self._rendering, self._number = rendering, number
        self._before, self._after = rendering.anchored(number, last=False)
        text = rendering.text
        self._content_end = len(text) - len(self._after)
        if (
            not text.startswith(self._before)
            or not text.endswith(self._after)
            or len(self._before) > self._content_end
            or rendering.content(number) not in text[len(self._before) : self._content_end]
        ):
            raise rendering.refusal(number, "other messages change with it")
        prompt = rendering.prompt(number)
        alone_before, self._alone_after = rendering.anchored(number, last=True)
        if not alone_before.startswith(prompt):
            raise rendering.refusal(number, "it does not begin with the generation prompt")
        self._lead = alone_before[len(prompt) :]

    def start(self) -> int:
        """Return where it begins: what stands between the generation prompt and the content is part of it."""
        if self._before.endswith(self._lead):
            return len(self._before) - len(self._lead)
        begun = self._rendering.generation_prompt(self._number)
        for length in range(len(begun), 0, -1):
            if self._before.endswith(begun[:length]) and MARKER.search(begun[:length]):
                return len(self._before)
        raise self._rendering.refusal(self._number, "it begins differently when more messages follow")

    def end(self) -> int:
        """Return where it ends, with its end-of-turn token even if that is another one when more messages follow."""
        if self._after.startswith(self._alone_after):
            return self._content_end + len(self._alone_after)
        alone, here = MARKER.search(self._alone_after), MARKER.search(self._after)
        if alone is None or here is None or self._alone_after[: alone.start()] != self._after[: here.start()]:
            raise self._rendering.refusal(self._number, "it ends differently when more messages follow")
        # What may follow: the line end of ChatML; but not the EOS that Phi 3 puts after the last answer only.
        rests = self._alone_after[alone.end() :], self._after[here.end() :]
        space = rests[0][: _common_length(*rests)]
        return self._content_end + here.end() + len(space) - len(space.lstrip())


def _open_mark(text: str) -> int:
    """Return how many characters at the end of a text begin a mark such as `<think>` and do not end it."""
    at = text.rfind("<")
    return 0 if at < 0 or ">" in text[at:] else len(text) - at


def _with_anchor(message: dict[str, Any]) -> dict[str, Any]:
    """Put a mark in place of what an answer says: its content, or the name of the tool that it calls."""
    if message["content"].strip() or not message.get("tool_calls"):
        return message | {"content": ANCHOR}
    call, *others = message["tool_calls"]
    named = call | {"function": call["function"] | {"name": ANCHOR}} if "function" in call else call | {"name": ANCHOR}
    return message | {"tool_calls": [named, *others]}


def _first_tool(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or [{"name": ""}]
    return calls[0].get("function", calls[0])["name"]


def _common_length(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next(
        (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
