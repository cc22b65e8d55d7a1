"""Copying a tree from any store to any other, so that it can be killed and run again at any time.

Each object appears whole or not at all, checksummed on the way. What has arrived is noted in a journal, a rerun moves
only what is missing or differs, and a manifest at the very end says that the tree is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice

from trainshed.errors import (
    AccessDenied,
    Conflict,
    CorruptData,
    InputError,
    NoSpace,
    NoSuchName,
    NotFound,
    StorageError,
    TrainshedError,
)
from trainshed.reporting import SILENT, ProgressTask, Reporter
from trainshed.storage import address as addresses
from trainshed.storage.address import join
from trainshed.storage.listing import (
    STATE_FOLDER,
    CopyItem,
    CopySource,
    find_source,
    has_pattern,
    literal_folder,
    select_items,
    total_size,
)
from trainshed.storage.manifest import FileEntry, Manifest
from trainshed.storage.open import open_folder
from trainshed.storage.store import ObjectInfo, Store, StoreOptions
from trainshed.storage.transfer import CopyJournal, CopyOutcome, SourceDenied, SourceMissing, Transfer

COPY_MANIFEST = f"{STATE_FOLDER}/manifest.json"
TASKS_FOLDER = f"{STATE_FOLDER}/tasks"
COPY_KIND = "copy"
# So many failures with nothing arriving in between mean that the next thousand would fail as well.
_GIVE_UP_AFTER = 20
_MAX_NAMED = 10


@dataclass(frozen=True)
class CopyResult:
    """What a copy did; `manifest` is the address of what it wrote last."""

    source: str
    destination: str
    files: int
    bytes: int
    copied_files: int
    copied_bytes: int
    manifest: str
    complete: bool

    def as_dict(self) -> dict[str, object]:
        """The result for a report."""
        return asdict(self)


def copy_tree(
    src: str,
    dst: str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    limit: int | None = None,
    task: tuple[int, int] | None = None,
    workers: int = 16,
    reporter: Reporter = SILENT,
    options: StoreOptions | None = None,
    journal_seconds: float = 5.0,
) -> CopyResult:
    """Copy everything `src` means into the folder `dst`.

    `task=(i, n)` copies every n-th file; the task that finishes last turns the n markers into the one manifest.
    Files that are gone or refused are reported once, the rest is copied, and the copy ends with an error that names
    them and without a manifest.
    """
    if task is not None and not 0 <= task[0] < task[1]:
        raise InputError(f"task {task[0]} of {task[1]}", hint="tasks are counted from 0 to N-1")
    if workers < 1:
        raise InputError(f"{workers} workers", hint="write at least 1")
    _check_not_inside_source(src, dst)
    destination = open_folder(dst, options)
    try:
        source = find_source(src, options, reporter)
        items = select_items(source, include, exclude, limit, task)
    except NotFound as error:
        # The source names nothing: that is wrong input, not a store that failed.
        raise NoSuchName(error.what, where=error.where, hint=error.hint) from None
    spec: dict[str, object] = {
        "from": source.address,
        "source": source.pinned,
        "include": sorted(include),
        "exclude": sorted(exclude),
        "limit": limit,
    }
    copy = _Copy(source, destination, spec, task, reporter, options or StoreOptions(), journal_seconds)
    return copy.run(items, workers)


class _Copy:
    def __init__(
        self,
        source: CopySource,
        destination: Store,
        spec: dict[str, object],
        task: tuple[int, int] | None,
        reporter: Reporter,
        options: StoreOptions,
        journal_seconds: float,
    ) -> None:
        self._source = source
        self._destination = destination
        self._spec = spec
        self._task = task
        self._reporter = reporter
        self._retry = options.retry
        number, count = task or (0, 1)
        self._name = f"{number:05d}-of-{count:05d}"
        self._mark = f"{TASKS_FOLDER}/{self._name}.json" if task else COPY_MANIFEST
        self._journal = CopyJournal(destination, self._name, every_seconds=journal_seconds, reporter=reporter)

    def run(self, items: list[CopyItem], workers: int) -> CopyResult:
        listing = list(self._destination.list())
        there = {info.path: info for info in listing}
        self._refuse_another_source(there)
        records = self._journal.load(listing)
        transfer = Transfer(self._destination, there, records, self._journal, self._retry, self._reporter)
        proven = [item for item in items if transfer.already_copied(item)]
        waiting = [item for item in items if not transfer.already_copied(item)]
        if proven and waiting:
            self._reporter.note(f"{len(proven)} of {len(items)} files are there already")
        if waiting:
            self._unmark(there)
        outcomes = [transfer.proven(item) for item in proven]
        outcomes += self._move(transfer, waiting, workers)
        files = [FileEntry(o.record.path, o.record.size, o.record.checksum) for o in outcomes if o.record]
        manifest = Manifest.of(COPY_KIND, self._spec, files)
        self._write_mark(manifest, there)
        complete = self._merge() if self._task else True
        return CopyResult(
            source=self._source.pinned,
            destination=self._destination.url,
            files=len(files),
            bytes=manifest.total_bytes,
            copied_files=sum(outcome.moved for outcome in outcomes),
            copied_bytes=sum(outcome.record.size for outcome in outcomes if outcome.moved and outcome.record),
            manifest=join(self._destination.url, self._mark),
            complete=complete,
        )

    def _move(self, transfer: Transfer, items: list[CopyItem], workers: int) -> list[CopyOutcome]:
        outcomes: list[CopyOutcome] = []
        failed: list[tuple[CopyItem, TrainshedError]] = []
        gone: list[CopyItem] = []
        in_a_row = 0
        pool = ThreadPoolExecutor(workers, thread_name_prefix="trainshed-copy")
        with self._reporter.task("copying", total=total_size(items), unit="B") as task:
            try:
                for item, future in _in_flight(pool, transfer, items, task, workers, self._journal.tick):
                    try:
                        outcome = future.result()
                    except SourceMissing:
                        gone.append(item)
                        self._reporter.warn(f"{item.path}: the source does not have it")
                        continue
                    except SourceDenied as refused:
                        if not self._source.separate:
                            raise refused.error from None
                        failed.append((item, refused.error))
                        self._reporter.warn(f"{item.path}: {refused.error.what}")
                    except (NoSpace, AccessDenied, Conflict):
                        raise  # the destination's: the next file would meet it too
                    except (StorageError, CorruptData) as error:
                        failed.append((item, error))
                        self._reporter.warn(f"{item.path}: {error.what}")
                    else:
                        in_a_row = 0
                        outcomes.append(outcome)
                        task.describe(f"{len(outcomes)} of {len(items)} files")
                        continue
                    in_a_row += 1
                    if in_a_row >= _GIVE_UP_AFTER:
                        raise failed[-1][1]
            except BaseException as error:
                transfer.stop()
                # Ctrl-C waits for no server: what has arrived counts, as after a kill.
                pool.shutdown(wait=not isinstance(error, KeyboardInterrupt), cancel_futures=True)
                with suppress(StorageError):  # the first error is the one to tell
                    self._journal.close()
                raise
            pool.shutdown()
        self._journal.close()
        if gone or failed:
            raise _incomplete_error(self._destination, outcomes, gone, failed)
        return outcomes

    def _refuse_another_source(self, there: dict[str, ObjectInfo]) -> None:
        if COPY_MANIFEST not in there:
            return
        earlier = Manifest.read(self._destination, COPY_MANIFEST).spec.get("from")
        if earlier != self._spec["from"]:
            raise InputError(
                f"this folder already holds a copy of {earlier}",
                where=self._destination.url,
                hint="choose another folder, for example one below it",
            )

    def _unmark(self, there: dict[str, ObjectInfo]) -> None:
        """Remove the mark of an earlier run: from here on the tree is not complete."""
        for path in {self._mark, COPY_MANIFEST}:
            if there.pop(path, None) is not None:
                self._destination.delete(path)

    def _write_mark(self, manifest: Manifest, there: dict[str, ObjectInfo]) -> None:
        if self._mark in there and self._destination.read(self._mark) == manifest.to_bytes():
            return
        manifest.write(self._destination, self._mark)

    def _merge(self) -> bool:
        """Write the manifest of the whole once every task has its marker; it does not matter who does it."""
        assert self._task is not None
        count = self._task[1]
        marks = [f"{TASKS_FOLDER}/{number:05d}-of-{count:05d}.json" for number in range(count)]
        present = {info.path for info in self._destination.list(TASKS_FOLDER)}
        if not present.issuperset(marks):
            return False
        parts = [Manifest.read(self._destination, mark) for mark in marks]
        for mark, part in zip(marks, parts, strict=True):
            if part.spec != self._spec:
                raise InputError(
                    f"its tasks did not copy the same thing: {part.spec} and {self._spec}",
                    where=join(self._destination.url, mark),
                    hint="give every task the same arguments, and the Hub a commit (@0123abc…), then run them again",
                )
        whole = Manifest.of(COPY_KIND, self._spec, [entry for part in parts for entry in part.files])
        whole.write(self._destination, COPY_MANIFEST)
        return True


def _in_flight(
    pool: ThreadPoolExecutor,
    transfer: Transfer,
    items: list[CopyItem],
    task: ProgressTask,
    workers: int,
    idle: Callable[[], None],
) -> Iterator[tuple[CopyItem, Future[CopyOutcome]]]:
    """Hand out work a little ahead of the workers, so that a million files do not become a million futures."""
    rest = iter(items)
    running = {pool.submit(transfer.run, item, task): item for item in islice(rest, 2 * workers)}
    while running:
        done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
        idle()  # a file that takes an hour must not keep the journal of the others waiting
        for future in done:
            item = running.pop(future)
            for following in islice(rest, 1):
                running[pool.submit(transfer.run, following, task)] = following
            yield item, future


def _check_not_inside_source(src: str, dst: str) -> None:
    if src.startswith("@"):
        return
    inner, outer = addresses.parse(dst), addresses.parse(src)
    if has_pattern(outer.path) and "**" not in outer.path:
        return  # `*.jsonl` into a folder beside them is fine
    folder = literal_folder(outer.path) if has_pattern(outer.path) else outer.path
    inner_path, outer_path = (join(a.url, p) for a, p in ((inner, inner.path), (outer, folder)))
    if inner.scheme == outer.scheme == "file":
        inner_path, outer_path = os.path.abspath(inner_path), os.path.abspath(outer_path)
    if f"{inner_path}/".startswith(outer_path.rstrip("/") + "/"):
        raise InputError(
            "the destination lies inside the source", where=dst, hint="choose a folder outside of " + outer_path
        )


def _incomplete_error(
    destination: Store, outcomes: list[CopyOutcome], gone: list[CopyItem], failed: list[tuple[CopyItem, TrainshedError]]
) -> StorageError:
    lines = [f"{item.path}: the source does not have it" for item in gone]
    lines += [f"{item.path}: {error.what}" for item, error in failed]
    shown = "\n".join(f"  {line}" for line in lines[:_MAX_NAMED])
    more = f"\n  and {len(lines) - _MAX_NAMED} more" if len(lines) > _MAX_NAMED else ""
    kind = StorageError if failed else NotFound
    return kind(
        f"{len(lines)} of {len(lines) + len(outcomes)} files could not be copied:\n{shown}{more}",
        where=destination.url,
        hint="the others are there; run the same command again, or leave these out with --exclude",
    )


__all__ = ["COPY_KIND", "COPY_MANIFEST", "TASKS_FOLDER", "CopyResult", "copy_tree"]
