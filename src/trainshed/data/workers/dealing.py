"""Dealing numbered jobs to several servers and gathering the answers in order.

One thread reads the corpus and numbers the blocks, one thread per server works or waits for a worker. How far reading
may run ahead of writing is bounded, so memory stays flat when one block is slow. An error is an answer like any other:
it is raised in its turn, so the first bad line of a corpus is the one reported, whichever server was faster.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from trainshed.data.encode.block_tokenizer import Tokens

if TYPE_CHECKING:
    from trainshed.data.text.reading import Block

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class Job(Generic[Tag]):
    """A block to tokenise; `tag` comes back with the result untouched."""

    block: Block
    key: str
    where: str
    compare: bool
    tag: Tag


@dataclass(frozen=True)
class Numbered(Generic[Tag]):
    """A job with its place in the order."""

    number: int
    job: Job[Tag]


class Dealer(Generic[Tag]):
    """Runs servers over jobs. A server is called once with the dealer, and takes and answers until there is no more."""

    def __init__(
        self, jobs: Iterable[Job[Tag]], servers: Sequence[Callable[[Dealer[Tag]], None]], in_flight: int
    ) -> None:
        self._jobs, self._servers = jobs, servers
        self._slots = threading.Semaphore(in_flight)
        self._todo: queue.SimpleQueue[Numbered[Tag] | None] = queue.SimpleQueue()
        self._answers: dict[int, tuple[Tag, Tokens] | BaseException] = {}
        self._changed = threading.Condition()
        self._total: int | None = None
        self._stopping = False

    def take(self, *, wait: bool = True) -> Numbered[Tag] | None:
        """For servers: the next job, or None when there is no more; `queue.Empty` if none can be had at once."""
        item = self._todo.get(block=wait)
        return None if self._stopping else item

    def answer(self, item: Numbered[Tag], answer: Tokens | BaseException) -> None:
        """For servers: hand in a result, or what went wrong."""
        self._put(item.number, answer if isinstance(answer, BaseException) else (item.job.tag, answer))

    def results(self) -> Generator[tuple[Tag, Tokens]]:
        """Yield every result in the order of the jobs; the first error ends it."""
        threads = [threading.Thread(target=self._read, daemon=True)]
        threads += [threading.Thread(target=server, args=(self,), daemon=True) for server in self._servers]
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
            for _ in self._servers:
                self._todo.put(None)
            for thread in threads:
                thread.join()

    def _put(self, number: int, answer: tuple[Tag, Tokens] | BaseException) -> None:
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
                self._todo.put(Numbered(number, job))
                number += 1
        except BaseException as error:
            self._put(number, error)
            return
        with self._changed:
            self._total = number
            self._changed.notify_all()
        for _ in self._servers:
            self._todo.put(None)
