"""The prepared sources of a run: where their tokens are, what they were when it began, and whether they still are.

A run keeps this with itself. Tokens that are no longer those it began with stop it: which samples it has seen would
no longer be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainshed.data.tokens.fingerprint import Fingerprint, difference, fingerprint_from
from trainshed.errors import CorruptData, InputError
from trainshed.reporting import SILENT, Reporter

if TYPE_CHECKING:
    from trainshed.storage import StoreOptions


@dataclass(frozen=True)
class PreparedSource:
    """A source whose tokens are there and proven.

    `name` is for reports, `label` for the shuffle: renaming a source must not change the order. `content` identifies
    the lengths of its documents where a manifest tells it; None: they must be read. `files` says what the token files
    were; runs of earlier versions have not kept it.
    """

    name: str
    label: str
    weight: float | None
    prefixes: tuple[str, ...]
    content: str | None
    documents: int
    tokens: int
    reused: bool
    files: tuple[Fingerprint, ...] = ()

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> PreparedSource:
        """Read what `asdict` gave."""
        files = tuple(fingerprint_from(each) for each in plain.get("files", ()))
        return cls(**plain | {"prefixes": tuple(plain["prefixes"]), "files": files})


@dataclass(frozen=True)
class PreparedData:
    """The prepared sources of a run; `validation` is its own source, None where it has none or shares the corpus."""

    sources: tuple[PreparedSource, ...]
    validation: PreparedSource | None = None

    @property
    def all_sources(self) -> tuple[PreparedSource, ...]:
        """The sources of training, then that of validation."""
        return (*self.sources, self.validation) if self.validation is not None else self.sources

    def source(self, label: str) -> PreparedSource | None:
        """Return the source of a label."""
        return next((source for source in self.all_sources if source.label == label), None)

    def to_plain(self) -> dict[str, Any]:
        """As JSON takes it: kept with the run, so that ranks need not look for sources again."""
        return {
            "sources": [asdict(source) for source in self.sources],
            "validation": self.validation and asdict(self.validation),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> PreparedData:
        """Read what `to_plain` gave."""
        validation = plain["validation"]
        sources = tuple(PreparedSource.from_plain(each) for each in plain["sources"])
        return cls(sources, validation and PreparedSource.from_plain(validation))

    def check_files(self, options: StoreOptions | None = None, reporter: Reporter = SILENT) -> None:
        """Hold every token file against what it was when it was proven: sizes, times and some blocks, not all bytes."""
        for source in self.all_sources:
            check_files(source.files, options, reporter)


def check_files(files: Sequence[Fingerprint], options: StoreOptions | None, reporter: Reporter) -> None:
    """Raise for the first token file that is not what it was; a new time alone is told where no manifest can settle it.

    Files of others often come without a manifest and are copied about: there, blocks that are the same count.
    """
    for file in files:
        found = difference(file, options)
        if found is None:
            continue
        kind, words = found
        if kind == "time" and file.checksum is None:
            reporter.warn(f"{file.path} was written again since the run began; the blocks looked at are the same")
        elif kind == "time":
            raise CorruptData(
                "this token file was written again since it was proven",
                where=file.path,
                hint="`trainshed run RECIPE`, or submitting it again, reads it whole and goes on if nothing changed",
            )
        else:
            raise changed_file(file.path, words)


def changed_file(path: str, words: str) -> CorruptData:
    """Return the error of a token file that is not what its run or its manifest knows."""
    prefix = path.rpartition(".")[0]
    return CorruptData(
        f"this token file is not the one that was proven: {words}",
        where=path,
        hint=f"put the old file back, or have it made again: remove {prefix}.* and run the recipe "
        f"(`trainshed data verify {prefix}` reads it whole)",
    )


@dataclass(frozen=True)
class BegunRun:
    """A run that has had an attempt: its name, and the data it began with."""

    name: str
    data: PreparedData


def refuse_other_tokens(began: BegunRun, now: PreparedData) -> None:
    """Stop a run whose tokens are not those it began with, although each of them is proven."""
    for source in now.all_sources:
        known = began.data.source(source.label)
        if known is None or not known.files:
            continue
        if [file.content for file in known.files] == [file.content for file in source.files]:
            continue
        raise InputError(
            f"the tokens of source '{source.name}' are not those that the run {began.name} began with: "
            f"{known.tokens:,} tokens of {known.documents:,} documents then, {source.tokens:,} of "
            f"{source.documents:,} now",
            where=source.prefixes[0],
            hint=f"put back what they are made from (they were {known.prefixes[0]}), "
            "or start another run on the new ones with --id NAME",
        )
