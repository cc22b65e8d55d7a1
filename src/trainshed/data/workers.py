"""Blocks in, tokens out, in order: worker processes for large corpora, none for small ones.

Each worker is a process of its own (parsing JSON holds the interpreter lock, and so does the encoder), takes blocks
over a pipe and answers in order. Blocks are dealt out as workers get free; results are put back in the order of the
blocks, so the number of workers cannot be seen in the output. What is in flight is bounded, whatever the corpus.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import queue
import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainshed.data.documents import BlockTokenizer, TokenizeOptions, Tokens
from trainshed.errors import TrainshedError

if TYPE_CHECKING:
    from trainshed.data.reading import Block, Piece

INLINE_BYTES = 16 * 1024 * 1024
"""Below this, starting worker processes takes longer than the work."""

BLOCKS_AHEAD = 2
"""Blocks a worker is given at a time: one to work on, one waiting, so that it never idles for its pipe."""

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class Job(Generic[Tag]):
    """A block to tokenise; `tag` comes back with the result untouched."""

    block: Block
    key: str
    where: str
    compare: bool
    tag: Tag


def default_workers(pieces: Sequence[Piece]) -> int:
    """One worker per core that we may use; for a few megabytes, the work is done in this process."""
    small = sum(piece.bytes for piece in pieces) < INLINE_BYTES
    return 1 if small else len(os.sched_getaffinity(0))


def start_fork_server() -> multiprocessing.context.ForkServerContext:
    """Start the process that workers are forked from; called early, its imports overlap with ours.

    It imports the encoder once and forks workers that share it; unlike fork from this process it is safe beside our
    threads, and the workers inherit no pipe, so that each one sees it when we are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainshed.data.worker_imports"])
    multiprocessing.forkserver.ensure_running()
    return context


class WorkerPool:
    """A fixed set of workers for one preparation."""

    def __init__(self, options: TokenizeOptions, workers: int) -> None:
        self._options, self.workers = options, workers
        self.encoder_name = ""
        self.encoder_reason = ""
        self._inline: BlockTokenizer | None = None
        self._processes: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def __enter__(self) -> WorkerPool:
        if self.workers <= 1:
            self._inline = BlockTokenizer(self._options)
            self.encoder_name, self.encoder_reason = self._inline.encoder.name, self._inline.reason
            return self
        context = start_fork_server()
        for _ in range(self.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, self._options), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))
        for process, connection in self._processes:
            answer = _receive(process, connection)
            if isinstance(answer, BaseException):
                self.__exit__()
                raise answer
            self.encoder_name, self.encoder_reason = answer
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._processes:
            connection.close()
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes.clear()

    def map(self, jobs: Iterable[Job[Tag]]) -> Generator[tuple[Tag, Tokens]]:
        """Tokenise jobs; results come in the order of the jobs, the first error ends it."""
        if self._inline is not None:
            for job in jobs:
                yield job.tag, self._inline.tokens(job.block, job.key, job.where, compare=job.compare)
            return
        yield from _Dealer(self._processes, jobs).results()


class _Dealer(Generic[Tag]):
    """Deals jobs to workers and gathers their answers in order.

    One thread reads the corpus and numbers the blocks; one thread per worker sends and receives. `_slots` bounds how
    far reading may run ahead of writing, so memory stays flat when one block is slow. An error is an answer like any
    other: it is raised in its turn, so the first bad line of a corpus is the one reported, whichever worker was faster.
    """

    def __init__(
        self,
        processes: list[tuple[multiprocessing.process.BaseProcess, Connection]],
        jobs: Iterable[Job[Tag]],
    ) -> None:
        self._processes, self._jobs = processes, jobs
        self._slots = threading.Semaphore(len(processes) * BLOCKS_AHEAD + 4)
        self._todo: queue.SimpleQueue[tuple[int, Job[Tag]] | None] = queue.SimpleQueue()
        self._answers: dict[int, tuple[Tag, Tokens] | BaseException] = {}
        self._changed = threading.Condition()
        self._total: int | None = None
        self._stopping = False

    def results(self) -> Generator[tuple[Tag, Tokens]]:
        threads = [threading.Thread(target=self._read, daemon=True)]
        threads += [
            threading.Thread(target=self._serve, args=(process, connection), daemon=True)
            for process, connection in self._processes
        ]
        for thread in threads:
            thread.start()
        try:
            number = 0
            while True:
                with self._changed:
                    self._changed.wait_for(lambda n=number: n in self._answers or self._total == n)
                    if number not in self._answers:
                        return
                    answer = self._answers.pop(number)
                if isinstance(answer, BaseException):
                    raise answer
                self._slots.release()
                number += 1
                yield answer
        finally:
            self._stopping = True
            self._slots.release()
            for _ in self._processes:
                self._todo.put(None)
            for thread in threads:
                thread.join()

    def _answer(self, number: int, answer: tuple[Tag, Tokens] | BaseException) -> None:
        with self._changed:
            self._answers[number] = answer
            self._changed.notify_all()

    def _read(self) -> None:
        number = 0
        try:
            for job in self._jobs:
                self._slots.acquire()
                if self._stopping:
                    return
                self._todo.put((number, job))
                number += 1
        except BaseException as error:
            self._answer(number, error)
            return
        with self._changed:
            self._total = number
            self._changed.notify_all()
        for _ in self._processes:
            self._todo.put(None)

    def _serve(self, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
        waiting: list[tuple[int, Tag]] = []
        more = True
        try:
            while more or waiting:
                if more and len(waiting) < BLOCKS_AHEAD:
                    try:
                        # With answers outstanding, do not sit on the queue: the worker may have something to say.
                        item = self._todo.get(block=not waiting)
                    except queue.Empty:
                        pass
                    else:
                        more = item is not None and not self._stopping
                        if item is not None and more:
                            number, job = item
                            waiting.append((number, job.tag))
                            _send(process, connection, (job.block, job.key, job.where, job.compare))
                        continue
                answer = _receive(process, connection)
                number, tag = waiting.pop(0)
                self._answer(number, answer if isinstance(answer, BaseException) else (tag, answer))
        except TrainshedError as died:
            for number, _ in waiting:
                self._answer(number, died)


def _send(process: multiprocessing.process.BaseProcess, connection: Connection, item: object) -> None:
    try:
        connection.send(item)
    except (BrokenPipeError, ConnectionResetError):
        raise _died(process) from None


def _receive(process: multiprocessing.process.BaseProcess, connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        raise _died(process) from None


def _died(process: multiprocessing.process.BaseProcess) -> TrainshedError:
    process.join(timeout=5)
    return TrainshedError(
        f"a tokenising worker died (exit code {process.exitcode})",
        hint="-9 usually means out of memory: write fewer --workers. A rerun goes on where this stopped",
    )


def _work(connection: Connection, options: TokenizeOptions) -> None:
    """The worker process: announce the encoder, then answer blocks until the pipe closes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer = BlockTokenizer(options)
        connection.send((tokenizer.encoder.name, tokenizer.reason))
    except Exception as error:
        connection.send(error)
        return
    inbox: queue.Queue[object] = queue.Queue(maxsize=1)
    threading.Thread(target=_take, args=(connection, inbox), daemon=True).start()
    while (item := inbox.get()) is not None:
        block, key, where, compare = item  # type: ignore[misc]
        try:
            answer: object = tokenizer.tokens(block, key, where, compare=compare)
        except Exception as error:
            answer = error if isinstance(error, TrainshedError) else RuntimeError(f"{type(error).__name__}: {error}")
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def _take(connection: Connection, inbox: queue.Queue[object]) -> None:
    """Keep the pipe empty while the worker computes, so that neither side can block the other for ever."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(None)
