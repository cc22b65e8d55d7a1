"""A worker process: takes blocks over a pipe and answers in order."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import queue
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from trainshed.data.encode.block_tokenizer import BlockTokenizer, TokenizeOptions
from trainshed.errors import TrainshedError

if TYPE_CHECKING:
    from trainshed.data.workers.dealing import Dealer, Numbered

BLOCKS_AHEAD = 2
"""Blocks a worker is given at a time: one to work on, one waiting, so that it never idles for its pipe."""


def start_fork_server() -> multiprocessing.context.ForkServerContext:
    """Start the process that workers are forked from; called early, its imports overlap with ours.

    It imports the encoder once and forks workers that share it; unlike fork from this process it is safe beside our
    threads, and the workers inherit no pipe, so that each one sees it when we are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainshed.data.workers.imports"])
    multiprocessing.forkserver.ensure_running()
    return context


class WorkerProcess:
    """Our end of one worker."""

    def __init__(self, options: TokenizeOptions) -> None:
        context = start_fork_server()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, options), daemon=True)
        self.process.start()
        theirs.close()

    def hello(self) -> tuple[str, str]:
        """Wait until it is ready; return the name of its encoder and why it was chosen."""
        answer = self._receive()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def serve(self, dealer: Dealer[Any]) -> None:
        """Pass jobs to the worker and its answers back, until there are no more."""
        waiting: list[Numbered[Any]] = []
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


def _work(connection: Connection, options: TokenizeOptions) -> None:
    """The worker's end: announce the encoder, then answer blocks until the pipe closes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer = BlockTokenizer(options)
        connection.send((tokenizer.encoder.name, tokenizer.reason))
    except Exception as error:
        connection.send(error)
        return
    inbox: queue.Queue[Any] = queue.Queue(maxsize=1)
    threading.Thread(target=_take, args=(connection, inbox), daemon=True).start()
    while (item := inbox.get()) is not None:
        try:
            answer: object = tokenizer.tokens(item)
        except Exception as error:
            answer = error if isinstance(error, TrainshedError) else RuntimeError(f"{type(error).__name__}: {error}")
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def _take(connection: Connection, inbox: queue.Queue[Any]) -> None:
    """Keep the pipe empty while the worker computes, so that neither side can block the other for ever."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(None)
