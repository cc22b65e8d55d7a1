"""Blocks in, tokens out, in order: here, in threads, or in worker processes.

The encoder is the larger part of the work and spreads over cores by itself, so on a few cores threads of this process
are fastest: nothing is copied between processes. Parsing JSON holds the interpreter lock, though, and more than a few
cores wait for it; then each worker is a process of its own. Results are put back in the order of the blocks, so none of
this can be seen in the output.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from trainshed.data.encode.block_tokenizer import BlockTokenizer, TokenizeOptions, Tokens
from trainshed.data.workers.dealing import Dealer, Job, Numbered
from trainshed.data.workers.process import BLOCKS_AHEAD, WorkerProcess, start_fork_server

if TYPE_CHECKING:
    from trainshed.data.text.reading import Piece

INLINE_BYTES = 16 * 1024 * 1024
"""Below this, starting workers takes longer than the work."""

THREADS_UP_TO = 4
"""The most workers that are threads: one core parses some 600 MB/s of JSON, four encode as much."""

THREADS = 2
"""One parses while the encoder, on all cores, has the other's documents."""

BLOCKS_TOGETHER = 4
"""Blocks that threads encode in one call: over less than some 10 MB the encoder cannot keep its cores busy."""

Tag = TypeVar("Tag")


def default_workers(pieces: Sequence[Piece]) -> int:
    """One worker per core that we may use; for a few megabytes, the work is done in this thread."""
    small = sum(piece.bytes for piece in pieces) < INLINE_BYTES
    return 1 if small else len(os.sched_getaffinity(0))


def prepare_to_start(workers: int) -> None:
    """Begin what takes time before workers can start; called early, it runs beside our own imports."""
    if workers > THREADS_UP_TO:
        start_fork_server()


class WorkerPool:
    """The workers of one preparation."""

    def __init__(self, options: TokenizeOptions, workers: int) -> None:
        self._options, self.workers = options, workers
        self.encoder_name = ""
        self.encoder_reason = ""
        self._here: BlockTokenizer | None = None
        self.processes: list[WorkerProcess] = []

    def __enter__(self) -> WorkerPool:
        if self.workers <= THREADS_UP_TO:
            if self.workers > 1:
                # Read by the encoders' thread pools when they first start; whoever has set it has the last word.
                os.environ.setdefault("RAYON_NUM_THREADS", str(self.workers))
            self._here = BlockTokenizer(self._options, parallel=self.workers > 1)
            self.encoder_name, self.encoder_reason = self._here.encoder.name, self._here.reason
            return self
        try:
            self.processes = [WorkerProcess(self._options) for _ in range(self.workers)]
            for worker in self.processes:
                self.encoder_name, self.encoder_reason = worker.hello()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.processes:
            worker.stop()
        self.processes = []

    def map(self, jobs: Iterable[Job[Tag]]) -> Generator[tuple[Tag, Tokens]]:
        """Tokenise jobs; results come in the order of the jobs, the first error ends it."""
        here = self._here
        if here is None:
            servers = [worker.serve for worker in self.processes]
            yield from Dealer(jobs, servers, in_flight=len(servers) * BLOCKS_AHEAD + 4).results()
        elif self.workers > 1:

            def serve(dealer: Dealer[Tag]) -> None:
                _serve_here(dealer, here)

            yield from Dealer(jobs, [serve] * THREADS, in_flight=BLOCKS_TOGETHER * (THREADS + 1)).results()
        else:
            for job in jobs:
                yield job.tag, here.tokens(job)


def _serve_here(dealer: Dealer[Tag], tokenizer: BlockTokenizer) -> None:
    """Tokenise in this thread, several blocks at a time where several are waiting."""
    more = True
    while more:
        together: list[Numbered[Tag]] = []
        while more and len(together) < BLOCKS_TOGETHER:
            try:
                item = dealer.take(wait=not together)
            except queue.Empty:
                break
            more = item is not None
            together += [item] if item is not None else []
        try:
            answers = tokenizer.tokens_together([item.job for item in together])
        except Exception:
            # One of them is at fault: find out which, in order.
            for item in together:
                try:
                    dealer.answer(item, tokenizer.tokens(item.job))
                except Exception as error:
                    dealer.answer(item, error)
        else:
            for item, answer in zip(together, answers, strict=True):
                dealer.answer(item, answer)
