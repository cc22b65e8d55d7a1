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
import multiprocessing.resource_tracker
import os
import queue
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainshed.data.text.reader import BadLine, extract_documents
from trainshed.data.tokenize.encoders import EncodedBatch, Encoder, EncoderName, choose_encoder, require_reference_ids
from trainshed.data.tokenize.tokenizer import Tokenizer
from trainshed.errors import TrainshedError
from trainshed.signals import delayed_interrupt
from trainshed.this_machine import usable_cpus

if TYPE_CHECKING:
    from trainshed.data.chat.tokenize import ChatSettings, ConversationTokenizer
    from trainshed.data.text.reader import InputSlice, TextBlock
    from trainshed.data.tokens.shard_writer import ChatCounts


COMPARED_BYTES = 64 * 1024
"""How much of a shard is encoded by both encoders: enough to meet most kinds of text, and quick for the slow one."""


@dataclass(frozen=True)
class BlockTokenizerConfig:
    """What every worker needs: the same for all blocks of a preparation. With `chat`, rows are conversations."""

    tokenizer: Tokenizer
    eod: int | None
    bos: int | None
    dtype: str
    encoder: EncoderName = "auto"
    chat: ChatSettings | None = None

    def block_tokenizer(self, *, parallel: bool = False) -> BlockTokenizer | ConversationTokenizer:
        """Return what turns blocks into tokens; `parallel` lets the encoder of text use several cores by itself."""
        if self.chat is None:
            return BlockTokenizer(self, parallel=parallel)
        from trainshed.data.chat.tokenize import ConversationTokenizer

        return ConversationTokenizer(self.tokenizer, self.chat, self.dtype, self.encoder)

    @property
    def max_threads(self) -> int:
        """The most workers that are threads. Templates hold the interpreter lock, so threads do not help them."""
        return MAX_THREAD_WORKERS if self.chat is None else 1


@dataclass(frozen=True)
class TokenBlock:
    """A block as tokens: `data` is T tokens in the file's dtype, `lengths` N int32 (0: an empty document).

    Conversations also say which tokens are `learned`: T bytes, 0 or 1.
    """

    data: bytes
    lengths: bytes
    documents: int
    text_bytes: int
    bad_lines: list[BadLine] = field(default_factory=list)
    learned: bytes | None = None
    chat: ChatCounts | None = None


Tag = TypeVar("Tag")


@dataclass(frozen=True)
class BlockTask(Generic[Tag]):
    """A block to tokenize; `tag` comes back with the result untouched."""

    block: TextBlock
    key: str
    where: str
    check_against_reference: bool
    tag: Tag


class BlockTokenizer:
    """Turns blocks into tokens; `parallel` lets the encoder use several cores by itself."""

    def __init__(self, options: BlockTokenizerConfig, *, parallel: bool = False) -> None:
        self._options = options
        self.encoder: Encoder
        self.encoder, self.reason = choose_encoder(options.tokenizer, options.encoder, parallel=parallel)

    def tokenize_block(self, task: BlockTask[Any]) -> TokenBlock:
        """Parse and encode one block, with its special tokens."""
        (tokens,) = self.tokenize_blocks([task])
        return tokens

    def tokenize_blocks(self, tasks: Sequence[BlockTask[Any]]) -> list[TokenBlock]:
        """Tokenize several blocks with one call of the encoder."""
        extracted = [extract_documents(task.block, task.key) for task in tasks]
        for task, (documents, _) in zip(tasks, extracted, strict=True):
            if task.check_against_reference and self._options.encoder != "tokenizers":
                require_reference_ids(self._options.tokenizer, self.encoder, comparison_sample(documents), task.where)
        encoded = self.encoder.encode([document for documents, _ in extracted for document in documents])
        parts = encoded.split([len(documents) for documents, _ in extracted])
        return [
            TokenBlock(*self.add_special_tokens(part), len(documents), utf8_bytes(documents), bad_lines)
            for part, (documents, bad_lines) in zip(parts, extracted, strict=True)
        ]

    def add_special_tokens(self, encoded: EncodedBatch) -> tuple[bytes, bytes]:
        """Put BOS before and EOD after each document that is not empty, in the file's dtype."""
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


def utf8_bytes(documents: list[str]) -> int:
    """Return how many bytes documents have in UTF-8."""
    # Whether a string is ASCII is known at no cost, and most are: then its characters are its bytes.
    return sum(len(text) if text.isascii() else len(text.encode()) for text in documents)


def comparison_sample(documents: list[str]) -> list[str]:
    """Return the first documents of a block up to COMPARED_BYTES; a huge one is cut."""
    sample: list[str] = []
    room = COMPARED_BYTES
    for document in documents:
        sample.append(document[:room])
        room -= len(sample[-1])
        if room <= 0:
            break
    return sample


@dataclass(frozen=True)
class NumberedTask(Generic[Tag]):
    """A task with its number in the order of results."""

    number: int
    task: BlockTask[Tag]


class TaskDispatcher(Generic[Tag]):
    """Runs workers over tasks. A worker is called once with the dispatcher; it takes and answers tasks to the end."""

    def __init__(
        self, tasks: Iterable[BlockTask[Tag]], workers: Sequence[Callable[[TaskDispatcher[Tag]], None]], in_flight: int
    ) -> None:
        self._tasks, self._workers = tasks, workers
        self._in_flight = threading.Semaphore(in_flight)
        self._todo: queue.SimpleQueue[NumberedTask[Tag] | None] = queue.SimpleQueue()
        self._answers: dict[int, tuple[Tag, TokenBlock] | BaseException] = {}
        self._changed = threading.Condition()
        self._total: int | None = None
        self._stopping = False

    def take(self, *, wait: bool = True) -> NumberedTask[Tag] | None:
        """For workers: return the next task, or None after the last; without `wait`, it may raise `queue.Empty`."""
        item = self._todo.get(block=wait)
        return None if self._stopping else item

    def answer(self, item: NumberedTask[Tag], answer: TokenBlock | BaseException) -> None:
        """For workers: hand in a result or an error."""
        self._put(item.number, answer if isinstance(answer, BaseException) else (item.task.tag, answer))

    def results(self) -> Generator[tuple[Tag, TokenBlock]]:
        """Yield every result in the order of the tasks; the first error ends it."""
        threads = [threading.Thread(target=self._read, daemon=True)]
        threads += [threading.Thread(target=worker, args=(self,), daemon=True) for worker in self._workers]
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
                self._in_flight.release()
                number += 1
                yield answer
        finally:
            self._stopping = True
            self._in_flight.release()
            for _ in self._workers:
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
            for task in self._tasks:
                self._in_flight.acquire()
                if self._stopping:
                    return
                self._todo.put(NumberedTask(number, task))
                number += 1
        except BaseException as error:
            self._put(number, error)
            return
        with self._changed:
            self._total = number
            self._changed.notify_all()
        for _ in self._workers:
            self._todo.put(None)


BLOCKS_AHEAD = 2
"""Blocks that a worker has at a time: one to work on, one waiting, so that it is never idle."""


def start_fork_server() -> multiprocessing.context.ForkServerContext:
    """Start the process that workers are forked from. If called early, its imports overlap with ours.

    It imports the encoders once, and the workers share them. Unlike a fork of this process it is safe beside our
    threads. The workers inherit no pipe, so each one notices when we are killed.
    """
    context = multiprocessing.get_context("forkserver")
    # A module that is not installed is passed over. awkward is by far the slowest import of gigatoken.
    context.set_forkserver_preload(["trainshed.data.tokenize.workers", "awkward", "gigatoken", "tokenizers", "jinja2"])
    multiprocessing.resource_tracker.ensure_running()  # first, as it lets SIGINT through again
    # A terminal sends Ctrl-C to all of us. We end the workers ourselves; a blocked signal is inherited by them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


class WorkerProcess:
    """Our end of a worker process."""

    def __init__(self, options: BlockTokenizerConfig) -> None:
        context = start_fork_server()
        self._pipe, worker_end = context.Pipe()
        self.process = context.Process(target=_worker_main, args=(worker_end, options), daemon=True)
        with delayed_interrupt():  # half of what it is sent would leave a traceback of its own
            self.process.start()
        worker_end.close()

    def wait_until_ready(self) -> tuple[str, str]:
        """Wait until it is ready; return the name of its encoder and why it was chosen."""
        answer = self._receive()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def run(self, dispatcher: TaskDispatcher[Any]) -> None:
        """Pass tasks to the process and its answers back, until there are no more."""
        waiting: list[NumberedTask[Any]] = []
        more = True
        try:
            while more or waiting:
                if more and len(waiting) < BLOCKS_AHEAD:
                    try:
                        # While answers are outstanding, do not block on the queue: one may arrive.
                        item = dispatcher.take(wait=not waiting)
                    except queue.Empty:
                        pass
                    else:
                        more = item is not None
                        if item is not None:
                            waiting.append(item)
                            self._send(replace(item.task, tag=None))
                        continue
                answer = self._receive()
                dispatcher.answer(waiting.pop(0), answer)
        except TrainshedError as error:
            for item in waiting:
                dispatcher.answer(item, error)

    def stop(self) -> None:
        """End the process: close its pipe, then kill it if it does not exit."""
        self._pipe.close()
        self.process.join(timeout=1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _send(self, item: object) -> None:
        try:
            self._pipe.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise self._worker_died_error() from None

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._worker_died_error() from None

    def _worker_died_error(self) -> TrainshedError:
        self.process.join(timeout=5)
        return TrainshedError(
            f"a tokenising worker died (exit code {self.process.exitcode})",
            hint="-9 usually means out of memory: write fewer --workers. A rerun goes on where this stopped",
        )


def _worker_main(connection: Connection, options: BlockTokenizerConfig) -> None:
    """Run in the worker process: send the name of the encoder, then answer blocks until the pipe closes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer = options.block_tokenizer()
        connection.send((tokenizer.encoder.name, tokenizer.reason))
    except Exception as error:
        connection.send(error)
        return
    inbox: queue.Queue[Any] = queue.Queue(maxsize=1)
    threading.Thread(target=_drain_pipe, args=(connection, inbox), daemon=True).start()
    while (item := inbox.get()) is not None:
        try:
            answer: object = tokenizer.tokenize_block(item)
        except Exception as error:
            answer = error if isinstance(error, TrainshedError) else RuntimeError(f"{type(error).__name__}: {error}")
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def _drain_pipe(connection: Connection, inbox: queue.Queue[Any]) -> None:
    """Keep the pipe empty while the worker computes, so that neither side blocks the other for ever."""
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
    """Return one worker per core that we may use; for a few megabytes one, which is this thread."""
    small = sum(item.read_bytes for item in inputs) < INLINE_BYTES
    return 1 if small else usable_cpus()


def prestart_workers(workers: int, *, chat: bool = False) -> None:
    """Start early what workers need, so that it runs beside our own imports."""
    if workers > (1 if chat else MAX_THREAD_WORKERS):
        start_fork_server()


class WorkerPool:
    """The workers of one preparation."""

    def __init__(self, options: BlockTokenizerConfig, workers: int) -> None:
        self._options, self.workers = options, workers
        self.encoder_name = ""
        self.encoder_reason = ""
        self._inline_tokenizer: BlockTokenizer | ConversationTokenizer | None = None
        self.processes: list[WorkerProcess] = []

    def __enter__(self) -> WorkerPool:
        if self.workers <= self._options.max_threads:
            if self.workers > 1:
                # The encoders' thread pools read it when they first start. A value that is set already stays.
                os.environ.setdefault("RAYON_NUM_THREADS", str(self.workers))
            self._inline_tokenizer = self._options.block_tokenizer(parallel=self.workers > 1)
            self.encoder_name, self.encoder_reason = self._inline_tokenizer.encoder.name, self._inline_tokenizer.reason
            return self
        try:
            self.processes = [WorkerProcess(self._options) for _ in range(self.workers)]
            for worker in self.processes:
                self.encoder_name, self.encoder_reason = worker.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.processes:
            worker.stop()
        self.processes = []

    def map(self, tasks: Iterable[BlockTask[Tag]]) -> Generator[tuple[Tag, TokenBlock]]:
        """Tokenize tasks; results come in the order of the tasks, the first error ends it."""
        tokenizer = self._inline_tokenizer
        if tokenizer is None:
            workers = [worker.run for worker in self.processes]
            yield from TaskDispatcher(tasks, workers, in_flight=len(workers) * BLOCKS_AHEAD + 4).results()
        elif self.workers > 1:

            def run_in_thread(dispatcher: TaskDispatcher[Tag]) -> None:
                _tokenize_in_thread(dispatcher, tokenizer)

            yield from TaskDispatcher(
                tasks, [run_in_thread] * TOKENIZER_THREADS, in_flight=BLOCKS_PER_CALL * (TOKENIZER_THREADS + 1)
            ).results()
        else:
            for task in tasks:
                yield task.tag, tokenizer.tokenize_block(task)


def _tokenize_in_thread(dispatcher: TaskDispatcher[Tag], tokenizer: BlockTokenizer | ConversationTokenizer) -> None:
    """Tokenize in this thread; if several blocks are waiting, several at a time."""
    more = True
    while more:
        batch: list[NumberedTask[Tag]] = []
        while more and len(batch) < BLOCKS_PER_CALL:
            try:
                item = dispatcher.take(wait=not batch)
            except queue.Empty:
                break
            more = item is not None
            batch += [item] if item is not None else []
        try:
            answers = tokenizer.tokenize_blocks([item.task for item in batch])
        except Exception:
            # One of them is at fault: find out which, in order.
            for item in batch:
                try:
                    dispatcher.answer(item, tokenizer.tokenize_block(item.task))
                except Exception as error:
                    dispatcher.answer(item, error)
        else:
            for item, answer in zip(batch, answers, strict=True):
                dispatcher.answer(item, answer)
