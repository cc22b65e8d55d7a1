"""Blocks of text to blocks of tokens, in parallel and in order: in this thread, in threads, or in worker processes.

The encoder is the larger part of the work and uses several cores by itself. On a few cores, threads of this process
are fastest because nothing is copied between processes. Parsing JSON holds the interpreter lock, so with more cores
each worker is a process. Results come back in the order of the blocks, so the output does not depend on any of this.

One thread reads the corpus and numbers the blocks; one thread per worker tokenizes them or waits for its process. How
far reading may run ahead of writing is bounded, so memory stays flat when one block is slow. An error is a result like
any other and is raised in its turn: the first bad line of a corpus is the one reported.

Shapes: N documents in a block, T tokens of the block with BOS and EOD.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainshed.data.text.reader import BadLine, extract_documents
from trainshed.data.tokenize.encoders import EncodedBatch, Encoder, EncoderName, choose_encoder, require_reference_ids
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.errors import TrainshedError

if TYPE_CHECKING:
    from trainshed.data.text.reader import InputSlice, TextBlock


COMPARED_BYTES = 64 * 1024
"""How much of a shard is encoded by both encoders: enough to meet most kinds of text, a blink for the slow one."""


# Shapes:  N documents in a block, T tokens of the block with BOS and EOD.


@dataclass(frozen=True)
class BlockTokenizerConfig:
    """What every worker must know: the same for all blocks of a preparation."""

    tokenizer: Tokenizer
    eod: int | None
    bos: int | None
    dtype: str
    encoder: EncoderName = "auto"


@dataclass(frozen=True)
class TokenBlock:
    """A block as tokens: `data` is T tokens in the file's dtype, `lengths` N int32 (0: an empty document)."""

    data: bytes
    lengths: bytes
    documents: int
    text_bytes: int
    bad_lines: list[BadLine] = field(default_factory=list)


class BlockTokenizer:
    """Turns blocks into tokens; `parallel` lets the encoder use several cores by itself."""

    def __init__(self, options: BlockTokenizerConfig, *, parallel: bool = False) -> None:
        self._options = options
        self.encoder: Encoder
        self.encoder, self.reason = choose_encoder(options.tokenizer, options.encoder, parallel=parallel)

    def tokens(self, job: BlockTask[Any]) -> TokenBlock:
        """Parse, encode and lay out one block."""
        (tokens,) = self.tokens_together([job])
        return tokens

    def tokens_together(self, jobs: Sequence[BlockTask[Any]]) -> list[TokenBlock]:
        """Tokenise several blocks with one call of the encoder."""
        extracted = [extract_documents(job.block, job.key) for job in jobs]
        for job, (documents, _) in zip(jobs, extracted, strict=True):
            if job.compare and self._options.encoder != "tokenizers":
                require_reference_ids(self._options.tokenizer, self.encoder, _comparison_sample(documents), job.where)
        encoded = self.encoder.encode([document for documents, _ in extracted for document in documents])
        parts = encoded.split([len(documents) for documents, _ in extracted])
        return [
            TokenBlock(*self.lay_out(part), len(documents), _utf8_bytes(documents), bad_lines)
            for part, (documents, bad_lines) in zip(parts, extracted, strict=True)
        ]

    def lay_out(self, encoded: EncodedBatch) -> tuple[bytes, bytes]:
        """Put BOS before and EOD behind each document that is not empty, in the file's dtype."""
        import numpy as np

        dtype = np.dtype(self._options.dtype)
        extra = (self._options.bos is not None) + (self._options.eod is not None)
        if not extra:
            return encoded.ids.astype(dtype).tobytes(), encoded.lengths.astype("<i4").tobytes()
        filled = encoded.lengths > 0
        lengths = encoded.lengths + extra * filled
        ends = np.cumsum(lengths)[filled]
        out = np.empty(int(lengths.sum()), dtype)
        text = np.ones(len(out), np.bool_)
        if self._options.eod is not None:
            out[ends - 1] = self._options.eod
            text[ends - 1] = False
        if self._options.bos is not None:
            starts = ends - lengths[filled]
            out[starts] = self._options.bos
            text[starts] = False
        out[text] = encoded.ids
        return out.tobytes(), lengths.astype("<i4").tobytes()


def _utf8_bytes(documents: list[str]) -> int:
    # Asking whether a string is ASCII costs nothing, and most are: then characters are bytes.
    return sum(len(text) if text.isascii() else len(text.encode()) for text in documents)


def _comparison_sample(documents: list[str]) -> list[str]:
    """The first documents of a block up to SAMPLE_BYTES, a huge one cut."""
    sample: list[str] = []
    room = COMPARED_BYTES
    for document in documents:
        sample.append(document[:room])
        room -= len(sample[-1])
        if room <= 0:
            break
    return sample


Tag = TypeVar("Tag")


@dataclass(frozen=True)
class BlockTask(Generic[Tag]):
    """A block to tokenise; `tag` comes back with the result untouched."""

    block: TextBlock
    key: str
    where: str
    compare: bool
    tag: Tag


@dataclass(frozen=True)
class NumberedTask(Generic[Tag]):
    """A job with its place in the order."""

    number: int
    job: BlockTask[Tag]


class TaskDispatcher(Generic[Tag]):
    """Runs servers over jobs. A server is called once with the dealer, and takes and answers until there is no more."""

    def __init__(
        self, jobs: Iterable[BlockTask[Tag]], servers: Sequence[Callable[[TaskDispatcher[Tag]], None]], in_flight: int
    ) -> None:
        self._jobs, self._servers = jobs, servers
        self._slots = threading.Semaphore(in_flight)
        self._todo: queue.SimpleQueue[NumberedTask[Tag] | None] = queue.SimpleQueue()
        self._answers: dict[int, tuple[Tag, TokenBlock] | BaseException] = {}
        self._changed = threading.Condition()
        self._total: int | None = None
        self._stopping = False

    def take(self, *, wait: bool = True) -> NumberedTask[Tag] | None:
        """For servers: the next job, or None when there is no more; `queue.Empty` if none can be had at once."""
        item = self._todo.get(block=wait)
        return None if self._stopping else item

    def answer(self, item: NumberedTask[Tag], answer: TokenBlock | BaseException) -> None:
        """For servers: hand in a result, or what went wrong."""
        self._put(item.number, answer if isinstance(answer, BaseException) else (item.job.tag, answer))

    def results(self) -> Generator[tuple[Tag, TokenBlock]]:
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

    def _put(self, number: int, answer: tuple[Tag, TokenBlock] | BaseException) -> None:
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
                self._todo.put(NumberedTask(number, job))
                number += 1
        except BaseException as error:
            self._put(number, error)
            return
        with self._changed:
            self._total = number
            self._changed.notify_all()
        for _ in self._servers:
            self._todo.put(None)


BLOCKS_AHEAD = 2
"""Blocks a worker is given at a time: one to work on, one waiting, so that it never idles for its pipe."""


def start_fork_server() -> multiprocessing.context.ForkServerContext:
    """Start the process that workers are forked from; called early, its imports overlap with ours.

    It imports the encoder once and forks workers that share it; unlike fork from this process it is safe beside our
    threads, and the workers inherit no pipe, so that each one sees it when we are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainshed.data.tokenize.preload"])
    multiprocessing.forkserver.ensure_running()
    return context


class WorkerProcess:
    """Our end of one worker."""

    def __init__(self, options: BlockTokenizerConfig) -> None:
        context = start_fork_server()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_worker_main, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()

    def hello(self) -> tuple[str, str]:
        """Wait until it is ready; return the name of its encoder and why it was chosen."""
        answer = self._receive()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def serve(self, dealer: TaskDispatcher[Any]) -> None:
        """Pass jobs to the worker and its answers back, until there are no more."""
        waiting: list[NumberedTask[Any]] = []
        more = True
        try:
            while more or waiting:
                if more and len(waiting) < BLOCKS_AHEAD:
                    try:
                        # With answers outstanding, do not sit on the queue: the worker may have something to say.
                        item = dealer.take(wait=not waiting)
                    except queue.Empty:
                        pass
                    else:
                        more = item is not None
                        if item is not None:
                            waiting.append(item)
                            self._send(replace(item.job, tag=None))
                        continue
                answer = self._receive()
                dealer.answer(waiting.pop(0), answer)
        except TrainshedError as died:
            for item in waiting:
                dealer.answer(item, died)

    def stop(self) -> None:
        """End it, kindly at first."""
        self._pipe.close()
        self.process.join(timeout=1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _send(self, item: object) -> None:
        try:
            self._pipe.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._died() from None

    def _died(self) -> TrainshedError:
        self.process.join(timeout=5)
        return TrainshedError(
            f"a tokenising worker died (exit code {self.process.exitcode})",
            hint="-9 usually means out of memory: write fewer --workers. A rerun goes on where this stopped",
        )


def _worker_main(connection: Connection, options: BlockTokenizerConfig) -> None:
    """The worker's end: announce the encoder, then answer blocks until the pipe closes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer = BlockTokenizer(options)
        connection.send((tokenizer.encoder.name, tokenizer.reason))
    except Exception as error:
        connection.send(error)
        return
    inbox: queue.Queue[Any] = queue.Queue(maxsize=1)
    threading.Thread(target=_drain_pipe, args=(connection, inbox), daemon=True).start()
    while (item := inbox.get()) is not None:
        try:
            answer: object = tokenizer.tokens(item)
        except Exception as error:
            answer = error if isinstance(error, TrainshedError) else RuntimeError(f"{type(error).__name__}: {error}")
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def _drain_pipe(connection: Connection, inbox: queue.Queue[Any]) -> None:
    """Keep the pipe empty while the worker computes, so that neither side can block the other for ever."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(None)


INLINE_BYTES = 16 * 1024 * 1024
"""Below this, starting workers takes longer than the work."""

MAX_THREAD_WORKERS = 4
"""The most workers that are threads: one core parses some 600 MB/s of JSON, four encode as much."""

TOKENIZER_THREADS = 2
"""One parses while the encoder, on all cores, has the other's documents."""

BLOCKS_PER_CALL = 4
"""Blocks that threads encode in one call: over less than some 10 MB the encoder cannot keep its cores busy."""


def default_workers(inputs: Sequence[InputSlice]) -> int:
    """One worker per core that we may use; for a few megabytes, the work is done in this thread."""
    small = sum(item.read_bytes for item in inputs) < INLINE_BYTES
    return 1 if small else len(os.sched_getaffinity(0))


def prestart_workers(workers: int) -> None:
    """Begin what takes time before workers can start; called early, it runs beside our own imports."""
    if workers > MAX_THREAD_WORKERS:
        start_fork_server()


class WorkerPool:
    """The workers of one preparation."""

    def __init__(self, options: BlockTokenizerConfig, workers: int) -> None:
        self._options, self.workers = options, workers
        self.encoder_name = ""
        self.encoder_reason = ""
        self._here: BlockTokenizer | None = None
        self.processes: list[WorkerProcess] = []

    def __enter__(self) -> WorkerPool:
        if self.workers <= MAX_THREAD_WORKERS:
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

    def map(self, jobs: Iterable[BlockTask[Tag]]) -> Generator[tuple[Tag, TokenBlock]]:
        """Tokenise jobs; results come in the order of the jobs, the first error ends it."""
        here = self._here
        if here is None:
            servers = [worker.serve for worker in self.processes]
            yield from TaskDispatcher(jobs, servers, in_flight=len(servers) * BLOCKS_AHEAD + 4).results()
        elif self.workers > 1:

            def serve(dealer: TaskDispatcher[Tag]) -> None:
                _serve_in_thread(dealer, here)

            yield from TaskDispatcher(
                jobs, [serve] * TOKENIZER_THREADS, in_flight=BLOCKS_PER_CALL * (TOKENIZER_THREADS + 1)
            ).results()
        else:
            for job in jobs:
                yield job.tag, here.tokens(job)


def _serve_in_thread(dealer: TaskDispatcher[Tag], tokenizer: BlockTokenizer) -> None:
    """Tokenise in this thread, several blocks at a time where several are waiting."""
    more = True
    while more:
        together: list[NumberedTask[Tag]] = []
        while more and len(together) < BLOCKS_PER_CALL:
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
