"""`eval`: what a trained model is measured by, when, and on what."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from trainshed.recipe.section import NotNegativeInt, PositiveInt, Problem, Section, Text, as_list

if TYPE_CHECKING:
    from trainshed.recipe.schema import Recipe

VALIDATION = "validation"
"""What `perplexity` calls the validation sets of the recipe itself."""

Texts = Annotated[
    tuple[Text, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(as_list, json_schema_input_type=str | Annotated[list[str], Field(min_length=1)]),
]
"""One text or a list of them."""


class Question(Section):
    """A question, and words of which the answer must contain one."""

    ask: Text = Field(description="What the model is asked")
    expect: Texts = Field(description="The answer counts where it contains one of these, in upper or lower case")


class QuestionFile(Section):
    """A file of questions."""

    questions: Annotated[tuple[Question, ...], Field(strict=False, min_length=1)] = Field(
        description="The questions", examples=["[{ask: What is the capital of France?, expect: [Paris]}]"]
    )


class Evaluation(Section):
    """What checkpoints are measured by; the last one always is, in a stage of its own."""

    every: PositiveInt | None = Field(
        None, description="Also every so many steps, on checkpoints (a multiple of `checkpoint.every`)"
    )
    perplexity: Texts | None = Field(
        None,
        description="Loss, perplexity and bits per byte on `validation` (the recipe's own sets) or on prepared tokens "
        "(a prefix or a folder)",
        examples=[["validation", "/data/wiki"]],
    )
    tasks: Texts | None = Field(None, description="Tasks of lm-eval, by name", examples=[["arc_easy", "my_task"]])
    include_path: Text | None = Field(None, description="Folder with YAML tasks of your own")
    fewshot: NotNegativeInt | None = Field(
        None, description="Examples before each question of a task; left out: as the task says"
    )
    limit: PositiveInt | None = Field(None, description="Only the first so many documents of each task")
    questions: Text | None = Field(
        None, description="YAML file beside the recipe: `questions: [{ask, expect: [words]}]`"
    )
    answer_tokens: PositiveInt | None = Field(None, description="Longest answer to a question in tokens; left out: 64")
    at_least: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Share of questions that must be answered as expected; with less the stage fails"
    )
    gpus: NotNegativeInt = Field(0, description="1: a GPU of its own; 0: processors, so that no training GPU is used")

    def problems(self) -> Iterator[Problem]:
        """Something is measured, and keys belong to something that is."""
        if self.perplexity is None and self.tasks is None and self.questions is None:
            yield Problem((), "says nothing to measure", "write `perplexity`, `tasks` or `questions`")
        for key in ("include_path", "fewshot", "limit"):
            if self.tasks is None and getattr(self, key) is not None:
                yield Problem((key,), "is about tasks, and there are none", "write `tasks`, or delete it")
        for key in ("answer_tokens", "at_least"):
            if self.questions is None and getattr(self, key) is not None:
                yield Problem((key,), "is about questions, and there are none", "write `questions`, or delete it")
        if self.gpus > 1:
            yield Problem(("gpus",), f"one process on one GPU evaluates, and {self.gpus} are asked for", "gpus: 1")


def load_questions(path: str | os.PathLike[str]) -> tuple[Question, ...]:
    """Read a file of questions: a list of them, or the same below `questions`."""
    from trainshed.errors import InputError
    from trainshed.recipe.validation import validate
    from trainshed.recipe.yaml_io import decode_utf8, parse_yaml

    file = Path(path)
    try:
        text = decode_utf8(file.read_bytes(), str(file))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file)) from None
    if text.lstrip().startswith("-"):
        text = "questions:\n" + "".join(f"  {line}" for line in text.splitlines(keepends=True))
    return validate(QuestionFile, parse_yaml(text, str(file))).questions


def evaluation_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what `eval` asks of the rest of a recipe that it does not have."""
    section = recipe.eval
    assert section is not None, "only a recipe with `eval` is asked"
    every = recipe.checkpoint.every
    if not recipe.checkpoint.save:
        yield Problem(("eval",), "no checkpoint is written (`checkpoint: off`)", "delete one of the two")
    elif section.every is not None and (every is None or section.every % every):
        what = "only at the end" if every is None else f"every {every} steps"
        yield Problem(
            ("eval", "every"),
            f"checkpoints are written {what}, and {section.every} is not a multiple of that",
            f"write `checkpoint.every: {section.every}`",
        )
    if VALIDATION in (section.perplexity or ()):
        path = ("eval", "perplexity")
        if not recipe.data.validations:
            yield Problem(path, "there is no validation set", "write `data.validation`")
        if recipe.train.mode == "dpo":
            yield Problem(path, "the validation of `mode: dpo` compares answers, and has no perplexity", "delete it")
        if recipe.engine.name == "torchtune":
            yield Problem(path, "torchtune reads the text itself, so no tokens are prepared", "delete `validation`")
    if recipe.tokenizer is None and (section.tasks or section.questions):
        yield Problem(("tokenizer",), "is missing: tasks and questions are text", "tokenizer: hf://org/name")
    if recipe.engine.name == "nemo":
        yield Problem(("eval",), "checkpoints of nemo are not read here", "delete it, or write `engine: torch`")
    elif recipe.engine.name != "torch" and section.every is not None:
        yield Problem(
            ("eval", "every"), f"checkpoints of {recipe.engine.name} are evaluated at the end only", "delete it"
        )
