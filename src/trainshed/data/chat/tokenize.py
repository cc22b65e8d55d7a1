"""Blocks of rows to blocks of tokens with their learned tokens; runs in the workers of a preparation.

Rows are parsed, rendered by the chat template and encoded in one call for a block, then cut to `sequence_length`. A row
that gives no conversation is a `BadLine`. What was too long is counted: nothing is cut or left out in silence.

Shapes: N conversations in a block, T tokens of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from trainshed.data.chat.answers import render_learned
from trainshed.data.chat.conversation import BadSample, Conversation, SampleParser, row_columns
from trainshed.data.chat.template import FIXED_DATE, MARKER, ChatTemplate, TemplateSource, find_template
from trainshed.data.chat.token_mask import TokenMasks
from trainshed.data.recipe_keys import errors_with_recipe_keys
from trainshed.data.text.reader import BadLine, extract_rows
from trainshed.data.tokenize.encoders import Encoder, EncoderName, choose_encoder, require_reference_ids
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokenize.workers import BlockTask, TokenBlock, comparison_sample, utf8_bytes
from trainshed.data.tokens.shard_writer import ChatCounts
from trainshed.errors import TokenizerError
from trainshed.recipe import Recipe
from trainshed.recipe.data import OnTooLong, SampleFormat, SourceKeys, TrainOn
from trainshed.reporting import Reporter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainshed.data.chat.conversation import Thinking
    from trainshed.data.chat.sandbox import Span
    from trainshed.storage import StoreOptions

CHAT_FORMAT = 1
"""Part of the spec: another number where the same rows would give other tokens."""


@dataclass(frozen=True)
class ChatSettings:
    """How rows become tokens: everything besides rows and tokenizer that decides the bytes of the output."""

    sample_format: SampleFormat
    template: TemplateSource
    sequence_length: int
    columns: tuple[tuple[str, str], ...] = ()
    system: str | None = None
    train_on: TrainOn = "answers"
    thinking: Thinking | None = None
    on_too_long: OnTooLong = "truncate"

    @property
    def row_columns(self) -> tuple[str, ...]:
        """The columns that rows are read from."""
        return row_columns(self.sample_format, dict(self.columns))

    def spec(self) -> dict[str, object]:
        """Return what the manifest records."""
        return {
            "chat": CHAT_FORMAT,
            "format": self.sample_format,
            "template": {"name": self.template.name, "sha256": self.template.sha256},
            "columns": dict(self.columns),
            "system": self.system,
            "train_on": self.train_on,
            "thinking": self.thinking,
            "sequence_length": self.sequence_length,
            "on_too_long": self.on_too_long,
        }


def recipe_chat_settings(
    recipe: Recipe, tokenizer: Tokenizer, source: SourceKeys | None = None, options: StoreOptions | None = None
) -> ChatSettings:
    """Return how a recipe's conversations become tokens; a source may have names of its own for columns."""
    answers, columns = recipe.data.answers, (source.columns if source is not None else None) or {}
    assert recipe.data.sequence_length is not None, "only synthetic data may leave it out"
    with errors_with_recipe_keys(recipe.where("data.template")):
        template = find_template(answers.template, tokenizer, folder=recipe.folder, options=options)
    return ChatSettings(
        sample_format=recipe.sample_format,
        template=template,
        sequence_length=recipe.data.sequence_length,
        columns=tuple(sorted(columns.items())),
        system=answers.system,
        train_on=answers.train_on,
        thinking=answers.thinking,
        on_too_long=answers.on_too_long,
    )


@dataclass
class _Rendered:
    """The conversations of one block as text; of a preference, both follow one another."""

    texts: list[str] = field(default_factory=list)
    spans: list[list[Span]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """The number of the row that each text comes from."""
    bad_lines: list[BadLine] = field(default_factory=list)


class ConversationTokenizer:
    """Turns blocks of rows into tokens; the counterpart of `BlockTokenizer` for conversations."""

    def __init__(self, tokenizer: Tokenizer, settings: ChatSettings, dtype: str, encoder: EncoderName = "auto") -> None:
        self._tokenizer, self._settings, self._dtype = tokenizer, settings, np.dtype(dtype)
        self._compare = encoder != "tokenizers"
        self.encoder: Encoder
        self.encoder, self.reason = choose_encoder(tokenizer, encoder)
        self._masks = TokenMasks(tokenizer)
        self._parser = SampleParser(
            settings.sample_format, dict(settings.columns), system=settings.system, thinking=settings.thinking
        )

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._settings.template.text, self._tokenizer.special_texts)

    @cached_property
    def _template_with_tools(self) -> ChatTemplate:
        source = self._settings.template.with_tools
        return self._template if source is None else ChatTemplate(source, self._tokenizer.special_texts)

    def tokenize_block(self, task: BlockTask[Any]) -> TokenBlock:
        """Parse, render and encode one block."""
        rendered = self._render(task)
        if task.check_against_reference and self._compare:
            require_reference_ids(self._tokenizer, self.encoder, comparison_sample(rendered.texts), task.where)
        encoded = self.encoder.encode(rendered.texts)
        learned = self._masks.learned(rendered.texts, encoded, rendered.spans)
        ends = np.cumsum(encoded.lengths)
        sequences = [
            _Sequence(encoded.ids[end - length : end], learned[end - length : end])
            for end, length in zip(ends.tolist(), encoded.lengths.tolist(), strict=True)
        ]
        kept = self._fit(sequences, rendered)
        rendered.bad_lines.sort(key=lambda bad: bad.number)
        return TokenBlock(
            data=b"".join(sequence.ids.astype(self._dtype).tobytes() for sequence in kept.sequences),
            lengths=np.array([len(sequence.ids) for sequence in kept.sequences], "<i4").tobytes(),
            documents=len(kept.sequences),
            text_bytes=utf8_bytes(rendered.texts),
            bad_lines=rendered.bad_lines,
            learned=b"".join(sequence.learned.tobytes() for sequence in kept.sequences),
            chat=kept.counts,
        )

    def tokenize_blocks(self, tasks: Sequence[BlockTask[Any]]) -> list[TokenBlock]:
        """Tokenize several blocks."""
        return [self.tokenize_block(task) for task in tasks]

    def _render(self, task: BlockTask[Any]) -> _Rendered:
        from trainshed.data.chat.sandbox import TemplateFailure, TemplateOverrun

        rendered = _Rendered()
        for number, row in extract_rows(task.block):
            if isinstance(row, BadLine):
                rendered.bad_lines.append(row)
                continue
            try:
                learned = [self._learned_text(conversation) for conversation in self._parser.parse(row)]
            except BadSample as error:
                rendered.bad_lines.append(BadLine(number, error.what, error.hint, error.fatal))
            except TemplateFailure as error:
                # How long it takes depends on the machine, so a template that takes too long is never passed over.
                fatal = isinstance(error, TemplateOverrun)
                rendered.bad_lines.append(BadLine(number, error.what, error.hint or "", fatal))
            else:
                for text, spans in learned:
                    rendered.texts.append(text)
                    rendered.spans.append(spans)
                    rendered.rows.append(number)
            if rendered.bad_lines and rendered.bad_lines[-1].fatal:
                break
        return rendered

    def _learned_text(self, conversation: Conversation) -> tuple[str, list[Span]]:
        template = self._template_with_tools if conversation.tools else self._template
        return render_learned(template, conversation, self._settings.train_on)

    def _fit(self, sequences: list[_Sequence], rendered: _Rendered) -> _Kept:
        """Cut or leave out what is longer than `sequence_length`; a pair is kept or left out as one."""
        kept = _Kept()
        together = 2 if self._settings.sample_format == "preference" else 1
        for first in range(0, len(sequences), together):
            samples = sequences[first : first + together]
            row = rendered.rows[first]
            if not all(sample.learned.any() for sample in samples):
                what = "no token of this conversation would be learned"
                hint = "look at the template: `trainshed data inspect` shows what it marks"
                rendered.bad_lines.append(BadLine(row, what, hint))
                continue
            length = sum(len(sample.ids) for sample in samples)
            kept.counts.longest = max(kept.counts.longest, length)
            if length > self._settings.sequence_length:
                if self._settings.on_too_long == "stop":
                    rendered.bad_lines.append(self._too_long(row, length))
                    break
                if self._settings.on_too_long == "drop":
                    kept.counts.dropped_too_long += 1
                    continue
                cut = _truncate(samples, self._settings.sequence_length)
                if not all(sample.learned.any() for sample in cut):
                    kept.counts.dropped_unlearned += 1
                    continue
                kept.counts.truncated += 1
                lost = any(whole.learned.sum() > short.learned.sum() for whole, short in zip(samples, cut, strict=True))
                kept.counts.cut_answers += int(lost)
                samples = cut
            kept.sequences += samples
            kept.counts.conversations += 1
            kept.counts.learned_tokens += sum(int(sample.learned.sum()) for sample in samples)
        return kept

    def _too_long(self, row: int, length: int) -> BadLine:
        pair = "this pair" if self._settings.sample_format == "preference" else "this conversation"
        return BadLine(
            row,
            f"{pair} has {length:,} tokens, more than the {self._settings.sequence_length:,} of sequence_length",
            "write --on-too-long truncate or drop, or a larger --sequence-length",
            fatal=True,
        )


@dataclass(frozen=True)
class _Sequence:
    ids: NDArray[np.uint32]
    learned: NDArray[np.uint8]


@dataclass
class _Kept:
    sequences: list[_Sequence] = field(default_factory=list)
    counts: ChatCounts = field(default_factory=ChatCounts)


def _truncate(samples: Sequence[_Sequence], room: int) -> list[_Sequence]:
    """Cut sequences at their ends so that together they have `room` tokens: the longest first."""
    limit = room // len(samples)
    short = sum(len(sample.ids) for sample in samples if len(sample.ids) <= limit)
    long = sum(1 for sample in samples if len(sample.ids) > limit)
    limit = (room - short) // max(long, 1)
    return [_Sequence(sample.ids[:limit], sample.learned[:limit]) for sample in samples]


PROBE = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "reply"}]
"""The simplest conversation, to try a template on."""


def check_markers(settings: ChatSettings, tokenizer: Tokenizer, reporter: Reporter) -> None:
    """Refuse a tokenizer that cuts special tokens of the template into pieces; say where it is merely unusual.

    A model can learn headers that are ordinary text (Zephyr's `<|user|>`). It cannot learn to stop by an end-of-turn
    token that does not exist.
    """
    from trainshed.data.chat.sandbox import TemplateFailure

    template = ChatTemplate(settings.template.text, tokenizer.special_texts)
    markers = template.literal_markers()
    try:
        text, spans = render_learned(template, Conversation([dict(message) for message in PROBE]), "answers")
    except (TemplateFailure, BadSample):
        learned_markers = markers
    else:
        markers |= set(MARKER.findall(text))
        learned_markers = {marker for start, end in spans for marker in MARKER.findall(text[start:end])}
    missing = sorted(marker for marker in markers if tokenizer.token(marker) is None)
    if missing and learned_markers & set(missing):
        raise TokenizerError(
            f"the chat template ({settings.template.name}) writes special tokens that this tokenizer does not have: "
            f"{', '.join(missing)}",
            where=tokenizer.address,
            hint="write --template with one that was made for this tokenizer, or `plain`, which needs no such tokens",
        )
    if missing:
        reporter.warn(
            f"the chat template writes {', '.join(missing)}, which this tokenizer takes for ordinary text; "
            "they are in prompts only"
        )
    if template.asks_for_date:
        reporter.note(f"the chat template asks for today's date, and gets {FIXED_DATE:%d %B %Y} on any day")
