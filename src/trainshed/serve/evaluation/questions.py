"""Questions with expected words: a quick gate that says whether a model still makes sense.

A question counts where the answer contains one of its expected words, in upper or lower case.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainshed.errors import TrainshedError
from trainshed.recipe.evaluation import Question
from trainshed.reporting import SILENT, Reporter
from trainshed.serve.request import (
    GenerationEvent,
    GenerationFailed,
    GenerationFinished,
    Generator,
    OutputToken,
    SamplingParams,
)
from trainshed.serve.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class AskedQuestion:
    """A question, the answer of the model, and the expected word that is in it; None: none is."""

    ask: str
    answer: str
    expect: tuple[str, ...]
    contains: str | None


AnswerQuestions = Callable[[Sequence[str], Callable[[int], None]], list[str]]
"""Answers texts, always the same; it calls its second argument with how many more answers there are."""


def ask_questions(
    questions: Sequence[Question], answer: AnswerQuestions, reporter: Reporter = SILENT
) -> list[AskedQuestion]:
    """Ask all questions, and look for the expected words in the answers."""
    with reporter.task("questions", total=len(questions), unit="questions") as task:
        answers = answer([question.ask for question in questions], task.advance)
    return [
        AskedQuestion(question.ask, text, tuple(question.expect), _contained(text, question.expect))
        for question, text in zip(questions, answers, strict=True)
    ]


def question_scores(asked: Sequence[AskedQuestion]) -> dict[str, float]:
    """Return the share of questions whose answer contains an expected word."""
    return {"score": sum(question.contains is not None for question in asked) / len(asked)}


def question_details(asked: Sequence[AskedQuestion]) -> dict[str, Any]:
    """Return every question with its answer."""
    return {"questions": [asdict(question) for question in asked]}


def _contained(answer: str, expected: Sequence[str]) -> str | None:
    return next((word for word in expected if word.casefold() in answer.casefold()), None)


@dataclass(frozen=True)
class TextRequest:
    """A prompt for a generator, and how its output is sampled."""

    prompt: list[int]
    sampling: SamplingParams


def generate_texts(
    generator: Generator, requests: Sequence[TextRequest], on_done: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Return the text of each output; all requests are submitted at once, and the scheduler batches them."""
    events: queue.Queue[tuple[int, GenerationEvent]] = queue.Queue()
    texts = [""] * len(requests)
    for number, request in enumerate(requests):
        generator.submit(request.prompt, request.sampling, lambda event, number=number: events.put((number, event)))
    open_requests = len(requests)
    while open_requests:
        number, event = events.get()
        if isinstance(event, OutputToken):
            texts[number] += event.text
        elif isinstance(event, GenerationFailed):
            raise TrainshedError(event.reason)
        elif isinstance(event, GenerationFinished):
            texts[number] += event.text
            open_requests -= 1
            on_done(1)
    return texts


def generator_answers(generator: Generator, tokenizer: ChatTokenizer, *, max_tokens: int) -> AnswerQuestions:
    """Answer with a generator, always by the likeliest token.

    A model whose tokenizer has a chat template is asked in a chat, another goes on with the text of the question.
    """
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)

    def prompt(text: str) -> list[int]:
        return (
            tokenizer.encode_chat([{"role": "user", "content": text}]) if tokenizer.can_chat else tokenizer.encode(text)
        )

    def answer(texts: Sequence[str], on_answer: Callable[[int], None]) -> list[str]:
        return generate_texts(generator, [TextRequest(prompt(text), sampling) for text in texts], on_answer)

    return answer
