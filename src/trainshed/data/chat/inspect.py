"""Describe conversations as tokens: what is learned, how long they are, what was cut, and some of them token by token.

It works on prepared tokens, and on the first rows of a source before anything is prepared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from trainshed.data.chat.conversation import BadSample, SampleParser
from trainshed.data.chat.tokenize import ChatSettings, ConversationTokenizer
from trainshed.data.sampling.packing import best_fit
from trainshed.data.text.reader import InputReader, InputSlice, TextBlock, extract_rows, format_line_location
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.data.tokenize.workers import BlockTask, TokenBlock
from trainshed.data.tokens.indexed_dataset import IndexedDataset, token_dtype
from trainshed.data.tokens.manifest import TokenManifest, combine_manifests, read_token_manifest
from trainshed.data.tokens.shard_writer import ChatCounts, TokenCounts
from trainshed.data.tokens.token_files import learned_path, open_token_file, shard_prefixes
from trainshed.data.tokens.token_source import has_learned
from trainshed.reporting import SILENT, Reporter
from trainshed.storage import open_store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainshed.storage import StoreOptions

SHOWN_TOKENS = 600
"""Tokens of a conversation that are shown."""

PACKED_SAMPLE = 100_000
"""Conversations that the packing is estimated from."""

SCAN_SEQUENCES = 4096

TokenPair = tuple["NDArray[np.integer]", "NDArray[np.uint8]"]
"""The ids of one sequence, and which of them are learned."""


@dataclass(frozen=True)
class TokenRun:
    """Tokens in a row that are alike: learned or not, special or not."""

    text: str
    tokens: int
    learned: bool
    special: bool


@dataclass(frozen=True)
class ShownConversation:
    """One conversation, or its beginning."""

    number: int
    tokens: int
    learned: int
    runs: list[TokenRun]


@dataclass(frozen=True)
class ChatInspection:
    """Conversations of a source. `histogram` counts them by length: bucket b is 2^b to 2^(b+1)-1 tokens.

    `packing_efficiency` is the share of a batch that is tokens and not padding, estimated from lengths alone.
    """

    source: str
    sequences: int
    tokens: int
    learned_tokens: int
    shortest: int
    longest: int
    histogram: dict[int, int]
    sequence_length: int | None
    packing_efficiency: float | None
    begin_with_bos: int | None
    """How many begin with the BOS token; None where the tokenizer has none."""
    double_bos: int
    tokenizer_adds_bos: bool
    """Whether the tokenizer puts a BOS before text; chat templates are encoded without it, as transformers does."""
    counts: ChatCounts
    bad_lines: int
    bad_line_examples: tuple[str, ...]
    roles: dict[str, int] | None
    """Messages by role; None where only tokens are known."""
    template: str | None
    samples: list[ShownConversation] = field(default_factory=list)

    @property
    def learned_share(self) -> float:
        """The share of tokens that are learned."""
        return self.learned_tokens / self.tokens if self.tokens else 0.0

    def warnings(self) -> list[str]:
        """Return what a person should look at."""
        notes = []
        if self.double_bos:
            notes.append(f"{self.double_bos:,} conversations begin with the BOS token twice")
        if self.tokenizer_adds_bos and self.begin_with_bos is not None and self.begin_with_bos < self.sequences:
            without = self.sequences - self.begin_with_bos
            notes.append(
                f"{without:,} conversations begin without the BOS token that the tokenizer puts before text: "
                "the chat template does not write it"
            )
        if self.counts.cut_answers:
            notes.append(f"{self.counts.cut_answers:,} answers are cut off at sequence_length")
        if self.counts.dropped_too_long or self.counts.dropped_unlearned:
            dropped = self.counts.dropped_too_long + self.counts.dropped_unlearned
            notes.append(f"{dropped:,} conversations are left out as too long")
        return notes


def is_chat(prefix: str) -> bool:
    """Whether the token files of a prefix are conversations."""
    first = shard_prefixes(prefix)[0]
    return has_learned(first, read_token_manifest(first))


def inspect_conversations(
    prefix: str, tokenizer: Tokenizer | None, *, samples: int = 3, reporter: Reporter = SILENT
) -> ChatInspection:
    """Read prepared conversations once and describe them."""
    shards = shard_prefixes(prefix)
    manifests = [manifest for shard in shards if (manifest := read_token_manifest(shard))]
    manifest = combine_manifests(manifests) if len(manifests) == len(shards) else None
    description = _Description(tokenizer, samples)
    readers = [IndexedDataset(shard) for shard in shards]
    try:
        description.spread_samples(sum(reader.sequences for reader in readers))
        with reporter.task("inspect", total=sum(reader.bin_bytes for reader in readers), unit="B") as task:
            for reader in readers:
                for sequences in _sequences(reader):
                    for sequence in sequences:
                        description.add(sequence)
                    task.advance(sum(ids.nbytes for ids, _ in sequences))
    finally:
        for reader in readers:
            reader.close()
    return description.result(prefix, manifest.counts if manifest else TokenCounts(), _answers(manifest), None)


def _answers(manifest: TokenManifest | None) -> tuple[int | None, bool, str | None]:
    """Return the length, whether they are pairs, and the template that tokens were made with."""
    spec = manifest.spec.get("answers") if manifest is not None else None
    if spec is None:
        return None, False, None
    return spec["sequence_length"], spec["format"] == "preference", spec["template"]["name"]


def _sequences(reader: IndexedDataset) -> Iterator[list[TokenPair]]:
    file = open_token_file(learned_path(reader.prefix))
    try:
        for first in range(0, reader.sequences, SCAN_SEQUENCES):
            lengths = reader.lengths[first : first + SCAN_SEQUENCES].astype(np.int64)
            start, count = int(reader.pointers[first]) // reader.dtype.itemsize, int(lengths.sum())
            learned = np.empty(count, np.uint8)
            file.read_into(learned.data, start)
            cuts = np.cumsum(lengths)[:-1]
            yield list(zip(np.split(reader.read(start, count), cuts), np.split(learned, cuts), strict=True))
    finally:
        file.close()


def inspect_rows(
    source: str,
    inputs: Sequence[InputSlice],
    tokenizer: Tokenizer,
    settings: ChatSettings,
    *,
    rows: int,
    samples: int = 3,
    options: StoreOptions | None = None,
) -> ChatInspection:
    """Tokenize the first rows of a source and describe them; a bad row is counted, and stops nothing."""
    worker = ConversationTokenizer(tokenizer, settings, token_dtype(tokenizer.vocab_size).name)
    parser = SampleParser(
        settings.sample_format, dict(settings.columns), system=settings.system, thinking=settings.thinking
    )
    sequences: list[TokenPair] = []
    counts, roles, examples = TokenCounts(chat=ChatCounts()), Counter[str](), []
    for item in inputs:
        if rows <= 0:
            break
        for block in InputReader(item, *open_store(item.address, options)).blocks():
            block = _first_rows(block, rows)
            for _, row in extract_rows(block):
                rows -= 1
                if isinstance(row, dict):
                    try:
                        parsed = parser.parse(row)
                    except BadSample:
                        continue
                    roles.update(message["role"] for chat in parsed for message in chat.messages)
            tokens = worker.tokenize_block(BlockTask(block, "", item.display_address, True, None))
            sequences += _sequences_of(tokens, tokenizer)
            examples += [f"{format_line_location(item, bad.number)}: {bad.what}" for bad in tokens.bad_lines]
            counts = counts.plus(TokenCounts(bad_lines=len(tokens.bad_lines), chat=tokens.chat))
            if rows <= 0:
                break
    description = _Description(tokenizer, samples)
    description.spread_samples(len(sequences))
    for sequence in sequences:
        description.add(sequence)
    about = settings.sequence_length, settings.sample_format == "preference", settings.template.name
    return description.result(source, replace(counts, bad_line_examples=tuple(examples[:20])), about, dict(roles))


def _first_rows(block: TextBlock, rows: int) -> TextBlock:
    if not isinstance(block.payload, bytes):
        return replace(block, payload=block.payload[:rows])
    return replace(block, payload=b"\n".join(block.payload.split(b"\n", rows)[:rows]))


def _sequences_of(tokens: TokenBlock, tokenizer: Tokenizer) -> list[TokenPair]:
    assert tokens.learned is not None
    cuts = np.cumsum(np.frombuffer(tokens.lengths, "<i4"))[:-1]
    ids = np.frombuffer(tokens.data, token_dtype(tokenizer.vocab_size))
    learned = np.frombuffer(tokens.learned, np.uint8)
    return list(zip(np.split(ids, cuts), np.split(learned, cuts), strict=True)) if len(ids) else []


class _Description:
    """Adds sequences up, and keeps some of them to be shown."""

    def __init__(self, tokenizer: Tokenizer | None, samples: int) -> None:
        self._tokenizer, self._samples = tokenizer, samples
        self._lengths: list[int] = []
        self._learned = 0
        self._shown: set[int] = set()
        self._conversations: list[ShownConversation] = []
        text = tokenizer.special_texts.get("bos_token") if tokenizer is not None else None
        token = tokenizer.token(text) if tokenizer is not None and text is not None else None
        self._bos = token.id if token is not None else None
        self._begin_with_bos = self._double_bos = 0

    def spread_samples(self, total: int) -> None:
        """Choose which sequences are shown, spread evenly over all."""
        self._shown = {total * number // max(self._samples, 1) for number in range(self._samples)} if total else set()

    def add(self, sequence: TokenPair) -> None:
        ids, learned = sequence
        number = len(self._lengths)
        self._lengths.append(len(ids))
        self._learned += int(learned.sum())
        if self._bos is not None and len(ids) and ids[0] == self._bos:
            self._begin_with_bos += 1
            self._double_bos += int(len(ids) > 1 and ids[1] == self._bos)
        if number in self._shown:
            runs = _runs(ids[:SHOWN_TOKENS].tolist(), learned[:SHOWN_TOKENS].tolist(), self._tokenizer)
            self._conversations.append(ShownConversation(number, len(ids), int(learned.sum()), runs))

    def result(
        self,
        source: str,
        counts: TokenCounts,
        about: tuple[int | None, bool, str | None],
        roles: dict[str, int] | None,
    ) -> ChatInspection:
        length, pairs, template = about
        lengths = np.array(self._lengths, np.int64)
        buckets = np.bincount(np.log2(np.maximum(lengths, 1)).astype(np.int64)) if len(lengths) else np.zeros(0, int)
        together = lengths.reshape(-1, 2).sum(axis=1) if pairs and len(lengths) % 2 == 0 else lengths
        efficiency = packing_efficiency(together[:PACKED_SAMPLE].tolist(), length) if length and len(lengths) else None
        return ChatInspection(
            source=source,
            sequences=len(lengths),
            tokens=int(lengths.sum()),
            learned_tokens=self._learned,
            shortest=int(lengths.min(initial=2**62)) if len(lengths) else 0,
            longest=int(lengths.max(initial=0)),
            histogram={bucket: int(count) for bucket, count in enumerate(buckets) if count},
            sequence_length=length,
            packing_efficiency=efficiency,
            begin_with_bos=self._begin_with_bos if self._bos is not None else None,
            double_bos=self._double_bos,
            tokenizer_adds_bos=_adds_bos(self._tokenizer, self._bos),
            counts=counts.chat or ChatCounts(),
            bad_lines=counts.bad_lines,
            bad_line_examples=counts.bad_line_examples,
            roles=roles,
            template=template,
            samples=self._conversations,
        )


def _adds_bos(tokenizer: Tokenizer | None, bos: int | None) -> bool:
    return tokenizer is not None and bos is not None and tokenizer.backend.encode("a").ids[:1] == [bos]


def _runs(ids: list[int], learned: list[int], tokenizer: Tokenizer | None) -> list[TokenRun]:
    added = tokenizer.backend.get_added_tokens_decoder() if tokenizer is not None else {}
    special = {number for number, token in added.items() if token.special}
    runs = []
    # Special tokens stand alone, so that each is seen.
    for (is_learned, _, is_special), pairs in groupby(
        enumerate(zip(ids, learned, strict=True)),
        key=lambda item: (bool(item[1][1]), item[0] if item[1][0] in special else -1, item[1][0] in special),
    ):
        run_ids = [token for _, (token, _) in pairs]
        text = tokenizer.decode(run_ids) if tokenizer is not None else " ".join(map(str, run_ids))
        runs.append(TokenRun(text, len(run_ids), is_learned, is_special))
    return runs


def packing_efficiency(lengths: Sequence[int], room: int) -> float:
    """Return the share of rows of `room` tokens that is filled if conversations of these lengths are packed."""
    falling = np.sort(np.asarray(lengths, np.int64))[::-1]
    rows = int(best_fit(falling, room).max(initial=-1)) + 1
    return sum(lengths) / (rows * room) if rows else 0.0
