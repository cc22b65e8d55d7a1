"""`data`: what is read, in which proportions, and how text becomes tokens.

Data order is a function of this section, the consumed samples and the skip list, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from trainshed.recipe.registered import choice_or_registered
from trainshed.recipe.section import (
    NotNegativeInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    StoreAddresses,
    Text,
    as_list,
    by_shape,
    invalid_value,
)

SOURCE_KINDS = ("path", "tokens", "script")
TextFormat = Literal["jsonl", "json", "csv", "tsv", "parquet", "text"]
"""What a file of text can hold: one JSON object a line, one JSON array, a table, or the text itself."""
TEXT_DEFAULTS = {"key": "text", "documents": "file"}
SampleFormat = Literal["text", "chat", "instruct", "alpaca", "preference"]
"""What a line or row holds: text, a conversation, a prompt with its answer, or one with a better and a worse one."""
SAMPLE_COLUMNS: dict[str, tuple[str, ...]] = {
    "text": (),
    "chat": ("messages", "role", "content", "tools", "system"),
    "instruct": ("prompt", "answer", "system"),
    "alpaca": ("instruction", "input", "output", "system"),
    "preference": ("prompt", "chosen", "rejected", "system", "role", "content"),
}
"""The columns that `columns` can rename, by `data.format`."""
TrainOn = Literal["answers", "last", "all"]
OnTooLong = Literal["truncate", "drop", "stop"]
CHAT_KEYS = ("template", "system", "train_on", "thinking", "packing", "on_too_long")
"""Keys of `data` that only formats with answers read."""
# Fractions are typed by hand; 1/3 written with four digits is still a third.
SPLIT_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class AnswerSettings:
    """How conversations become tokens: the keys of `data` that only formats with answers read, with their defaults."""

    template: str | None
    """A name, or a .jinja file (an address, or a path that is relative to the recipe file); None: the tokenizer's."""
    system: str | None
    train_on: TrainOn
    thinking: Literal["keep", "drop"] | None
    packing: bool
    on_too_long: OnTooLong


class SourceKeys(Section):
    """Where documents come from: raw text, prepared tokens, or a program that writes text."""

    path: StoreAddresses | None = Field(
        None,
        description="Text: a path or glob, or a list (.jsonl, .parquet, .csv, .tsv, plain text; all but parquet also "
        "with .gz or .zst), relative to the current directory",
        examples=["s3://corpus/*.jsonl.zst"],
    )
    tokens: StoreAddresses | None = Field(None, description="Prepared tokens: a PREFIX of .bin/.idx files, or a list")
    script: Text | None = Field(
        None,
        description="A program run as `SCRIPT --target-dir DIR ARGS…` that writes JSONL "
        "into DIR; its path is relative to the recipe file",
    )
    args: Annotated[tuple[str, ...], Field(strict=False)] = Field((), description="Further arguments for `script`")
    format: Annotated[str, choice_or_registered("text format", TextFormat)] | None = Field(
        None,
        description="What the files hold, where names do not tell; `json` is one array, `jsonl` one object a line",
    )
    key: Text | None = Field(None, description="The field or column that holds the text; `text` if left out")
    documents: Literal["file", "line", "blank_line"] | None = Field(
        None, description="Plain text only: a document is a whole file (default), a line, or a paragraph"
    )
    columns: dict[Text, Text] | None = Field(
        None,
        description="What the file calls our columns, where it does not call them so (`data.format` says which: chat "
        "has messages, role, content, tools, system)",
        examples=[{"messages": "conversations"}],
    )
    split: Text | None = Field(
        None,
        description="The part of a Hub dataset or of the files that is read, as `datasets` writes it",
        examples=["train[:95%]"],
    )
    limit: PositiveInt | None = Field(
        None,
        description="Read only so many of the files, the first by name: a first test of a large corpus",
        examples=[100],
    )
    name: Text | None = Field(None, description="How reports call this source")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if isinstance(given, str):
            raise invalid_value(f"`{given}` is not a source", f"write {{path: {given}}}")
        if not isinstance(given, dict) or not (given.get("path") or given.get("script")):
            return given
        return given | {key: value for key, value in TEXT_DEFAULTS.items() if given.get(key) is None}

    def derived_values(self) -> dict[str, Any]:
        """Return the defaults of a source of text."""
        return TEXT_DEFAULTS if self.path or self.script else {}

    @property
    def kind(self) -> str | None:
        """Return which of `path`, `tokens` and `script` is given."""
        return next((kind for kind in SOURCE_KINDS if getattr(self, kind) is not None), None)

    def problems(self) -> Iterator[Problem]:
        """One origin, and only the keys that belong to it."""
        kinds = [kind for kind in SOURCE_KINDS if getattr(self, kind) is not None]
        if len(kinds) > 1:
            yield Problem((kinds[1],), f"`{kinds[0]}` and `{kinds[1]}` in one source", "make them two sources")
        if self.args and not self.script:
            yield Problem(("args",), "is read with `script` only", "delete it")
        if kinds == ["tokens"]:
            for key in ("format", "key", "documents", "columns", "split", "limit"):
                if getattr(self, key) is not None:
                    yield Problem((key,), "is not read: these tokens are already prepared", "delete it")


class Source(SourceKeys):
    """One source of training documents."""

    weight: PositiveFloat | None = Field(
        None, description="Share of the samples; given for all sources or for none (then by number of tokens)"
    )

    def problems(self) -> Iterator[Problem]:
        """A source needs an origin."""
        yield from super().problems()
        if self.kind is None:
            yield Problem(
                (),
                "a source without `path`, `tokens` or `script`",
                "write for example `path: corpus/*.jsonl`",
            )


class ValidationSource(SourceKeys):
    """The documents the loss is measured on, and how often. Without an origin they come from `data.split`."""

    every: PositiveInt = Field(500, description="Steps between two measurements")
    batches: PositiveInt = Field(20, description="Global batches per measurement")
    prompts: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="Questions that the model answers at each measurement; the answers are kept with the run",
        examples=[["What is the capital of France?"]],
    )
    answer_tokens: PositiveInt | None = Field(
        None, description="Longest answer to one of `prompts`, in tokens; left out: 64"
    )

    def problems(self) -> Iterator[Problem]:
        """Answers are to prompts."""
        yield from super().problems()
        if self.answer_tokens is not None and self.prompts is None:
            yield Problem(("answer_tokens",), "is read with `prompts` only", "write `prompts: [...]`, or delete it")


SET_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]*$"
SetName = Annotated[str, Field(pattern=SET_NAME_PATTERN)]


def _validation_shape(value: Any) -> str:
    """Tell several named sets from one: below each name stands a mapping, and no name is a key of a set."""
    is_named = (
        isinstance(value, dict)
        and bool(value)
        and not any(key in ValidationSource.model_fields for key in value)
        and all(isinstance(part, dict | BaseModel) for part in value.values())
    )
    return "(named sets)" if is_named else "(one set)"


ValidationSection = Annotated[
    Annotated[ValidationSource, Tag("(one set)")] | Annotated[dict[SetName, ValidationSource], Tag("(named sets)")],
    Discriminator(_validation_shape),
]
"""One `ValidationSource`, or several by their names."""


class Split(Section):
    """How the documents of the training sources are shared out."""

    train: PositiveFloat = Field(description="Fraction of documents to train on", examples=[0.98])
    validation: Annotated[float, Field(ge=0)] = Field(0.0, description="Fraction to measure the loss on")
    test: Annotated[float, Field(ge=0)] = Field(0.0, description="Fraction kept apart from both")

    def problems(self) -> Iterator[Problem]:
        """Fractions are of one whole."""
        total = self.train + self.validation + self.test
        if abs(total - 1.0) > SPLIT_SUM_TOLERANCE:
            yield Problem(
                (),
                f"the fractions sum to {total:g}",
                "make them sum to 1, e.g. {train: 0.98, validation: 0.02}",
            )


SkipRange = Annotated[tuple[NotNegativeInt, PositiveInt], Field(strict=False)]


class DataSection(Section):
    """The data of a run."""

    synthetic: bool = Field(
        False, description="Random tokens in place of data, for benchmarks; `data: synthetic` for short"
    )
    sequence_length: PositiveInt | None = Field(
        None,
        description="Tokens per sample; only synthetic data may leave it out (then the model's longest)",
        examples=[8192],
    )
    seed: NotNegativeInt = Field(1234, description="Seed of the data order")
    format: SampleFormat | None = Field(
        None,
        description="What a line holds: text, a conversation (chat), a prompt with its answer (instruct, alpaca), or a "
        "prompt with a better and a worse answer (preference); left out: text, chat with `mode: finetune`, preference "
        "with `mode: dpo`",
    )
    template: Text | None = Field(
        None,
        description="Chat template: a name (chatml, gemma, llama3, mistral, plain, qwen) or a .jinja file, with a path "
        "relative to the recipe file; left out: the tokenizer's own",
        examples=["chatml"],
    )
    system: Text | None = Field(None, description="System prompt of conversations that have none")
    train_on: TrainOn | None = Field(
        None,
        description="Which tokens are learned: of all answers (if left out), of the last answer alone, or all",
    )
    thinking: Literal["keep", "drop"] | None = Field(
        None,
        description="Thinking traces in answers: keep or drop them; left out: data that has some is an error",
    )
    document_mask: bool | None = Field(
        None,
        description="Keep the documents of a sample apart: attention, positions and loss do not cross from one into "
        "the next; left out: false for text, true for conversations",
    )
    packing: bool | None = Field(
        None, description="Put several conversations into one sample of `sequence_length`; left out: true"
    )
    on_too_long: OnTooLong | None = Field(
        None,
        description="A conversation longer than `sequence_length`: truncate it (if left out), drop it, or stop; what "
        "is truncated or dropped is counted",
    )
    train: Annotated[
        tuple[Source, ...],
        Field(strict=False),
        BeforeValidator(as_list, json_schema_input_type=Source | list[Source]),
    ] = Field((), description="One source or a list of them")
    validation_: ValidationSection | None = Field(
        None,
        alias="validation",
        description="Measure the loss on other documents during the run: one set, or several by name "
        "(`{articles: {path: …}, code: {path: …}}`), of which `early_stop` and `checkpoint.best` read the first",
    )
    split: Split | None = Field(None, description="Share the documents of `train` out, where one corpus feeds both")
    skip: Annotated[tuple[SkipRange, ...], Field(strict=False)] = Field(
        (), description="Sample ranges [start, stop) that are left out; may grow while a run goes on"
    )
    stage: Literal["direct", "nvme", "shm"] = Field(
        "direct", description="Where ranks read tokens: the store itself, a copy on local disk, or in memory"
    )
    shards: PositiveInt = Field(1, description="Number of .bin/.idx pairs that prepared text is written to")
    eod: Annotated[Annotated[bool, Tag("(true or false)")] | Annotated[Text, Tag("(text)")], by_shape] = Field(
        True,
        description="End-of-document token after each document: the tokenizer's, none, or this one",
    )
    bos: bool = Field(False, description="Begin-of-sequence token before each document")
    on_bad_line: Literal["stop", "skip"] = Field("stop", description="A line that holds no document: stop, or count it")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("split"), dict) and given.get("validation") is None:
            share = given["split"].get("validation")
            if isinstance(share, int | float) and share > 0:
                return given | {"validation": {}}
        return given

    @property
    def validation(self) -> ValidationSource | None:
        """The one validation set; None where there is none, or where there are several by name."""
        return self.validation_ if isinstance(self.validation_, ValidationSource) else None

    @property
    def named_validations(self) -> dict[str, ValidationSource]:
        """The validation sets that have names, in order; none where there is one without."""
        return self.validation_ if isinstance(self.validation_, dict) else {}

    @property
    def validations(self) -> dict[str, ValidationSource]:
        """Every validation set by its name, the one that decides first; one without a name is called `validation`."""
        return self.named_validations or ({} if self.validation is None else {"validation": self.validation})

    @property
    def prompted(self) -> tuple[str, ValidationSource] | None:
        """The validation set that asks the model something, with its key; None where none does."""
        for name, source in self.validations.items():
            if source.prompts is not None:
                return (f"data.validation.{name}" if self.named_validations else "data.validation"), source
        return None

    @property
    def answers(self) -> AnswerSettings:
        """How conversations become tokens."""
        return AnswerSettings(
            template=self.template,
            system=self.system,
            train_on=self.train_on or "answers",
            thinking=self.thinking,
            packing=self.packing is not False,
            on_too_long=self.on_too_long or "truncate",
        )

    @property
    def template_file(self) -> str | None:
        """The chat template's file, where it is one that lies beside the recipe."""
        is_file = self.template is not None and self.template.endswith(".jinja") and "://" not in self.template
        return self.template if is_file else None

    def weights(self) -> tuple[float, ...] | None:
        """Return the sources' shares scaled to sum to 1, or None where they follow the number of tokens."""
        given = [source.weight for source in self.train if source.weight is not None]
        total = sum(given)
        return tuple(weight / total for weight in given) if given else None

    def problems(self) -> Iterator[Problem]:
        """Sources, weights, split and skip ranges against each other."""
        if self.synthetic:
            unread = (
                ("train", self.train),
                ("validation", self.validations),
                ("split", self.split),
                ("skip", self.skip),
            )
            for key, value in unread:
                if value:
                    yield Problem((key,), "is not read with synthetic data", "delete it, or `synthetic`")
        else:
            if not self.train:
                yield Problem(("train",), "is missing", "train: [{path: corpus/*.jsonl}], or `data: synthetic`")
            if self.sequence_length is None:
                yield Problem(("sequence_length",), "is missing", "sequence_length: 8192")
        yield from self._weight_problems()
        yield from self._validation_problems()
        yield from skip_problems(self.skip)

    def _weight_problems(self) -> Iterator[Problem]:
        without = [index for index, source in enumerate(self.train) if source.weight is None]
        if without and len(without) < len(self.train):
            yield Problem(
                ("train", without[0], "weight"),
                "is missing: other sources have a weight",
                "give every source a weight, or none (then shares follow the number of tokens)",
            )
        names = [source.name for source in self.train if source.name]
        for index, source in enumerate(self.train):
            if source.name and names.count(source.name) > 1:
                yield Problem(("train", index, "name"), f"two sources are called `{source.name}`", "rename one")
                break

    def _validation_problems(self) -> Iterator[Problem]:
        sets = self.validations
        if not sets:
            return
        split_sets = [name for name, source in sets.items() if source.kind is None]
        for name in split_sets if self.split is None else ():
            yield Problem(
                ("validation", name) if self.named_validations else ("validation",),
                "has no documents",
                "write `path: …` there, or `split: {train: 0.98, validation: 0.02}` under `data`",
            )
        if self.split is not None and not split_sets:
            yield Problem(("split",), "`validation` already has its own documents", "delete `split`, or the source")
        yield from self._named_set_problems()
        if self.split is not None and split_sets and not self.split.validation:
            yield Problem(
                ("split", "validation"),
                "is 0, but the loss is to be measured",
                "split: {train: 0.98, validation: 0.02}",
            )

    def _named_set_problems(self) -> Iterator[Problem]:
        """Sets are measured together with the first; one of them at most asks the model something."""
        first = next(iter(self.validations.values()))
        asking = [name for name, source in self.named_validations.items() if source.prompts is not None]
        for name, source in self.named_validations.items():
            if source.every % first.every:
                yield Problem(
                    ("validation", name, "every"),
                    f"is not a multiple of {first.every}, that of the first set: they are measured together",
                    f"write {source.every // first.every * first.every or first.every}",
                )
        for name in asking[1:]:
            yield Problem(("validation", name, "prompts"), f"`{asking[0]}` has prompts already", "keep them in one set")


def skip_problems(ranges: Iterable[tuple[int, int]]) -> Iterator[Problem]:
    """Yield empty ranges of skipped samples, and those that overlap or stand in another order."""
    end = 0
    for index, (start, stop) in enumerate(ranges):
        if start >= stop:
            yield Problem(("skip", index), f"[{start}, {stop}] is empty", "write [start, stop] with start < stop")
        elif start < end:
            yield Problem(
                ("skip", index),
                f"[{start}, {stop}] begins before the range above it ends",
                "sort the ranges and join those that overlap",
            )
        end = max(end, stop)


def expand_data(value: Any) -> Any:
    """Let `data: synthetic` stand for `data: {synthetic: true}`."""
    if value == "synthetic":
        return {"synthetic": True}
    if isinstance(value, str):
        raise invalid_value(
            f"`{value}` is not a data section", "write `data: {sequence_length: …, train: [{path: …}]}`"
        )
    return value
