"""What can go wrong, as one tree.

    TrainshedError            1  the work failed
    ├── InputError            2  what a person wrote is wrong; nothing was lost
    │   ├── RecipeError       2  a key of a recipe or cluster file, with file and line
    │   ├── AddressError      2  a path or URL nobody can read
    │   ├── BadDocument       2  a line or row of a corpus, with file and line
    │   ├── TokenizerError    2  a tokenizer that is missing, broken or has no end-of-document token
    │   └── MissingExtra      2  a part of Trainshed that is not installed, with the pip line
    ├── StorageError          1  reading or writing bytes failed
    │   ├── NotFound          1  nothing at that address
    │   │   └── NoSuchName    2  what a person named (a run, weights) is not there
    │   ├── AccessDenied      1  the store refused the credentials
    │   ├── Conflict          1  a conditional write lost: somebody else wrote first
    │   ├── Fenced            1  a later attempt of the run has taken over
    │   └── NoSpace           1  the disk is full
    └── CorruptData           1  bytes that are not what their manifest says

The number is the exit code. Every error says what happened, where, and what to write instead; the command line
prints these three and nothing else (a traceback only with `--debug`). Whatever address stands in one of them, it is
without a query, a user and a password: errors end in logs, events and manifests.
"""

from __future__ import annotations

from trainshed.redaction import redacted


class TrainshedError(Exception):
    """Anything Trainshed raises on purpose.

    `what` is one sentence, `where` a place (`recipe.yaml:12`, `s3://bucket/file.jsonl:7`, a recipe key) and `hint`
    the thing to write or do instead.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what = redacted(what)
        self.where = redacted(where) if where else where
        self.hint = redacted(hint) if hint else hint
        super().__init__(self.what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n{self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (tokenising workers); keep all three parts.
        return (_rebuild, (type(self), self.what, self.where, self.hint))


def _rebuild(kind: type[TrainshedError], what: str, where: str | None, hint: str | None) -> TrainshedError:
    return kind(what, where=where, hint=hint)


class InputError(TrainshedError):
    """What a person wrote is wrong."""

    exit_code = 2


def error_with_exit_code(
    exit_code: int | None, what: str, *, where: str | None = None, hint: str | None = None
) -> TrainshedError:
    """Return the error of a process by its exit code: `InputError` after 2."""
    kind = InputError if exit_code == InputError.exit_code else TrainshedError
    return kind(what, where=where, hint=hint)


class RecipeError(InputError):
    """A key of a recipe or cluster file is wrong."""


class AddressError(InputError):
    """A path or URL that no store can read."""


class BadDocument(InputError):
    """A line or row of a corpus that holds no document."""


class TokenizerError(InputError):
    """A tokenizer that cannot do what is asked of it."""


class MissingExtra(InputError):
    """A part of Trainshed that is not installed."""

    @classmethod
    def named(cls, extra: str, needed_for: str) -> MissingExtra:
        """Return the error for a missing `pip install 'trainshed[extra]'`."""
        return cls(f"{needed_for} needs the extra '{extra}'", hint=f"pip install 'trainshed[{extra}]'")


class StorageError(TrainshedError):
    """Reading or writing bytes failed."""


class NotFound(StorageError):
    """Nothing at that address."""


class NoSuchName(NotFound):
    """Nothing of the name that a person wrote."""

    exit_code = 2


class AccessDenied(StorageError):
    """The store refused the credentials."""


class Conflict(StorageError):
    """A conditional write lost to another writer."""


class Fenced(StorageError):
    """A later attempt of the run has taken over: nothing this one writes counts any more."""


class NoSpace(StorageError):
    """The disk is full."""


class CorruptData(TrainshedError):
    """Bytes that are not what their manifest says."""
